"""Simulate a step of an execution plan: the executor's own list of operations, in its order, on a clock per rank.

An operation begins when all of its ranks have ended what they did before, and a call also when the calls that make its
inputs have; it occupies its ranks until it ends. Sending samples takes no time, for they are small beside weights.

Memory is counted as the executor holds it: trained copies with their optimizer states always, filled copies from the
first operation that needs them to their release, offloaded ones while loaded, and what a call takes while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from usp.rlhf.graph import DataflowGraph, ModelCall, TrainStep
from usp.rlhf.plan.operations import Operation, WeightCopy, schedule, shares_memory, trained_copy, weight_copies
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, optimizer_of
from usp.rlhf.runtime.timeline import Event

from .estimates import Estimates


@dataclass(frozen=True)
class Simulator:
    """Simulates plans of one graph on one cluster."""

    graph: DataflowGraph
    estimates: Estimates
    world_size: int
    _schedules: dict[object, tuple[Operation, ...]] = field(default_factory=dict, repr=False, compare=False)

    def run(self, plan: ExecutionPlan) -> Simulation:
        """Simulate a step of a plan. The schedule is made once for all plans whose calls share copies alike."""
        step = Simulation(self.graph, plan, self.estimates, self.world_size)
        sharing = frozenset(copy for copy, source in step.sources.items() if shares_memory(copy, source))
        copies = tuple(
            (tuple(call.name for call in calls), copy in sharing, step.sources[copy] == copy)
            for copy, calls in step.copies.items()
        )
        announced = [plan[call.name].ranks for call in self.graph.rollouts_ahead]
        key = (copies, plan.offload, tuple(announced))
        if key not in self._schedules:
            self._schedules[key] = schedule(self.graph, plan, self.world_size, sharing)
        for operation in self._schedules[key]:
            step.run(operation)
        return step


class Simulation:
    """A simulated step: when each rank is free, what it holds, and the most that it held. Operations may come from
    another plan with the same copies: they are run with the layouts of this one."""

    def __init__(self, graph: DataflowGraph, plan: ExecutionPlan, estimates: Estimates, world_size: int) -> None:
        self._graph, self._plan, self._estimates = graph, plan, estimates
        self.free, self._held = np.zeros(world_size), np.zeros(world_size)
        self.ran: list[tuple[str, Operation, tuple[int, ...], tuple[float, float]]] = []
        self._ended: dict[str, float] = {}  # by call: when it ended last
        self.copies = weight_copies(graph, plan)
        self.sources = {copy: trained_copy(graph, plan, copy.role) for copy in self.copies}
        self._of_call = {call.name: copy for copy, calls in self.copies.items() for call in calls}
        for copy, source in self.sources.items():
            at = rank_index(copy.layout.ranks)
            if source == copy or (source is None and copy.role not in plan.offload):
                self._held[at] += estimates.weight_bytes(copy)
            if source == copy and optimizer_of(copy.role) not in plan.offload:
                self._held[at] += estimates.state_bytes(copy)
        self.most = self._held.copy()

    @property
    def seconds(self) -> float:
        return float(self.free.max())

    @property
    def peak_bytes(self) -> float:
        """The most memory that a rank needs."""
        return float(self.most.max())

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened, as the executor writes it, in the order of the schedule."""
        return tuple(Event(0, rank, kind, op.name, *at) for kind, op, ranks, at in self.ran for rank in ranks)

    def run(self, operation: Operation) -> None:
        """Run an operation on its ranks."""
        kind, ranks, seconds, begins = operation.kind, operation.ranks, 0.0, 0.0
        if kind == "transfer":
            return
        if kind == "call":
            call, layout = self._graph[operation.call], self._plan[operation.call]
            producers = [self._graph.producers.get(key, "") for key in call.inputs]
            begins = max((self._ended.get(producer, 0.0) for producer in producers), default=0.0)
            kind, ranks, seconds = call.kind, layout.ranks, self._call(call, layout)
        elif operation.calls and operation.copy:
            copy = self._of_call[operation.calls[0]]
            source = self.sources[copy] if kind == "reallocate" else None
            ranks = tuple(sorted({*copy.layout.ranks, *(source.layout.ranks if source else ())}))
            seconds = self._move(kind, copy, source)
        at = rank_index(ranks)
        start = max(begins, float(self.free[at].max()))
        self.free[at] = end = start + seconds
        self.ran.append((kind, operation, ranks, (start, end)))
        if operation.kind == "call":
            self._ended[operation.call] = end

    def _call(self, call: ModelCall, layout: CallLayout) -> float:
        """Return the time of a call, and count its memory."""
        copy = self._of_call.get(call.name)
        seconds, taken = self._estimates.call_seconds(call.name, layout), self._estimates.call_bytes(call.name, layout)
        if copy and isinstance(call.work, TrainStep) and optimizer_of(call.role) in self._plan.offload:
            seconds += 2 * self._estimates.state_load_seconds(copy)
            taken += self._estimates.state_bytes(copy)
        at = rank_index(layout.ranks)
        self.most[at] = np.maximum(self.most[at], self._held[at] + taken)
        return seconds

    def _move(self, kind: str, copy: WeightCopy, source: WeightCopy | None) -> float:
        """Return the time of an operation on weights, and count what it leaves in memory."""
        at, arrives = rank_index(copy.layout.ranks), kind in ("reallocate", "load")
        self._held[at] += self._estimates.weight_bytes(copy) * (1 if arrives else -1)
        self.most[at] = np.maximum(self.most[at], self._held[at])
        if source:
            return self._estimates.fill_seconds(source, copy)
        return self._estimates.load_seconds(copy) if kind in ("load", "offload") else 0.0


@lru_cache(1 << 16)
def rank_index(ranks: tuple[int, ...]) -> slice | list[int]:
    """Return an index of ranks into an array, a slice for consecutive ones."""
    if ranks and ranks[-1] - ranks[0] == len(ranks) - 1:
        return slice(ranks[0], ranks[-1] + 1)
    return list(ranks)
