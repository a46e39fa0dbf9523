"""Execute the steps of a graph under a plan, without a controller: every rank runs the same program.

The ranks compare the graph (a hash of each call) and the plan at the start, and from then on know what the others do.
In a step, each rank runs the operations of `schedule` that it takes part in, in order, then all exchange metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import ProcessGroups, agree
from usp.rlhf.algorithms.algorithm import stateful
from usp.rlhf.data.fingerprint import fingerprint
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import key_kinds
from usp.rlhf.plan.operations import schedule
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.plan.plan_text import to_mapping
from usp.rlhf.roles.role import BuildRole

from .copies import RoleCopies
from .measure import with_measures
from .step_plan import StepData, step_violations
from .step_run import TRANSFER_LANE, RunContext, StepRunner
from .summary import merge, summarize
from .timeline import Event, Timeline, clock_offset


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        metrics: see `summary.merge`; the same on every rank.
        samples: the collected samples, on rank 0.
        events: of this rank.
    """

    metrics: dict[str, float]
    samples: Samples | None
    events: tuple[Event, ...]


class Executor:
    """Executes steps with the models of a plan. Construction is collective over the world.

    Args:
        build_role: see `role.BuildRole`.
        ranks_per_host: for reallocation, which prefers sources on the same host.
        folder: of the run, for its timeline; None: no files.
        collect: keys whose values are collected on rank 0 after every step.
        progress: called with every operation of this rank as it begins.
        before_changes: called on every rank before the first operation of a step that changes weights, or the state of
            a function, else at its end: what it raises on all of them leaves everything as the last step did.
        copies: those of another executor, which hold all that this plan needs; None: built here.

    Raises:
        ValueError: naming every violation, if the plan does not fit the graph and the world size.
        RanksDisagree: on every rank, if ranks have different graphs or plans.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        groups: ProcessGroups,
        build_role: BuildRole,
        device: torch.device,
        *,
        ranks_per_host: int,
        folder: Path | None = None,
        collect: tuple[str, ...] = (),
        progress: Callable[[str], None] = lambda doing: None,
        before_changes: Callable[[], None] = lambda: None,
        copies: RoleCopies | None = None,
    ) -> None:
        world_size, self._rank = dist.get_world_size(), dist.get_rank()
        plan.check(graph, world_size)
        self._collected: list[Samples] = []
        graph, plan = with_measures(graph, plan, collect, self._collected.append)
        assert dist.group.WORLD
        self._world = [dist.group.WORLD]
        calls = {call.name: fingerprint(call) for call in graph.calls}
        compared = {"graph": calls, "given": graph.given, "plan": to_mapping(plan), "collect": collect}
        agree({**compared, "ranks_per_host": ranks_per_host}, self._world, "the graph and the plan", device)
        built = copies is None
        if copies is None:
            copies = RoleCopies(graph, plan, groups, build_role, device, ranks_per_host)
        operations = schedule(graph, plan, world_size, copies.aliases, copies.plan_step(graph, plan))
        for operation in operations:
            if operation.kind in ("call", "transfer"):
                # NCCL connects at a group's first communication, in which all members must take part.
                if group := groups.get(operation.ranks, TRANSFER_LANE if operation.kind == "transfer" else ""):
                    dist.all_reduce(torch.zeros(1, device=device), group=group)
            elif built and operation.kind == "offload" and operation.copy and self._rank in operation.ranks:
                copies.model(operation.copy).offload()
        timeline = self.timeline = Timeline(self._rank, clock_offset(device=device), device, folder)
        self._context = RunContext(graph, plan, key_kinds(graph), groups, copies, operations, timeline, device)
        self._progress, self._before_changes = progress, before_changes
        changing = {*stateful(graph), *(call.name for call in graph.calls if isinstance(call.work, TrainStep))}
        changes = (operation.kind == "call" and operation.call in changing for operation in operations)
        self._first_change = next((place for place, change in enumerate(changes) if change), len(operations))
        self.device, self._build_role, self._ranks_per_host = device, build_role, ranks_per_host

    def another(
        self, graph: DataflowGraph, plan: ExecutionPlan, *, collect: tuple[str, ...], progress: Callable[[str], None]
    ) -> Executor:
        """Return an executor of another graph with the weight copies of this one. Collective over the world.

        plan: needs no other copies.
        """
        return Executor(
            graph,
            plan,
            self._context.groups,
            self._build_role,
            self.device,
            ranks_per_host=self._ranks_per_host,
            collect=collect,
            progress=progress,
            before_changes=self._before_changes,
            copies=self._context.copies,
        )

    def run_step(self, given: Samples, number: int, seed: int) -> StepResult:
        """Run step `number`. Every rank passes all samples: prompts, if the graph generates.

        Raises:
            ValueError: before anything runs, for samples that the calls cannot divide, such as an empty batch; and if a
                call's outputs do not match the graph.
            RanksDisagree: on every rank, if ranks pass samples of different lengths, or different seeds.
        """
        context = self._context
        if violations := step_violations(context.graph, given):
            raise ValueError("; ".join(violations))
        step = StepData(context.graph, context.plan, context.kinds, given)
        value = {"step": number, "seed": seed, "samples": step.samples, "lengths": step.lengths}
        agree(value, self._world, "number, seed and samples of a step", context.device)
        context.timeline.step = number
        runner = StepRunner(context, step, seed)
        for place, operation in enumerate(context.operations):
            if place == self._first_change:
                self._before_changes()
            if self._rank in operation.ranks:
                self._progress(f"{operation.kind} {operation.name}")
                runner.run(operation)
        if self._first_change == len(context.operations):
            self._before_changes()
        self._progress("end of the step")
        runner.finish()
        summaries = [summarize(step, runner.metrics)] * dist.get_world_size()
        dist.all_gather_object(summaries, summaries[0])
        collected = self._collected.pop() if self._collected else None
        return StepResult(merge(summaries, step.lengths), collected, context.timeline.take())
