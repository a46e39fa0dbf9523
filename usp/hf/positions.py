"""What transformers' layers count or measure by themselves, made to follow positions instead of a rank's tokens:

    dynamic and longrope rotary embeddings   turn by the length of each token's document
    Llama 4's scales of queries              grow with the position
    RoBERTa's learned positions              begin behind that of padding

`usp.hf.probe` verifies that a model then computes from some of its tokens what it computes from all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Places:
    """Where the tokens of the current forward are: their positions (B, S) in their documents, and a function that
    returns the last position of each token's document, (B, S) or (B, 1)."""

    positions: Tensor
    last: Callable[[], Tensor]


def follow_positions(base: nn.Module, places: Places) -> None:
    """Let a backbone's layers read `places`, which each forward sets, in place of what they count, in place."""
    for name, module in base.named_modules():
        kinds = getattr(module, "rope_type", None)  # of a rotary embedding
        if {"dynamic", "longrope"} & set(kinds.values() if isinstance(kinds, dict) else [kinds]):
            module.forward = partial(_turned_by_length, module, module.forward, places)
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.attn_temperature_tuning = False  # type: ignore[assignment]
            module.unified_sp_places = places  # type: ignore[assignment]
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings") and module.padding_idx is not None:
            module.register_forward_pre_hook(lambda table, args: (args[0] + table.padding_idx + 1,))


def scaled_query(module: nn.Module, query: Tensor) -> Tensor:
    """Return the queries (B, N, S, H) of an attention module with the scale that it left to positions, if any.

    Scalable-softmax of Llama 4's layers without rotary positions (arXiv 2501.19399).
    """
    places: Any = getattr(module, "unified_sp_places", None)
    if places is None:
        return query
    scale: Any = module.attn_scale
    steps = torch.floor((places.positions.float() + 1) / module.floor_scale)
    return (query * (torch.log1p(steps) * scale + 1)[:, None, :, None]).to(query.dtype)


def _turned_by_length(
    rotary: Any, forward: Callable[..., Any], places: Places, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Return cos and sin (B, S, H) of a rotary embedding whose frequencies depend on the longest position: those of
    each document by itself. `forward` runs once for all documents that turn alike."""
    kind = rotary.rope_type[kwargs["layer_type"]] if "layer_type" in kwargs else rotary.rope_type
    last = places.last().to(position_ids.device)
    if kind == "longrope":
        rope = rotary.config.rope_parameters
        limit = rope.get(kwargs.get("layer_type"), rope)["original_max_position_embeddings"]
        longest = last.clamp(limit - 1, limit)
    else:
        longest = last.clamp(min=rotary.original_max_seq_len - 1)
        forward(x, position_ids[..., :1] * 0, *args, **kwargs)  # frequencies would stay those of a longer sequence
    parts: tuple[Tensor, ...] = ()
    for length in longest.unique().tolist():  # ascending
        alike = longest == length
        # Padding after the last token must not make the sequence longer.
        positions = torch.where(alike, position_ids.minimum(last), 0)
        positions = torch.cat((positions, positions.new_full((*positions.shape[:-1], 1), length)), dim=-1)
        turned = [part[..., :-1, :] for part in forward(x, positions, *args, **kwargs)]
        parts = tuple(torch.where(alike.unsqueeze(-1), *pair) for pair in zip(turned, parts or turned, strict=True))
    return parts
