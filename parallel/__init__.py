"""Who holds what: degrees, meshes, sharding. Knows nothing of attention. Each file imports only earlier ones:

dims, agree, mesh, tensor, fsdp, grad_norm, safetensors_storage, checkpoint, wire, testing.
"""

from __future__ import annotations

from .agree import agree
from .dims import SP_ORDERS, ParallelDims
from .fsdp import ZERO_STAGES, apply_fsdp, before_micro_batch
from .grad_norm import clip_grad_norm
from .mesh import ParallelMesh

__all__ = [
    "SP_ORDERS",
    "ZERO_STAGES",
    "ParallelDims",
    "ParallelMesh",
    "agree",
    "apply_fsdp",
    "before_micro_batch",
    "clip_grad_norm",
]
