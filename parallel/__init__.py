"""Who holds what: degrees, meshes, sharding. Knows nothing of attention. Each file imports only earlier ones:

dims, agree, mesh, fsdp, wire, testing.
"""

from __future__ import annotations

from .agree import agree
from .dims import SP_ORDERS, ParallelDims
from .fsdp import apply_fsdp
from .mesh import ParallelMesh

__all__ = ["SP_ORDERS", "ParallelDims", "ParallelMesh", "agree", "apply_fsdp"]
