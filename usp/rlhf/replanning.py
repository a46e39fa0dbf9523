"""Re-planning of a run: its options, what its steps took, and whether another plan is worth the change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch.distributed as dist

from usp.parallel.groups import gather_objects
from usp.rlhf.plan.plan import ExecutionPlan, to_mapping
from usp.rlhf.runtime.executor import StepResult
from usp.rlhf.runtime.measure import StepLengths
from usp.rlhf.runtime.timeline import Event, activities
from usp.run.output import LineFile
from usp.train.checkpoints import from_first_rank

from .config import ReplanOptions
from .graph import DataflowGraph

DECISIONS_FILE = "replan.jsonl"
_CALLS = ("generate", "inference", "train_step", "compute")


@dataclass(frozen=True)
class MeasuredStep:
    """A step as it was. seconds: of each call, see `call_seconds`."""

    number: int
    lengths: StepLengths
    seconds: Mapping[str, float]


def call_seconds(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds that the rank that works longest on each call of a step does so, from all ranks' events."""
    seconds: dict[str, float] = {}
    for activity in activities(events):
        if activity.event.kind in _CALLS:
            seconds[activity.event.name] = max(activity.work, seconds.get(activity.event.name, 0.0))
    return seconds


@dataclass(frozen=True)
class Decision:
    """Two plans for the steps that remain."""

    step: int  # after which it is taken
    remaining: int  # number of steps that follow
    best: ExecutionPlan  # to change to
    running_seconds: float  # predicted for a step of the running plan
    best_seconds: float  # and of the best
    gain: float  # the least part of a step's time that is worth a change
    nbytes: int = 0  # of weights and optimizer states that ranks send each other for the change
    move_seconds: float = 0.0  # in which they are sent
    build_seconds: float = 0.0  # in which models are built, and ranks get ready
    search_seconds: float = 0.0  # in which the plan was searched, which are spent in either case
    why_not: str = ""  # why the best plan cannot run, whatever it would gain

    @property
    def switch_seconds(self) -> float:
        """Remaining cost of the change."""
        return self.move_seconds + self.build_seconds

    @property
    def relative_gain(self) -> float:
        """The part of a step's time that the best plan saves."""
        return 1 - self.best_seconds / self.running_seconds if self.running_seconds else 0.0

    @property
    def saved_seconds(self) -> float:
        """What the change saves over the steps that remain, without what it costs."""
        return self.remaining * (self.running_seconds - self.best_seconds)

    @property
    def switches(self) -> bool:
        return not self.verdict

    @property
    def verdict(self) -> str:
        """Why the running plan stays; empty if it does not."""
        if self.why_not:
            return self.why_not
        if self.best_seconds >= self.running_seconds:
            return "no faster plan is found"
        if self.relative_gain < self.gain:
            return f"a step would be {self.relative_gain:.1%} faster, and {self.gain:.1%} is asked for"
        if self.saved_seconds <= self.switch_seconds:
            return f"the change takes {self.switch_seconds:.2f} s and saves {self.saved_seconds:.2f} s"
        return ""

    def line(self) -> str:
        """Return the decision with its figures."""
        return (
            f"replan after step {self.step}: a step takes {self.running_seconds:.3f} s by prediction, and "
            f"{self.best_seconds:.3f} s with the best plan ({self.relative_gain:.1%} less); {self.remaining} steps "
            f"remain, and the change moves {self.nbytes / 2**20:.1f} MiB in {self.switch_seconds:.2f} s: "
            f"{self.verdict or 'changing the plan'}"
        )

    def metrics(self) -> dict[str, float]:
        """Return the figures for the record of the step."""
        return {
            "replan/running_seconds": self.running_seconds,
            "replan/best_seconds": self.best_seconds,
            "replan/switch_bytes": float(self.nbytes),
            "replan/switch_seconds": self.switch_seconds,
            "replan/search_seconds": self.search_seconds,
            "replan/switched": float(self.switches),
        }


# Returns the decision after the last of the measured steps, all of which ran under the running plan; further arguments:
# how many steps follow, and `Decision.build_seconds`. Raises ValueError if nothing can be predicted.
Replanner = Callable[[ExecutionPlan, Sequence[MeasuredStep], int, float], Decision]


@dataclass(eq=False)
class Replanning:
    """The steps that ran since the last decision. Every rank calls every method, in the same order."""

    options: ReplanOptions
    replanner: Replanner  # used on rank 0
    graph: DataflowGraph
    steps: int  # of the run
    build_seconds: float  # what the models took to build for the running plan
    file: LineFile  # has every decision, a line each, with the plan that it is about
    _ran: list[tuple[int, StepLengths, tuple[Event, ...]]] = field(default_factory=list)
    _warm: bool = False  # whether a step ran under this plan before those that are remembered

    def due(self, number: int) -> bool:
        """Return whether a decision follows step `number`."""
        return number % self.options.every == 0 and number < self.steps

    def add(self, number: int, result: StepResult) -> None:
        """Remember a step."""
        self._ran.append((number, StepLengths.of_step(self.graph, result.lengths), result.events))

    def decide(self, running: ExecutionPlan) -> Decision:
        """Return the decision after the step that was added last; rank 0 says and writes it. Collective. Raises
        ConfigurationError on every rank, if nothing can be predicted."""
        gathered = gather_objects([events for _, _, events in self._ran])
        measured = [
            MeasuredStep(number, lengths, call_seconds(chain.from_iterable(of_ranks)))
            for (number, lengths, _), *of_ranks in zip(self._ran, *gathered, strict=True)
        ]
        if not self._warm and len(measured) > 1:
            del measured[0]  # which took longer than those after it will
        remaining = self.steps - measured[-1].number
        decision = from_first_rank(lambda: self.replanner(running, measured, remaining, self.build_seconds))
        self._ran, self._warm = [], not decision.switches
        if dist.get_rank() == 0:
            print(decision.line(), flush=True)
            line = {"step": decision.step, **decision.metrics(), "plan": to_mapping(decision.best)}
            self.file.append(decision.step, [json.dumps(line)])
        return decision

    def changed(self, decision: Decision, seconds: float) -> None:
        """Learn from a change of plans how long the next one takes. seconds: that it took."""
        self.build_seconds = max(0.0, seconds - decision.move_seconds)
