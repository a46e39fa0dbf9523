"""Long-context training on a ring x ulysses mesh. Each file imports only earlier ones:

run, sp, data, losses, presets, fields, config, model, hf, predict, train, rlhf, planning,
evaluation, commands, __main__.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .sp.sequence import shard_batch, shard_sequence, unshard_sequence
from .sp.sp_attention import UnifiedSPAttention

if TYPE_CHECKING:
    from .hf.images import shard_image_batch
    from .hf.integrate import apply_unified_sp

__all__ = [
    "UnifiedSPAttention",
    "apply_unified_sp",
    "shard_batch",
    "shard_image_batch",
    "shard_sequence",
    "unshard_sequence",
]


def __getattr__(name: str) -> Any:
    """What needs transformers on first use: importing it takes seconds, and the layer alone does not need it."""
    if name == "apply_unified_sp":
        from .hf.integrate import apply_unified_sp

        return apply_unified_sp
    if name == "shard_image_batch":
        from .hf.images import shard_image_batch

        return shard_image_batch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
