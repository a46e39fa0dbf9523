"""What the value of a key looks like, known before it is made: ranks post what they will receive.

A generate call's keys, and the tokens that an inference call reads, may have a prefix ("greedy_tokens"), so that a
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
    """Attributes:
    dtype: of its values.
    tokens: the key whose values have as many entries; "": its values are single numbers.
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
    """The name of `GENERATED` that a key has behind its prefix; "" if it has none."""
    return next((name for name in GENERATED if key == name or key.endswith(f"_{name}")), "")


def tokens_key(call: ModelCall) -> str:
    """The key of the sequences that a call reads or makes; "" if it has none."""
    keys = call.outputs if isinstance(call.work, Generate) else call.inputs
    return next((key for key in keys if canonical(key) == "tokens"), "")


def key_kinds(graph: DataflowGraph) -> dict[str, KeyKind]:
    """The kind of every key that a call of the graph gives.

    Raises:
        ValueError: naming the calls whose outputs no value can be foreseen for.
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
        raise ValueError(f"{', '.join(lost)}: one entry per token, but of no tokens; name single numbers in `scalars`")
    return kinds


def _violations(call: ModelCall) -> Iterator[str]:
    known = ", ".join(GENERATED)
    if isinstance(call.work, Generate):
        wrong = [key for key in call.outputs if not canonical(key)]
        if wrong:
            yield f"generate call {call.name!r} gives {wrong}, but can give only {known}, with or without a prefix"
        if not tokens_key(call):
            yield f"generate call {call.name!r} must give tokens"
    elif isinstance(call.work, Inference) and not tokens_key(call):
        yield f"inference call {call.name!r} takes {call.inputs}, but needs tokens"
