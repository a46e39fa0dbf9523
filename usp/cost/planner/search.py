"""The search for the fastest layouts that fit into memory, by the time and memory models.

Best first, through bounds that only grow. A layout is

    bounded    by its time with all activations saved, without the traffic of parameters
    saved      with an option that saves activations, bounded by the time of that
    sharded    with a ZeRO stage and a number of replicas, bounded with the traffic of parameters
    checked    if it fits into memory, and timed

so whatever is reached next with its own time is faster than everything that has not been reached. Of each family, the
configurations with the same axes, only the fastest is of interest; the others are dropped once it is known.

Optimizer offload adds copies and an update on the host, which is slower than the device's, and saves no other time, so
at each of these states it is tried only for what does not fit, or cannot, without it.

Pure: the predictor is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from usp.config import TrainConfig
from usp.cost.time.step_time import StepTime
from usp.model.facts import ModelFacts
from usp.train.validate import violations

from .layouts import Question, layouts, placements, recomputations, savings, shardings

FAMILIES = 6  # in a report


@dataclass(frozen=True)
class Predictor:
    """Functions of a configuration.

    Attributes:
        seconds: the time of its step.
        least_seconds: a lower bound of it for any sharding; least_sharded_seconds: one for this sharding.
        peak_bytes: the peak memory of the rank that needs most.
        least_bytes: a lower bound of it, which is least for the sharding of `recomputations`.
        least_saved_bytes: a lower bound of it for a layout, with any option that saves memory.
        host_bytes: what the ranks of one host keep in its memory, on the host that keeps most.
    """

    seconds: Callable[[TrainConfig], StepTime]
    least_seconds: Callable[[TrainConfig], float]
    least_sharded_seconds: Callable[[TrainConfig], float]
    peak_bytes: Callable[[TrainConfig], int]
    least_bytes: Callable[[TrainConfig], int]
    least_saved_bytes: Callable[[TrainConfig], int]
    host_bytes: Callable[[TrainConfig], int]

    def fits(self, config: TrainConfig, memory: Memory) -> bool:
        return self.peak_bytes(config) <= memory.device and self.host_bytes(config) <= memory.host

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
    """Return the axes that a configuration uses, outermost first; dp may shard and replicate."""
    degrees = {"pp": config.pp, "dp": config.dp_replicate * config.dp_shard}
    degrees |= {name: getattr(config, name) for name in ("sp_ring", "sp_ulysses", "tp", "ep")}
    return tuple(name for name, degree in degrees.items() if degree > 1)


def search(
    question: Question,
    facts: ModelFacts,
    predictor: Predictor,
    memory: Memory,
    *,
    every: Sequence[TrainConfig] | None = None,
    keep: int = FAMILIES,
    report: Callable[[int, int], None] = lambda tried, layouts: None,
) -> Found:
    """Search the fastest configurations, of `keep` families, that need at most `memory` on every rank and host.

    every: the layouts to search, by default all. report: is told now and then how many of them were tried, and how many
    there are.
    """
    found = list(layouts(question, facts)) if every is None else every
    order = count()  # among equally fast ones, the first
    queue: list[tuple[float, int, str, Candidate | TrainConfig]] = []
    best: dict[tuple[str, ...], Candidate] = {}
    tried = 0

    def within(config: TrainConfig, least_bytes: Callable[[TrainConfig], int]) -> TrainConfig | None:
        return next((one for one in placements(config, question) if least_bytes(one) <= memory.device), None)

    def push(least: float, state: str, item: Candidate | TrainConfig) -> None:
        heappush(queue, (least, next(order), state, item))

    for layout in found:
        push(predictor.least_seconds(layout), "bounded", layout)
    while queue and len(best) < keep:
        least, _, state, item = heappop(queue)
        config = item.config if isinstance(item, Candidate) else item
        if family(config) in best:
            continue
        if isinstance(item, Candidate):
            best[family(config)] = item
        elif state == "bounded":
            report(tried, len(found))
            tried += 1
            if smallest := within(config, predictor.least_saved_bytes):
                for each in recomputations(smallest, facts):
                    if option := within(each, predictor.least_bytes):
                        push(max(least, predictor.least_seconds(option)), "saved", option)
        elif state == "saved":
            for each in shardings(config):
                if option := within(each, predictor.least_bytes):
                    push(max(least, predictor.least_sharded_seconds(option)), "sharded", option)
        elif violations(config, question.world_size, facts):
            continue
        elif predictor.fits(config, memory):
            candidate = predictor.candidate(config)
            push(candidate.time.total, "checked", candidate)
        else:
            for away in list(placements(config, question))[1:]:
                push(max(least, predictor.least_sharded_seconds(away)), "sharded", away)
    return Found(tuple(best.values()), len(found), tried)


def tightest(question: Question, facts: ModelFacts, predictor: Predictor, host: float = math.inf) -> Candidate | None:
    """Return the configuration that needs least memory of a device, and at most `host` bytes of a host; None if there
    is no layout."""
    least: tuple[int, TrainConfig] | None = None
    bounds = [
        (min(map(predictor.least_saved_bytes, placements(config, question))), config)
        for config in layouts(question, facts)
    ]
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
