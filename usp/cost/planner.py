"""Which degrees to train with: every layout that fits the memory, ranked by predicted time, with the reasons.

    layouts    every choice of degrees (usp.cost.search)
    optimistic each one's time with everything kept: no way to save memory is faster
    feasible   in that order, the fastest way to save memory that fits; until the next optimistic time is slower than
               all that are wanted

Pure: the time model and the memory model are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from usp.config import TrainConfig
from usp.costs import ModelFacts

from .search import Question, layouts, savings


@dataclass(frozen=True)
class Seconds:
    """A step's time by what it goes to; the parts add up."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True)
class Model:
    """What predicts.

    Attributes:
        seconds: of a step under a configuration.
        peak_bytes: of the rank that needs most.
        memory_bytes: of a device, what a plan may use.
    """

    seconds: Callable[[TrainConfig], Seconds]
    peak_bytes: Callable[[TrainConfig], int]
    memory_bytes: int


@dataclass(frozen=True)
class Candidate:
    config: TrainConfig
    seconds: Seconds
    peak_bytes: int


@dataclass(frozen=True)
class Verdict:
    """What a search found.

    Attributes:
        best: that fit, the fastest first.
        tightest: of those tried that do not fit, the one that needs least memory.
        layouts, tried: how many layouts there are, and how many of them were held against the memory.
    """

    best: tuple[Candidate, ...]
    tightest: Candidate | None
    layouts: int
    tried: int


def search(question: Question, facts: ModelFacts, model: Model, *, keep: int = 10) -> Verdict:
    """The `keep` fastest configurations that fit."""
    optimistic = sorted(
        ((model.seconds(config), config) for config in layouts(question, facts)), key=lambda pair: pair[0].total
    )
    best: list[Candidate] = []
    tightest: Candidate | None = None
    tried = 0
    for floor, config in optimistic:
        if len(best) == keep and floor.total >= best[-1].seconds.total:
            break
        tried += 1
        fits, too_large = _fastest_that_fits(config, question, facts, model)
        if fits is not None:
            best = sorted([*best, fits], key=lambda candidate: candidate.seconds.total)[:keep]
        elif tightest is None or too_large.peak_bytes < tightest.peak_bytes:
            tightest = too_large
    return Verdict(tuple(best), tightest, len(optimistic), tried)


def _fastest_that_fits(
    config: TrainConfig, question: Question, facts: ModelFacts, model: Model
) -> tuple[Candidate | None, Candidate]:
    """The fastest way to save memory that fits, and the one that needs least."""
    timed = sorted(
        ((model.seconds(found), found) for found in savings(config, question, facts)), key=lambda pair: pair[0].total
    )
    least: Candidate | None = None
    for seconds, found in timed:
        candidate = Candidate(found, seconds, model.peak_bytes(found))
        if candidate.peak_bytes <= model.memory_bytes:
            return candidate, candidate
        if least is None or candidate.peak_bytes < least.peak_bytes:
            least = candidate
    assert least is not None
    return None, least
