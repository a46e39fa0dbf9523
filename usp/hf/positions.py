"""What transformers' layers count or measure by themselves, made to follow positions instead of a rank's tokens:

    dynamic and longrope rotary embeddings   turn by the length of each token's document, and scale (Phi-3.5-MoE)
    Llama 4's scales of queries              grow with the position
    RoBERTa's learned positions              begin behind that of padding

`usp.hf.probe` verifies that a model then computes from some of its tokens what it computes from all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

BY_LENGTH = {"dynamic", "longrope"}  # rotary embeddings
SCALE = "short_mscale"  # of rotary embeddings up to their original length; from there on there is another one


@dataclass
class Places:
    """Where the tokens of the current forward are: their positions (B, S) in their documents, and a function that
    returns the last position of each token's document, (B, S) or (B, 1)."""

    positions: Tensor
    last: Callable[[], Tensor]


def turns_by_length(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding whose frequencies or scales depend on a text's length."""
    kinds = getattr(module, "rope_type", None)
    scaled = kinds and SCALE in (getattr(getattr(module, "config", None), "rope_parameters", None) or {})
    return bool(scaled or BY_LENGTH & set(kinds.values() if isinstance(kinds, dict) else [kinds]))


def follow_positions(base: nn.Module, places: Places) -> None:
    """Let a backbone's layers read `places`, which each forward sets, in place of what they count, in place.

    Attention functions get the keyword argument `query_positions` where `scaled_query` needs it.
    """
    counting = False
    module: Any
    for name, module in base.named_modules():
        if turns_by_length(module):
            module.forward = partial(_turned_by_length, module, module.forward, places)
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.attn_temperature_tuning, module.scale_by_position = False, True
            counting = True
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings") and module.padding_idx is not None:
            module.register_forward_pre_hook(lambda table, args: (args[0] + table.padding_idx + 1,))
    if counting:
        base.register_forward_pre_hook(partial(_with_query_positions, places), with_kwargs=True)


def _with_query_positions(places: Places, base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """Pass positions as an argument, which recomputation in a backward repeats."""
    return args, {**kwargs, "query_positions": places.positions}


def scaled_query(module: nn.Module, query: Tensor, positions: Tensor | None) -> Tensor:
    """Return the queries (B, N, S, H) of an attention module with the scale that it no longer applies itself, if any.

    Scalable softmax (arXiv 2501.19399), in steps of `floor_scale` positions, in Llama 4's layers without rotary ones.
    """
    if not getattr(module, "scale_by_position", False):
        return query
    assert positions is not None
    floor, factor = cast(float, module.floor_scale), cast(float, module.attn_scale)
    scale = torch.log1p(torch.floor((positions.float() + 1) / floor)) * factor + 1
    return (query * scale[:, None, :, None]).to(query.dtype)


def _turned_by_length(
    rotary: Any, forward: Callable[..., Any], places: Places, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Tensor | tuple[Tensor, ...]:
    """Return cos and sin (B, S, H), or complex numbers, of a rotary embedding whose frequencies depend on the longest
    position: those of each document by itself. `forward` runs once for all documents that turn alike."""
    layer_type = kwargs.get("layer_type", *args)
    kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    rope = rotary.config.rope_parameters.get(layer_type, rotary.config.rope_parameters)
    if kind not in BY_LENGTH and SCALE not in rope:  # of other layers than those that made this function necessary
        return forward(x, position_ids, *args, **kwargs)
    last = places.last().to(position_ids.device)
    if kind != "dynamic":
        limit = rope["original_max_position_embeddings"]
        longest = last.clamp(limit - 1, limit)
    else:
        longest = last.clamp(min=rotary.original_max_seq_len - 1)
        forward(x, position_ids[..., :1] * 0, *args, **kwargs)  # frequencies would stay those of a longer sequence
    parts: Any = ()
    for length in longest.unique().tolist():  # ascending
        alike = longest == length
        # Padding after the last token must not make the sequence longer.
        positions = torch.where(alike, position_ids.minimum(last), 0)
        positions = torch.cat((positions, positions.new_full((*positions.shape[:-1], 1), length)), dim=-1)
        found = forward(x, positions, *args, **kwargs)
        turned = [part[..., :-1, :] for part in ((found,) if isinstance(found, Tensor) else found)]
        parts = tuple(torch.where(alike.unsqueeze(-1), *pair) for pair in zip(turned, parts or turned, strict=True))
    return parts[0] if isinstance(found, Tensor) else parts
