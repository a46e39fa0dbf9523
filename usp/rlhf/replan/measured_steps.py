"""What the steps of a run took. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from usp.rlhf.runtime.activity import activities
from usp.rlhf.runtime.step_lengths import StepLengths
from usp.rlhf.runtime.timeline import Event

_CALLS = ("generate", "inference", "train_step", "compute")


@dataclass(frozen=True)
class MeasuredStep:
    """A step as it was. seconds: of each call, see `call_seconds`."""

    number: int
    lengths: StepLengths
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
