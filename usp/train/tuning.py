"""When another layout is worth a change, and the race of layouts over the first steps of a run (train.py --plan tune).

Every layout gives the same losses and weights, so candidates run the run's own steps in turn, and none of these is
wasted. What a race costs is the time that its steps take beyond as many of the fastest candidate, with the moves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from usp.config import CHOSEN, TrainConfig
from usp.run.metrics import seconds
from usp.run.tables import Grid

from .checkpoints import from_first_rank

TUNE_FILE = "tune.jsonl"
COUNTED = 3  # steps of a candidate that count, after one that allocates, connects and compiles
ROUNDS = 3  # of so many steps, for candidates that cannot be told apart
HOPELESS = 1.5  # times the fastest median: a candidate with such a step ends early
CLOSE = 0.02  # medians that differ by less, or by less than twice what their steps do, are not told apart
OPTIONS = (*CHOSEN, "compile")  # in which candidates differ
T = TypeVar("T")


@dataclass(frozen=True)
class Decision(Generic[T]):
    """Two layouts for the steps that remain.

    step: after which it is taken. remaining: number of steps that follow. best: to change to. running_seconds,
    best_seconds: of a step. gain: the least part of it that is worth a change. switch_seconds: what that costs, with
    the `nbytes` of weights and optimizer states that are sent. search_seconds: spent in either case. why_not: why the
    best cannot run, whatever it would gain.
    """

    step: int
    remaining: int
    best: T
    running_seconds: float
    best_seconds: float
    gain: float = 0.0
    nbytes: int = 0
    switch_seconds: float = 0.0
    search_seconds: float = 0.0
    why_not: str = ""

    @property
    def relative_gain(self) -> float:
        """The part of a step's time that the best layout saves."""
        return 1 - self.best_seconds / self.running_seconds if self.running_seconds else 0.0

    @property
    def verdict(self) -> str:
        """Why the running layout stays; empty if it does not."""
        saved = self.remaining * (self.running_seconds - self.best_seconds)
        if self.why_not:
            return self.why_not
        if self.best_seconds >= self.running_seconds:
            return "no faster plan is found"
        if self.relative_gain < self.gain:
            return f"a step would be {self.relative_gain:.1%} faster, and {self.gain:.1%} is asked for"
        if saved <= self.switch_seconds:
            return f"the change takes {self.switch_seconds:.2f} s and saves {saved:.2f} s"
        return ""

    def line(self) -> str:
        """Return the decision with its figures."""
        moves = f"moves {self.nbytes / 2**20:.1f} MiB in" if self.nbytes else "takes"
        return (
            f"after step {self.step}: a step takes {self.running_seconds:.3f} s, and {self.best_seconds:.3f} s with "
            f"the best plan ({self.relative_gain:.1%} less); {self.remaining} steps remain, and the change {moves} "
            f"{self.switch_seconds:.2f} s: {self.verdict or 'changing the plan'}"
        )

    def figures(self, prefix: str = "") -> dict[str, float]:
        """Return what a record holds of the decision."""
        found = {"running_seconds": self.running_seconds, "best_seconds": self.best_seconds}
        found |= {"switch_seconds": self.switch_seconds, "search_seconds": self.search_seconds}
        found |= {"switch_bytes": float(self.nbytes), "switched": float(not self.verdict)}
        return {f"{prefix}{name}": value for name, value in found.items()}


@dataclass(frozen=True)
class Trial:
    """A candidate and what it took.

    config: differs from those of other candidates only in `OPTIONS`. predicted: seconds of its step.
    seconds: of its steps that count, without waiting for data. first: of the first step after each move to it.
    moving: of these moves. failed: why it cannot run.
    """

    config: TrainConfig
    name: str
    predicted: float
    seconds: tuple[float, ...] = ()
    first: tuple[float, ...] = ()
    moving: float = 0.0
    failed: str = ""

    @property
    def median(self) -> float:
        return median(self.seconds) if self.seconds and not self.failed else math.inf

    @property
    def spread(self) -> float:
        """The median difference of a step from the median, relative to it."""
        return median(abs(each - self.median) for each in self.seconds) / self.median

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self.config, name) for name in OPTIONS}


def fastest(trials: Sequence[Trial]) -> int:
    """Return the candidate with the lowest median; the first that has not failed if none is measured."""
    return min(range(len(trials)), key=lambda index: (trials[index].median, bool(trials[index].failed)))


def cost(trials: Sequence[Trial]) -> float:
    """Return the seconds that the steps so far took beyond as many of the fastest, with the moves."""
    best = trials[fastest(trials)].median
    if best == math.inf:
        return 0.0
    slower = (max(0.0, sum(took - best for took in chain(each.seconds, each.first))) for each in trials)
    return sum(slower) + sum(each.moving for each in trials)


def next_trial(trials: Sequence[Trial], current: int, allowed: float) -> int | None:
    """Return the candidate whose step is next; None when the fastest is known, or the race has cost what is `allowed`.

    Each candidate runs `COUNTED` steps, unless it fails or is `HOPELESS`; then those that are close to the fastest take
    turns, for up to `ROUNDS` rounds. A candidate that by its prediction would cost more than is left is skipped. Pure.
    """
    best = trials[fastest(trials)]
    if cost(trials) > allowed:
        return None

    def hopeless(trial: Trial) -> bool:
        return bool(trial.failed) or min(trial.seconds, default=0.0) > HOPELESS * best.median

    now = trials[current]
    if not hopeless(now) and (not now.seconds or len(now.seconds) % COUNTED):
        return current
    for index, trial in enumerate(trials):
        if not (trial.seconds or trial.failed) and cost(trials) + _expected(trial, trials, best) <= allowed:
            return index
    close = [index for index, each in enumerate(trials) if each.seconds and not hopeless(each) and _close(each, best)]
    left = [index for index in close if len(trials[index].seconds) < COUNTED * ROUNDS]
    return min(left, key=lambda index: len(trials[index].seconds)) if len(close) > 1 and left else None


