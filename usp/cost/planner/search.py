"""The search for the fastest layouts that fit into memory, by the time and memory models.

    layouts     every choice of degrees (usp.cost.planner.layouts)
    floor       each layout's time with all activations saved: no option that saves memory is faster
    feasible    in the order of the floors, each layout's fastest option that fits, until no floor can beat the best

Pure: the predictor is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from usp.config import TrainConfig
from usp.cost.time.step_time import StepTime
from usp.model.facts import ModelFacts

from .layouts import Question, layouts, savings


@dataclass(frozen=True)
class Predictor:
    """Functions for the time of a configuration's step, and for the peak memory of the rank that needs most."""

    seconds: Callable[[TrainConfig], StepTime]
    peak_bytes: Callable[[TrainConfig], int]


@dataclass(frozen=True)
class Candidate:
    config: TrainConfig
    time: StepTime
    peak_bytes: int


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: configurations that fit, the fastest first.
        tightest: of those that do not fit, the one that needs least memory.
        layouts, tried: the number of layouts, and of those that were checked against the memory.
    """

    best: tuple[Candidate, ...]
    tightest: Candidate | None
    layouts: int
    tried: int


def search(
    question: Question, facts: ModelFacts, predictor: Predictor, memory_bytes: float, *, keep: int = 10
) -> Found:
    """Search the `keep` fastest configurations that need at most `memory_bytes` on every rank."""
    floors = [(predictor.seconds(config), config) for config in layouts(question, facts)]
    floors.sort(key=lambda floor: floor[0].total)
    best: list[Candidate] = []
    tightest: Candidate | None = None
    tried = 0
    for floor, config in floors:
        if len(best) == keep and floor.total >= best[-1].time.total:
            break
        tried += 1
        candidate = _fastest_that_fits(config, question, facts, predictor, memory_bytes)
        if candidate.peak_bytes <= memory_bytes:
            best = sorted([*best, candidate], key=lambda found: found.time.total)[:keep]
        elif tightest is None or candidate.peak_bytes < tightest.peak_bytes:
            tightest = candidate
    return Found(tuple(best), tightest, len(floors), tried)


def _fastest_that_fits(
    config: TrainConfig, question: Question, facts: ModelFacts, predictor: Predictor, memory_bytes: float
) -> Candidate:
    """Return a layout's fastest option that fits, or the one that needs least memory if none does."""
    peaks = [(predictor.peak_bytes(found), found) for found in savings(config, question, facts)]
    fitting = [(peak, found) for peak, found in peaks if peak <= memory_bytes]
    if not fitting:
        peak, found = min(peaks, key=lambda pair: pair[0])
        return Candidate(found, predictor.seconds(found), peak)
    timed = [Candidate(found, predictor.seconds(found), peak) for peak, found in fitting]
    return min(timed, key=lambda candidate: candidate.time.total)
