"""Re-planning of a run: what its steps took, and when it asks for another plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch.distributed as dist

from usp.parallel.groups import gather_objects
from usp.rlhf.plan.plan import ExecutionPlan, to_mapping
from usp.rlhf.runtime.executor import StepResult
from usp.rlhf.runtime.measure import StepLengths
from usp.rlhf.runtime.timeline import Event, activities
from usp.run.output import LineFile
from usp.train.checkpoints import from_first_rank
from usp.train.tuning import Decision

from .config import ReplanOptions
from .graph import DataflowGraph

DECISIONS_FILE = "replan.jsonl"
FIGURES = "replan/"  # what metrics of a decision begin with
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


# Returns the decision after the last of the measured steps, all of which ran under the running plan, as if no step
# followed and models were built in no time; and the factors of predictions that the steps leave of those before. Raises
# ValueError if nothing can be predicted.
Factors = Mapping[str, Mapping[str, float]]  # by call and layout
Replanner = Callable[[ExecutionPlan, Sequence[MeasuredStep], Factors], tuple[Decision[ExecutionPlan], Factors]]


@dataclass(eq=False)
class Replanning:
    """The steps that ran since the last decision. Every rank calls every method, in the same order."""

    options: ReplanOptions
    replanner: Replanner  # used on rank 0
    graph: DataflowGraph
    steps: int  # of the run
    build_seconds: float  # what the models took to build for the running plan
    file: LineFile  # has every decision, a line each, with the plan that it is about
    factors: Factors = field(default_factory=dict)  # after the last decision
    _ran: list[tuple[int, StepLengths, tuple[Event, ...]]] = field(default_factory=list)
    _warm: bool = False  # whether a step ran under this plan before those that are remembered

    def due(self, number: int) -> bool:
        """Return whether a decision follows step `number`."""
        return number % self.options.every == 0 and number < self.steps

    def add(self, number: int, result: StepResult) -> None:
        """Remember a step."""
        self._ran.append((number, StepLengths.of_step(self.graph, result.lengths), result.events))

    def decide(self, running: ExecutionPlan) -> Decision[ExecutionPlan]:
        """Return the decision after the step that was added last; rank 0 says and writes it. Collective. Raises
        ConfigurationError on every rank, if nothing can be predicted."""
        gathered = gather_objects([events for _, _, events in self._ran])
        measured = [
            MeasuredStep(number, lengths, call_seconds(chain.from_iterable(of_ranks)))
            for (number, lengths, _), *of_ranks in zip(self._ran, *gathered, strict=True)
        ]
        if not self._warm and len(measured) > 1:
            del measured[0]  # which took longer than those after it will
        found, self.factors = from_first_rank(lambda: self.replanner(running, measured, self.factors))
        switch_seconds = found.switch_seconds + self.build_seconds
        decision = replace(found, remaining=self.steps - found.step, switch_seconds=switch_seconds)
        self._ran, self._warm = [], bool(decision.verdict)
        if dist.get_rank() == 0:
            print(f"replan {decision.line()}", flush=True)
            line = {"step": decision.step, **decision.figures(FIGURES), "plan": to_mapping(decision.best)}
            self.file.append(decision.step, [json.dumps(line)])
        return decision

    def changed(self, decision: Decision[ExecutionPlan], seconds: float) -> None:
        """Learn from a change of plans, which took so many seconds, how long models take to build in the next one."""
        self.build_seconds = max(0.0, self.build_seconds + seconds - decision.switch_seconds)