def _close(trial: Trial, best: Trial) -> bool:
    return trial.median <= (1 + max(CLOSE, 2 * (trial.spread + best.spread))) * best.median


def _expected(trial: Trial, trials: Sequence[Trial], best: Trial) -> float:
    """Return what a trial will cost: by its prediction, relative to that of the fastest, and by the moves so far."""
    if best.median == math.inf:
        return 0.0
    slower = best.median * max(0.0, trial.predicted / best.predicted - 1)
    return min((COUNTED + 1) * slower, HOPELESS * best.median) + _move_seconds(trials, best)


def _move_seconds(trials: Sequence[Trial], best: Trial) -> float:
    """Return what a move costs, with the first step after it: the median of those so far, or a step."""
    moves = [each.moving / len(each.first) + max(each.first) - best.median for each in trials if each.first]
    return median(moves) if moves else best.median


@dataclass(eq=False)
class Tuner:
    """The race of a run. Every rank calls every method, in the same order; rank 0 decides.

    trials: the candidates; the run begins with the first. share: of the time of the run's steps that the race may cost.
    ask: what else to try, after all trials; used once, on rank 0. decision: at the end of the race.
    """

    trials: list[Trial]
    share: float
    ask: Callable[[Sequence[Trial]], Sequence[Trial]] = lambda trials: ()
    current: int = 0
    decision: Decision[Trial] | None = None
    _asked: bool = False
    _first: bool = True  # whether the next step is the first with its engine
    _moved: bool = False  # whether that is due to the race

    def next(self, done: int, remaining: int) -> Trial:
        """Return the candidate that runs the next step, and all that remain if there is a `decision`, after the steps
        that are done."""
        chosen, self.trials, self.decision = from_first_rank(lambda: self._decide(done, remaining))
        return self.trials[chosen]

    def _decide(self, done: int, remaining: int) -> tuple[int, list[Trial], Decision[Trial] | None]:
        allowed = self.share * remaining * min(each.median for each in self.trials)
        chosen = next_trial(self.trials, self.current, allowed)
        if chosen is None and not self._asked:
            self._asked = True
            self.trials += self.ask(self.trials)
            chosen = next_trial(self.trials, self.current, allowed)
        if chosen is not None:
            return chosen, self.trials, None
        now, chosen = self.trials[self.current], fastest(self.trials)
        best = self.trials[chosen]
        cost_of_move = _move_seconds(self.trials, best)
        decision = Decision(done, remaining, best, now.median, best.median, switch_seconds=cost_of_move)
        return self.current if decision.verdict and not now.failed else chosen, self.trials, decision

    def moved(self, trial: Trial, took: float, failed: str = "") -> None:
        """Note a move to a candidate, which lasted so many seconds, or why it failed."""
        index = self.trials.index(trial)
        self.trials[index] = replace(trial, moving=trial.moving + took, failed=failed)
        if not failed:
            self.current, self._first, self._moved = index, True, True

    def ran(self, took: float, counts: bool = True) -> None:
        """Note the seconds of a step of the current candidate; one that does not count is traced."""
        trial = self.trials[self.current]
        if self._first:
            self.trials[self.current] = replace(trial, first=(*trial.first, took) if self._moved else ())
        elif counts:
            self.trials[self.current] = replace(trial, seconds=(*trial.seconds, took))
        self._first = False

    def line(self, world_size: int) -> str:
        """Return the decision as a line of RUN/tune.jsonl."""
        assert self.decision is not None
        chosen, tried = self.trials[self.current].options, []
        for each in self.trials:
            tried.append({"layout": each.name, **vars(each), "config": each.options})
        found = {"world_size": world_size, "chosen": chosen, "cost_seconds": cost(self.trials), "trials": tried}
        return json.dumps({"step": self.decision.step, **self.decision.figures(), **found})

    def table(self) -> Grid:
        """Return the trials as a table, with the decision."""
        assert self.decision is not None
        best, rows = self.trials[fastest(self.trials)], []
        for each in sorted(self.trials, key=lambda trial: trial.median):
            took = seconds(each.median) if each.seconds and not each.failed else each.failed or "not tried"
            slower = f"{each.median / best.median - 1:+.1%}" if each.median < math.inf else ""
            rows.append((each.name, seconds(each.predicted), took, slower, str(len(each.seconds))))
        spent = f"{seconds(cost(self.trials))}, {cost(self.trials) / best.median:.1f} steps"
        title = f"tuned, at the cost of {spent}: {self.trials[self.current].name} stays; {self.decision.line()}"
        return Grid(title, ("layout", "predicted", "measured", "slower", "steps"), tuple(rows))


def decided(folder: Path, world_size: int) -> dict[str, Any] | None:
    """Return the options that a run of as many ranks has chosen; None where it has not."""
    try:
        lines = [json.loads(line) for line in (folder / TUNE_FILE).read_text().splitlines()]
        found = [line["chosen"] for line in lines if line["world_size"] == world_size]
        return {name: found[-1][name] for name in OPTIONS}
    except (OSError, ValueError, LookupError, TypeError):
        return None
