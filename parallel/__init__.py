"""Parallelism for any model: degrees, meshes and process groups; data (FSDP2), pipeline, tensor and expert parallelism;
resharding and checkpoints of distributed tensors; a hardware model; a counter of sent bytes.

Independent of attention. Each file imports only earlier ones:

violation, dims, stages, groups, mesh, reallocation, fsdp, pipeline, tensor, expert, checkpoint, wire, cluster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cluster.hardware import Hardware, Link, Tier, load_hardware, node_names, node_of, peak_flops
from .cluster.links import (
    ReallocSeconds,
    host_link_seconds,
    message_seconds,
    overlap_of,
    realloc_seconds,
    transfer_seconds,
)
from .dims import SP_ORDERS, ZERO_STAGES, ParallelDims, divisors
from .groups import ProcessGroups, RanksDisagree, agree, format_ranks
from .mesh import ParallelMesh, local_tensor
from .reallocation.delta import DeltaReallocation
from .reallocation.param_layout import ParamLayout, gather_layout
from .reallocation.realloc_plan import ReallocPlan, plan_realloc
from .reallocation.reallocation import Reallocation
from .stages import (
    PP_SCHEDULES,
    PipelineSchedule,
    bubble_fraction,
    micro_batch_violation,
    rank_stages,
    schedule_violation,
    stage_layers,
    stages_violation,
)
from .violation import Violation, all_of, option, violation_of

if TYPE_CHECKING:
    from .checkpoint.checkpointer import DAMAGED, Checkpointer, complete_checkpoints, latest, set_aside, verify
    from .checkpoint.safetensors_storage import DamagedCheckpoint, read_extra
    from .fsdp import apply_fsdp, before_micro_batch, clip_grad_norm

_SLOW = {
    ".checkpoint.checkpointer": ("DAMAGED", "Checkpointer", "complete_checkpoints", "latest", "set_aside", "verify"),
    ".checkpoint.safetensors_storage": ("DamagedCheckpoint", "read_extra"),
    ".fsdp": ("apply_fsdp", "before_micro_batch", "clip_grad_norm"),
}


def __dir__() -> list[str]:
    return [*globals(), *(name for names in _SLOW.values() for name in names)]


def __getattr__(name: str) -> Any:
    """Import on first use what takes most of a second to import: torch's distributed checkpoints and FSDP."""
    for module, names in _SLOW.items():
        if name in names:
            return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
