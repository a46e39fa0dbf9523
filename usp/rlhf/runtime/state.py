"""The state of an executor between two steps, and its move to another plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from usp.parallel import agree
from usp.rlhf.algorithms.algorithm import stateful
from usp.rlhf.graph import DataflowGraph, TrainStep
from usp.rlhf.plan.operations import copy_of, schedule
from usp.rlhf.plan.plan import ExecutionPlan, staleness_violations, to_mapping
from usp.rlhf.samples import Samples, fingerprint
from usp.run.failures import UserCodeFailed

from .copies import CopyOptions, RoleCopies
from .measure import with_measures
from .rollouts import RolloutOptions, Rollouts
from .timeline import Timeline, clock_offset
from .transfer import StepData

TRANSFER_LANE = "transfer"  # transfers overlap with calls, whose communication must not wait for them


class ExecutorState:
    """The graph and the plan that all ranks agree on, with models, process groups, and samples in flight.

    Construction is collective over the world.

    Args:
        folder: of the run, for its timeline; None: no files.
        collect: keys whose values are collected on rank 0 after every step, of the `first` samples; None: of all.
        progress: called with every operation of this rank as it begins.
        before_changes: called on every rank with the number of the newest step, before the first operation on its
            samples that changes weights, or the state of a function, else at its end. It returns metrics of these
            samples; what it raises on all ranks leaves everything as the last step did.
        copies: those of another executor, which hold all that this plan needs; None: built here.
        rollouts: prompts are begun before their step, which takes those that are complete first.

    graph, plan, operations: of a step, the calls that measure included. copies: the models of this rank. copy_of: the
        copy of the weights that each call uses.
    in_flight: steps whose samples are made and not trained on yet, the oldest first; set to continue from a checkpoint.
    rollouts: what is begun. failure: what `before_changes` raised.

    Raises:
        ValueError: naming every violation, if the plan does not fit the graph, its depth and the world size.
        RanksDisagree: on every rank, if ranks have different graphs or plans.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        options: CopyOptions,
        *,
        folder: Path | None = None,
        collect: tuple[str, ...] = (),
        first: int | None = None,
        progress: Callable[[str], None] = lambda doing: None,
        before_changes: Callable[[int], Mapping[str, float]] = lambda number: {},
        copies: RoleCopies | None = None,
        rollouts: RolloutOptions | None = None,
    ) -> None:
        assert dist.group.WORLD
        self._rank, self._world = dist.get_rank(), [dist.group.WORLD]
        self._without_measures, self._options, self._collect, self._first = graph, options, collect, first
        self.groups, self.device = options.groups, options.device
        self._progress, self._before_changes, self.failure = progress, before_changes, cast(UserCodeFailed | None, None)
        self.in_flight: list[StepData] = []
        self._collected: list[Samples] = []
        graph, plan = self._agreed(plan)
        self.copies = copies or RoleCopies(graph, plan, options)
        self.rollouts = None if rollouts is None else Rollouts(rollouts, graph, plan)
        self.timeline = Timeline(self._rank, clock_offset(device=self.device), self.device, folder)
        self._get_ready(graph, plan)
        for operation in self.operations if copies is None else ():
            if operation.kind == "offload" and operation.copy and self._rank in operation.ranks:
                self.copies.model(operation.copy).offload()

    def change_plan(self, plan: ExecutionPlan) -> None:
        """Run the following steps under another plan, with all values as they are. Collective, between two steps.

        Weights, optimizer states, the state of functions, samples in flight and begun rollouts move to the new layouts,
        as `RoleCopies` does. Executors that share its copies cannot be used afterwards. A timeline event of kind switch
        records it.

        Raises ValueError and RanksDisagree as construction, before anything moves.
        """
        graph, plan = self._agreed(plan)
        with self.timeline.record("switch", plan.name) as event:
            for name, state in self.function_states().items():
                stateful(self._without_measures)[name].load_state_dict(state)
            in_flight = [(step.to_extra(), step.whole(self.device)) for step in self.in_flight]
            self.copies = RoleCopies(graph, plan, self._options, self.copies, event)
            self._get_ready(graph, plan)
            self.in_flight = [self.saved_in_flight(extra) for extra, _ in in_flight]
            for step, (_, whole) in zip(self.in_flight, in_flight, strict=True):
                step.fill(whole)
            if self.rollouts is not None:
                self.rollouts = self.rollouts.on(graph, plan, self.device)
            gc.collect()  # models refer to themselves
        self.timeline.take()

    def follow(self, role: str, trained: str, weight: float) -> None:
        """Move an untrained role towards a trained one between two steps, as `RoleCopies.follow`."""
        with self.timeline.record("reallocate", f"{role} from {trained}") as event:
            self.copies.follow(role, trained, weight, event)

    def function_states(self) -> dict[str, dict[str, float]]:
        """Collect the state of stateful functions, which only the ranks that call them have. Collective."""
        states = {}
        for name, function in stateful(self._without_measures).items():
            state = [function.state_dict()]
            dist.broadcast_object_list(state, src=self.plan[name].ranks[0], device=self.device)
            states[name] = state[0]
        return states

    def saved_in_flight(self, extra: Mapping[str, Any]) -> StepData:
        """Return samples in flight of a checkpoint, to be filled and then put into `in_flight`."""
        step = StepData(self.graph, self.plan, extra["samples"])
        step.lengths.update(extra["lengths"])
        step.number, step.metrics, step.tickets = extra["step"], dict(extra["metrics"]), extra.get("tickets")
        return step

    def _agreed(self, plan: ExecutionPlan) -> tuple[DataflowGraph, ExecutionPlan]:
        """Check that a plan fits and is the same on all ranks; return it and the graph with the calls that measure."""
        graph = self._without_measures
        plan.check(graph, dist.get_world_size())
        if shared := list(staleness_violations(graph, plan)):
            raise ValueError(f"plan {plan.name!r} with staleness={graph.depth}: {'; '.join(shared)}")
        graph, plan = with_measures(graph, plan, self._collect, self._collected.append, self._first)
        calls = {call.name: fingerprint(call) for call in graph.calls}
        compared = {"graph": calls, "given": graph.given, "plan": to_mapping(plan), "collect": self._collect}
        options = {"ranks_per_host": self._options.ranks_per_host, "staleness": graph.depth}
        agree({**compared, **options}, self._world, "the graph and the plan", self.device)
        return graph, plan

    def _get_ready(self, graph: DataflowGraph, plan: ExecutionPlan) -> None:
        """Get ready for steps under a plan, and connect their process groups. Collective."""
        self.graph, self.plan, world_size = graph, plan, dist.get_world_size()
        self.copy_of = {call.name: copy_of(graph, plan, call) for call in graph.calls if call.role}
        self.operations = schedule(graph, plan, world_size, self.copies.aliases, self.copies.plan_step(graph, plan))
        for operation in self.operations:
            announces = operation.kind == "announce" and len(operation.ranks) < world_size
            if not announces and operation.kind not in ("call", "transfer"):
                continue
            # NCCL connects at a group's first communication, in which all members must take part.
            if group := self.groups.get(operation.ranks, TRANSFER_LANE if operation.kind == "transfer" else ""):
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        changing = {*stateful(graph), *(call.name for call in graph.calls if isinstance(call.work, TrainStep))}
        newest = (of.kind == "call" and of.ahead == graph.depth and of.call in changing for of in self.operations)
        # The first change by the newest samples, which are not checked yet; with a depth, others have been before.
        self._first_change = next((place for place, change in enumerate(newest) if change), len(self.operations))
