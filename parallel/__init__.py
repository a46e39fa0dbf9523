"""Who holds what: degrees, meshes, sharding. Knows nothing of attention. Each file imports only earlier ones:

dims, stages, agree, mesh, fsdp, grad_norm, pipeline, tensor, expert, safetensors_storage, checkpoint, wire, testing.
"""

from __future__ import annotations

from .agree import agree
from .dims import SP_ORDERS, ParallelDims
from .fsdp import ZERO_STAGES, apply_fsdp, before_micro_batch
from .grad_norm import clip_grad_norm
from .mesh import ParallelMesh
from .stages import PP_SCHEDULES, bubble_fraction, micro_batch_violation, rank_stages, stage_layers, stages_per_rank

__all__ = [
    "PP_SCHEDULES",
    "SP_ORDERS",
    "ZERO_STAGES",
    "ParallelDims",
    "ParallelMesh",
    "agree",
    "apply_fsdp",
    "before_micro_batch",
    "bubble_fraction",
    "clip_grad_norm",
    "micro_batch_violation",
    "rank_stages",
    "stage_layers",
    "stages_per_rank",
]
