"""What the steps of a run took, and the lengths of their samples. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from usp.rlhf.graph.calls import Generate
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import tokens_key
from usp.rlhf.runtime.activity import activities
from usp.rlhf.runtime.step_plan import PROMPTS
from usp.rlhf.runtime.timeline import Event

_CALLS = ("generate", "inference", "train_step", "compute")


@dataclass(frozen=True)
class Lengths:
    """Tokens of each sample's prompt and response, those of a prompt's samples one after another."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]

    @staticmethod
    def of(graph: DataflowGraph, lengths: Mapping[str, Sequence[int]]) -> Lengths:
        """Return those of the first call that generates, from the lengths of a step's sequences by key."""
        call = next(call for call in graph.calls if isinstance(call.work, Generate))
        prompts = lengths[PROMPTS]
        responses = (whole - prompt for whole, prompt in zip(lengths[tokens_key(call)], prompts, strict=True))
        return Lengths(tuple(prompts), tuple(responses))


@dataclass(frozen=True)
class MeasuredStep:
    """A step as it was. seconds: of each call, see `call_seconds`."""

    number: int
    lengths: Lengths
    seconds: Mapping[str, float]


def call_seconds(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of each call in a step: those of the rank that works on it longest.

    Args:
        events: of all ranks. What a rank waits for the others before a call begins does not count.
    """
    found: dict[str, float] = {}
    for activity in activities(events):
        if activity.event.kind in _CALLS:
            found[activity.event.name] = max(activity.work, found.get(activity.event.name, 0.0))
    return found
