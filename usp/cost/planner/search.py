"""The search for the fastest layouts that fit into memory, by the time and memory models.

Best first, through bounds that only grow. A layout is

    bounded    by its compute with all activations saved, without communication
    timed      with all activations saved: no option that saves memory is faster
    opened     into its options, each bounded by its own compute
    checked    an option that fits into memory is timed

so whatever is reached next with its own time is faster than everything that has not been reached. Of each family, the
configurations with the same axes, only the fastest is of interest; the others are dropped once it is known.

Pure: the predictor is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from usp.config import TrainConfig
from usp.cost.time.step_time import StepTime
from usp.model.facts import ModelFacts

from .layouts import Question, layouts, savings

FAMILIES = 6  # in a report


@dataclass(frozen=True)
class Predictor:
    """Functions of a configuration.

    Attributes:
        seconds: the time of its step.
        least_seconds: a lower bound of it.
        peak_bytes: the peak memory of the rank that needs most.
        least_bytes: a lower bound of it.
        least_saved_bytes: a lower bound of it for a layout, with any option that saves memory.
        host_bytes: what the ranks of one host keep in its memory, on the host that keeps most.
    """

    seconds: Callable[[TrainConfig], StepTime]
    least_seconds: Callable[[TrainConfig], float]
    peak_bytes: Callable[[TrainConfig], int]
    least_bytes: Callable[[TrainConfig], int]
    least_saved_bytes: Callable[[TrainConfig], int]
    host_bytes: Callable[[TrainConfig], int]

    def candidate(self, config: TrainConfig) -> Candidate:
        return Candidate(config, self.seconds(config), self.peak_bytes(config), self.host_bytes(config))


@dataclass(frozen=True)
class Memory:
    """Usable bytes: of a device, and of a host, whose devices share them."""

    device: float
    host: float = math.inf


@dataclass(frozen=True)
class Candidate:
    config: TrainConfig
    time: StepTime
    peak_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: the fastest configuration of each family that fits, the fastest first.
        layouts, tried: the number of layouts, and of those that were checked against the memory.
    """

    best: tuple[Candidate, ...]
    layouts: int
    tried: int


def family(config: TrainConfig) -> tuple[str, ...]:
    """Return the axes that a configuration uses, outermost first."""
    names = ("pp", "dp_replicate", "dp_shard", "sp_ring", "sp_ulysses", "tp", "ep")
    return tuple(name for name in names if getattr(config, name) > 1)


def search(
    question: Question,
    facts: ModelFacts,
    predictor: Predictor,
    memory: Memory,
    *,
    keep: int = FAMILIES,
    only: Callable[[TrainConfig], bool] = lambda layout: True,
    report: Callable[[int, int], None] = lambda tried, layouts: None,
) -> Found:
    """Search the fastest configurations, of `keep` families, that need at most `memory` on every rank and host.

    only: the layouts to search. report: is told now and then how many of them were tried, and how many there are.
    """
    every = [layout for layout in layouts(question, facts) if only(layout)]
    order = count()  # among equally fast ones, the first
    queue: list[tuple[float, int, str, Candidate | TrainConfig]] = [
        (predictor.least_seconds(config), next(order), "bounded", config) for config in every
    ]
    heapify(queue)
    best: dict[tuple[str, ...], Candidate] = {}
    tried = 0
    while queue and len(best) < keep:
        least, _, state, found = heappop(queue)
        config = found.config if isinstance(found, Candidate) else found
        if family(config) in best:
            continue
        if isinstance(found, Candidate):
            best[family(config)] = found
        elif state == "bounded":
            report(tried, len(every))
            tried += 1
            if predictor.least_saved_bytes(config) <= memory.device:
                heappush(queue, (predictor.seconds(config).total, next(order), "timed", config))
        elif state == "timed":
            for option in savings(config, question, facts):
                if predictor.least_bytes(option) > memory.device:
                    continue
                heappush(queue, (max(least, predictor.least_seconds(option)), next(order), "opened", option))
        elif predictor.peak_bytes(config) <= memory.device and predictor.host_bytes(config) <= memory.host:
            candidate = predictor.candidate(config)
            heappush(queue, (candidate.time.total, next(order), "checked", candidate))
    return Found(tuple(best.values()), len(every), tried)


def tightest(question: Question, facts: ModelFacts, predictor: Predictor, host: float = math.inf) -> Candidate | None:
    """Return the configuration that needs least memory of a device, and at most `host` bytes of a host; None if there
    is no layout."""
    least: tuple[int, TrainConfig] | None = None
    bounds = [(predictor.least_saved_bytes(config), config) for config in layouts(question, facts)]
    for bound, config in sorted(bounds, key=lambda pair: pair[0]):
        if least is not None and least[0] <= bound:
            break
        for option in savings(config, question, facts):
            if least is not None and least[0] <= predictor.least_bytes(option):
                continue
            if predictor.host_bytes(option) > host:
                continue
            peak = predictor.peak_bytes(option)
            least = (peak, option) if least is None or peak < least[0] else least
    return None if least is None else predictor.candidate(least[1])
