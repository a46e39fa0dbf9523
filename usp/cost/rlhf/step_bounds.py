"""Lower bounds of simulated steps, which cost a fraction of a simulation: the calls of the busiest rank, or those of
the longest path. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from usp.rlhf.plan.plan import CallLayout

from .simulator import Simulator, rank_index


class StepBounds:
    """Lower bounds for plans whose calls have given options, or others."""

    def __init__(self, simulator: Simulator, options: Mapping[str, Sequence[CallLayout]]) -> None:
        self._calls, self._seconds_of = tuple(options), simulator.estimates.call_seconds
        self._world, graph = simulator.world_size, simulator.graph
        self._parts = 1 if simulator.barrier else simulator.steps  # without a barrier, the paths of steps overlap
        numbers = {name: number for number, name in enumerate(self._calls)}
        rollouts = {call.name for call in graph.rollouts}
        self._before = [
            (
                numbers[call.name],
                [
                    numbers[name]
                    for name in graph.before(call.name)
                    # With staleness, an iteration trains on other samples than it rolls out.
                    if not simulator.staleness or (name in rollouts) == (call.name in rollouts)
                ],
            )
            for call in graph.order
        ]
        self._seconds = [np.array([self._seconds_of(name, o) for o in of]) for name, of in options.items()]
        self._places: list[list[slice | list[int]]] = []  # by call, the different ranks of its options
        self._place: list[NDArray[np.int64]] = []  # and which of these each option has
        for of in options.values():
            places = {ranks: number for number, ranks in enumerate(dict.fromkeys(o.ranks for o in of))}
            self._places.append([rank_index(ranks) for ranks in places])
            self._place.append(np.array([places[o.ranks] for o in of], np.int64))

    def of(self, layouts: Sequence[CallLayout]) -> float:
        """Return the bound of a plan, with a layout for each call."""
        seconds = self._all_seconds(layouts)
        return max(float(self._busy(layouts, seconds).max()), self._longest(seconds))

    def of_options(self, layouts: Sequence[CallLayout], number: int) -> NDArray[np.float64]:
        """Return the bounds of the plans in which one call, by its number, has each of its options."""
        seconds, own = self._all_seconds(layouts), self._seconds[number]
        seconds[number] = 0.0
        busy, without = self._busy(layouts, seconds), self._longest(seconds)
        there = np.array([busy[at].max() for at in self._places[number]])[self._place[number]]
        seconds[number] = far = sum(seconds) + 1.0  # more than any path without the call
        through = self._longest(seconds) - far / self._parts
        least = max(float(busy.max()), without)
        found: NDArray[np.float64] = np.maximum(least, own + there)
        return np.maximum(found, through + own / self._parts)

    def _all_seconds(self, layouts: Sequence[CallLayout]) -> list[float]:
        return list(map(self._seconds_of, self._calls, layouts))

    def _busy(self, layouts: Sequence[CallLayout], seconds: Sequence[float]) -> NDArray[np.float64]:
        busy = np.zeros(self._world)
        for layout, each in zip(layouts, seconds, strict=True):
            busy[rank_index(layout.ranks)] += each
        return busy

    def _longest(self, seconds: Sequence[float]) -> float:
        ends = [0.0] * len(seconds)
        for number, before in self._before:
            ends[number] = seconds[number] + max([ends[one] for one in before], default=0.0)
        return max(ends) / self._parts
