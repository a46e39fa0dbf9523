"""Measure the steps of a run, and ask for another plan from time to time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.plan.plan_text import to_mapping
from usp.rlhf.runtime.executor import StepResult
from usp.rlhf.runtime.step_lengths import StepLengths
from usp.rlhf.runtime.timeline import Event
from usp.run.output import LineFile
from usp.train.claim import from_first_rank

from .measured_steps import MeasuredStep, call_seconds
from .replan_decision import Decision
from .replan_options import ReplanOptions

DECISIONS_FILE = "replan.jsonl"


class Replanner(Protocol):
    """What predicts steps, and searches plans."""

    def decide(
        self, running: ExecutionPlan, measured: Sequence[MeasuredStep], remaining: int, build_seconds: float
    ) -> Decision:
        """Return the decision after the last of the measured steps, all of which ran under the running plan.

        Args:
            remaining: number of steps that follow.
            build_seconds: see `SwitchCost`.

        Raises:
            ValueError: if nothing can be predicted.
        """


class Replanning:
    """The steps that ran since the last decision. Every rank calls every method, in the same order.

    Args:
        replanner: used on rank 0.
        steps: of the run.
        build_seconds: what the models took to build for the first plan.
        folder: of the run, for its decisions.

    Attributes:
        file: every decision, a line each, with the plan that it is about.
    """

    def __init__(
        self,
        options: ReplanOptions,
        replanner: Replanner,
        graph: DataflowGraph,
        steps: int,
        build_seconds: float,
        folder: Path,
    ) -> None:
        self._options, self._replanner, self._graph, self._steps = options, replanner, graph, steps
        self.file = LineFile(folder / DECISIONS_FILE)
        self._build_seconds = build_seconds
        self._ran: list[tuple[int, StepLengths, tuple[Event, ...]]] = []
        self._warm = False  # whether a step ran under this plan before those that are remembered

    def due(self, number: int) -> bool:
        """Return whether a decision follows step `number`."""
        return number % self._options.every == 0 and number < self._steps

    def add(self, number: int, result: StepResult) -> None:
        """Remember a step."""
        self._ran.append((number, StepLengths.of(self._graph, result.lengths), result.events))

    def decide(self, running: ExecutionPlan) -> Decision:
        """Return the decision after the step that was added last; rank 0 says and writes it. Collective.

        Raises:
            ConfigurationError: on every rank, if nothing can be predicted.
        """
        own = [events for _, _, events in self._ran]
        gathered = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        each = [[event for of_rank in gathered for event in of_rank[place]] for place in range(len(own))]
        measured = [
            MeasuredStep(number, lengths, call_seconds(events))
            for (number, lengths, _), events in zip(self._ran, each, strict=True)
        ]
        if not self._warm and len(measured) > 1:
            del measured[0]  # which took longer than those after it will
        remaining = self._steps - measured[-1].number
        decision = from_first_rank(lambda: self._replanner.decide(running, measured, remaining, self._build_seconds))
        self._ran, self._warm = [], not decision.switches
        if dist.get_rank() == 0:
            print(decision.line(), flush=True)
            line = {"step": decision.step, **decision.metrics(), "plan": to_mapping(decision.best)}
            self.file.append(decision.step, [json.dumps(line)])
        return decision

    def changed(self, decision: Decision, seconds: float) -> None:
        """Learn from a change of plans how long the next one takes. seconds: that it took."""
        self._build_seconds = max(0.0, seconds - decision.cost.move_seconds)
