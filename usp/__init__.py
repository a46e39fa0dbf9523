"""Long-context training on a ring x ulysses mesh. Each file imports only earlier ones:

sp_axes, sequence, sp_attention, batch, loss, tokenizer, presets, config, costs, documents, data, metrics, launch,
failures, validate, hf, prepare, trainer, cli.
"""

from __future__ import annotations

from .batch import shard_batch
from .hf.integrate import apply_unified_sp
from .sequence import shard_sequence, unshard_sequence
from .sp_attention import UnifiedSPAttention

__all__ = ["UnifiedSPAttention", "apply_unified_sp", "shard_batch", "shard_sequence", "unshard_sequence"]
