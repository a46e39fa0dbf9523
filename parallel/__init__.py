"""Parallelism for any model: degrees, meshes and process groups; data (FSDP2), pipeline, tensor and expert parallelism;
resharding and checkpoints of distributed tensors; a hardware model; tools that measure traffic and memory.

Independent of attention. Each file imports only earlier ones:

local, dims, stages, groups, agree, mesh, reallocation, fsdp, grad_norm, pipeline, tensor, expert, checkpoint, wire,
memory, cluster, testing.
"""

from .agree import RanksDisagree, agree
from .checkpoint.checkpointer import Checkpointer, complete_checkpoints, latest, set_aside, verify
from .checkpoint.safetensors_storage import DamagedCheckpoint, read_extra
from .cluster.hardware import Hardware, Link, Tier, load_hardware, node_names, node_of, peak_flops
from .cluster.links import overlap_of, transfer_seconds
from .cluster.realloc_seconds import ReallocSeconds, message_seconds, realloc_seconds
from .dims import SP_ORDERS, ParallelDims, divisors
from .fsdp import ZERO_STAGES, apply_fsdp, before_micro_batch
from .grad_norm import clip_grad_norm
from .groups import ProcessGroups, format_ranks
from .local import local_tensor
from .mesh import ParallelMesh
from .reallocation.param_layout import ParamLayout, gather_layout
from .reallocation.realloc_plan import ReallocPlan, plan_realloc
from .reallocation.reallocation import Reallocation
from .stages import PP_SCHEDULES, bubble_fraction, micro_batch_violation, rank_stages, stage_layers, stages_per_rank
