"""The dtype and shape of every key, known before its values exist, so that receives can be posted in advance.

The keys of a generate call, and the tokens that an inference call reads, may have a prefix ("greedy_tokens"), so that a
graph can generate twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .calls import Compute, Generate, Inference, ModelCall
from .dataflow import DataflowGraph


@dataclass(frozen=True)
class KeyKind:
    """The dtype and shape of a key's values.

    Attributes:
        dtype: of the values.
        tokens: the key of the sequences that the values have one entry per token of; "" for one number per sample.
    """

    dtype: torch.dtype
    tokens: str


GENERATED = {
    "tokens": torch.int64,
    "mask": torch.float32,
    "logprobs": torch.float32,
    "finished": torch.bool,
    "prompt_length": torch.int64,
}
_GENERATED_SCALARS = ("finished", "prompt_length")


def canonical(key: str) -> str:
    """Strip the prefix from a key of `GENERATED`; "" for any other key."""
    return next((name for name in GENERATED if key == name or key.endswith(f"_{name}")), "")


def tokens_key(call: ModelCall) -> str:
    """Return the key of the sequences that a call reads or generates; "" if there is none."""
    keys = call.outputs if isinstance(call.work, Generate) else call.inputs
    return next((key for key in keys if canonical(key) == "tokens"), "")


def key_kinds(graph: DataflowGraph) -> dict[str, KeyKind]:
    """Return the kind of every key that a call of the graph produces.

    Raises:
        ValueError: naming the calls whose outputs have no known dtype and shape.
    """
    if violations := [text for call in graph.calls for text in _violations(call)]:
        raise ValueError("; ".join(violations))
    kinds: dict[str, KeyKind] = {}
    for call in graph.order:
        tokens = tokens_key(call)
        for key in call.outputs:
            if isinstance(call.work, Generate):
                name = canonical(key)
                kinds[key] = KeyKind(GENERATED[name], "" if name in _GENERATED_SCALARS else tokens)
            elif isinstance(call.work, Inference):
                kinds[key] = KeyKind(torch.float32, "" if call.work.head == "score" else tokens)
            elif isinstance(call.work, Compute):
                per_token = (kinds[name].tokens for name in call.inputs if name in kinds and kinds[name].tokens)
                own = tokens or next(per_token, "tokens")
                kinds[key] = KeyKind(torch.float32, "" if key in call.work.scalars else own)
    known = {*graph.given, *kinds}
    if lost := [key for key, kind in kinds.items() if kind.tokens and kind.tokens not in known]:
        raise ValueError(
            f"{', '.join(lost)}: per-token keys without tokens; list keys with one number per sample in `scalars`"
        )
    return kinds


def _violations(call: ModelCall) -> Iterator[str]:
    known = ", ".join(GENERATED)
    if isinstance(call.work, Generate):
        if wrong := [key for key in call.outputs if not canonical(key)]:
            yield f"generate call {call.name!r} produces {wrong}, expected {known}, with or without a prefix"
        if not tokens_key(call):
            yield f"generate call {call.name!r} must produce tokens"
    elif isinstance(call.work, Inference) and not tokens_key(call):
        yield f"inference call {call.name!r} must read tokens, got {call.inputs}"
