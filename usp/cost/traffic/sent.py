"""The bytes that one rank sends, by axis and collective, with the names and the arithmetic of `parallel.wire`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sent:
    """Payload bytes that leave one rank.

    Attributes:
        axis: of the mesh.
        collective: the name of torch's c10d operator.
        calls: messages or collectives, including those in which this rank sends nothing.
    """

    axis: str
    collective: str
    nbytes: int
    calls: int = 1

    def times(self, number: int) -> Sent:
        return Sent(self.axis, self.collective, number * self.nbytes, number * self.calls)


def all_reduce(axis: str, nbytes: int, ranks: int, functional: bool = False) -> Sent:
    """Return an all-reduce of `nbytes`: a reduce-scatter and an all-gather. functional: as DTensor redistributes."""
    return Sent(axis, "all_reduce" if functional else "allreduce_", 2 * (nbytes * (ranks - 1) // ranks))


def merged(parts: Iterable[Sent]) -> tuple[Sent, ...]:
    """Return one entry per axis and collective, the most bytes first."""
    nbytes: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for part in parts:
        nbytes[part.axis, part.collective] += part.nbytes
        calls[part.axis, part.collective] += part.calls
    found = [Sent(*key, nbytes[key], calls[key]) for key in calls if calls[key]]
    return tuple(sorted(found, key=lambda sent: (-sent.nbytes, sent.axis, sent.collective)))
