"""Long-context training on a ring x ulysses mesh. Each file imports only earlier ones:

run, sp, data, losses, fields, presets, optimizers, config, model, hf, predict, train, rlhf, planning,
commands, __main__.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hf.images import shard_image_batch
    from .hf.integrate import apply_unified_sp
    from .sp.mask import Mask
    from .sp.sequence import shard_batch, shard_sequence, unshard_sequence
    from .sp.sp_attention import JointAttention, SparseAttention, UnifiedSPAttention

__all__ = [
    "JointAttention",
    "Mask",
    "SparseAttention",
    "UnifiedSPAttention",
    "apply_unified_sp",
    "shard_batch",
    "shard_image_batch",
    "shard_sequence",
    "unshard_sequence",
]

_FILES = {
    "JointAttention": ".sp.sp_attention",
    "Mask": ".sp.mask",
    "SparseAttention": ".sp.sp_attention",
    "UnifiedSPAttention": ".sp.sp_attention",
    "apply_unified_sp": ".hf.integrate",
    "shard_image_batch": ".hf.images",
}


def __getattr__(name: str) -> Any:
    """A public name on first use: torch and transformers take seconds, and processes of environments need neither."""
    if name in __all__:
        return getattr(importlib.import_module(_FILES.get(name, ".sp.sequence"), __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
