"""Runs the steps of a graph under a plan, on every rank alike: there is no master.

The ranks compare a hash of both at the start; from then on each knows what the others do. A step, on each rank: the
operations of `schedule` that name it, in order, then one exchange of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import ProcessGroups, agree
from usp.rlhf.data.fingerprint import fingerprint
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import key_kinds
from usp.rlhf.plan.operations import Operation, schedule
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.roles.role import BuildRole, RoleModel

from .copies import Moving, RoleCopies
from .measure import with_measures
from .step_plan import Step, step_violations
from .step_run import LANE, Setting, StepRun
from .summary import exchange, merge, summarise
from .timeline import Event, Timeline, clock_offset


@dataclass(frozen=True)
class StepResult:
    """What a step gives.

    Attributes:
        metrics: see `summary.merge`; the same on every rank.
        samples: those collected, on rank 0.
        events: of this rank.
    """

    metrics: dict[str, float]
    samples: Samples | None
    events: tuple[Event, ...]


class Executor:
    """The models of a plan on this rank, and the order of a step. Making one is collective over the world.

    Args:
        build_role: see `role.BuildRole`.
        moving: how weights move.
        folder: of the run, for its timeline; None keeps no files.
        collect: keys whose values rank 0 gets of every step.
        progress: called with every operation of this rank as it begins.

    Raises:
        ValueError: naming everything in which the plan does not fit the graph and the world.
        RuntimeError: on every rank, if ranks have different graphs or plans.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        groups: ProcessGroups,
        build_role: BuildRole,
        device: torch.device,
        *,
        moving: Moving,
        folder: Path | None = None,
        collect: tuple[str, ...] = (),
        progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        plan.check(graph, world_size)
        self._collected: Samples | None = None
        graph, plan = with_measures(graph, plan, collect, self._collect)
        self._device = device
        self._agree(fingerprint((graph, plan, moving, collect)), "the hash of the graph and the plan")
        copies = RoleCopies(graph, plan, groups, build_role, device, moving)
        operations = schedule(graph, plan, world_size, copies.aliases)
        for operation in operations:
            if operation.kind in ("call", "transfer"):
                self._meet(groups.get(operation.ranks, LANE if operation.kind == "transfer" else ""))
            elif operation.kind == "offload" and operation.copy and rank in operation.ranks:
                copies.model(operation.copy).offload()
        timeline = Timeline(rank, clock_offset(device=device), device, folder)
        self._setting = Setting(graph, plan, key_kinds(graph), groups, copies, operations, timeline, device)
        self._rank = rank
        self._progress = progress

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What a step is made of, in order."""
        return self._setting.operations

    @property
    def trained(self) -> Mapping[str, RoleModel]:
        """The models that have an optimiser, by role, of which this rank has a part."""
        return self._setting.copies.trained

    def run_step(self, given: Samples, number: int, seed: int) -> StepResult:
        """Step `number`. Every rank gives all its samples: of prompts, where the graph generates.

        Raises:
            ValueError: before anything runs, for samples that cannot be divided, an empty batch among them; and where
                a call does not give what the graph says.
            RuntimeError: on every rank, if ranks were given samples of different lengths, or different seeds.
        """
        setting = self._setting
        if violations := step_violations(setting.graph, given):
            raise ValueError("; ".join(violations))
        step = Step(setting.graph, setting.plan, setting.kinds, given)
        self._agree((number, seed, step.samples, step.lengths), "number, seed and samples of a step")
        setting.timeline.step = number
        run = StepRun(setting, step, seed)
        for operation in setting.operations:
            if self._rank in operation.ranks:
                self._progress(f"{operation.kind} {operation.name}")
                run.run(operation)
        self._progress("the end of the step")
        run.finish()
        summary = summarise(setting.graph, setting.plan, setting.kinds, step, run.metrics)
        metrics = merge(exchange(summary), step.lengths)
        collected, self._collected = self._collected, None
        return StepResult(metrics, collected, setting.timeline.take())

    def _collect(self, samples: Samples) -> None:
        self._collected = samples

    def _meet(self, group: dist.ProcessGroup | None) -> None:
        """Have all members connect: NCCL does so at a group's first communication, for which all must be there."""
        if group:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    def _agree(self, value: object, what: str) -> None:
        assert dist.group.WORLD
        agree(value, [dist.group.WORLD], what, self._device)
