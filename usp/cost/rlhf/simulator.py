"""Simulate the steps of an execution plan: the executor's own list of operations, in its order, on a clock per rank.

An operation begins when all of its ranks have ended what they did before, and occupies them until it ends; so calls on
common ranks run one after another, and calls on other ranks at once. A transfer occupies nobody: it begins when its
producer ends, and a call waits until its inputs have arrived. At the end of a step all ranks exchange metrics, so the
next one begins everywhere at once; ReaL's runtime has no such barrier, and `barrier=False` simulates that.

Memory is counted as the executor holds it: trained copies with their optimizer states always, copies that are filled
from the first operation that needs them to their release, offloaded ones while they are loaded, and what a call takes
while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from usp.rlhf.graph.calls import ModelCall, TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.operations import Operation, WeightCopy, schedule, trained_copy, weight_copies
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, optimizer_of
from usp.rlhf.runtime.timeline import Event

from .estimates import Estimates

CATEGORIES = ("weights", "optimizer", "copies", "calls")  # of memory; copies: filled, or loaded from the host
_WEIGHTS, _OPTIMIZER, _COPIES, _CALLS = range(len(CATEGORIES))


@dataclass(frozen=True)
class Span:
    """An operation of a simulated step: seconds since the first step began."""

    step: int
    kind: str
    name: str
    ranks: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The result of simulated steps.

    Attributes:
        seconds: of a step, the mean of all.
        peak: by category of memory, the bytes of each rank when it holds most in total.
        idle: seconds per step that each rank waits.
        spans: what ran, in the order of the schedule.
    """

    seconds: float
    peak: dict[str, tuple[float, ...]] = field(hash=False)
    idle: tuple[float, ...]
    spans: tuple[Span, ...]

    @cached_property
    def peak_bytes(self) -> float:
        """The most memory that a rank needs."""
        return max(map(sum, zip(*self.peak.values(), strict=True)))

    def events(self) -> Iterator[Event]:
        """Yield the events of a timeline, as the executor writes them: `usp.rlhf.runtime.trace` shows both alike."""
        for span in self.spans:
            for rank in span.ranks:
                yield Event(span.step, rank, span.kind, span.name, span.start, span.end)


@lru_cache(1 << 16)
def shares_memory(copy: WeightCopy, source: WeightCopy | None) -> bool:
    """Return whether a copy uses the memory of its role's trained copy: both hold the same on each of its ranks."""
    if source is None or source == copy or copy.layout.zero:
        return False
    held, own = source.layout, copy.layout
    if held.zero and held.dims.dp_shard * held.dims.sp > 1:
        return False
    same = (held.dims.pp, held.dims.tp, held.dims.ep) == (own.dims.pp, own.dims.tp, own.dims.ep)
    return (
        same and set(own.ranks) <= set(held.ranks) and all(_part(own, rank) == _part(held, rank) for rank in own.ranks)
    )


def _part(layout: CallLayout, rank: int) -> tuple[int, int]:
    """Return the pipeline stage and the tensor-parallel part of a rank."""
    at = layout.dims.coordinates(layout.ranks.index(rank))
    return at["pp"], at["tp"]


@dataclass(frozen=True)
class Simulator:
    """Simulates plans of one graph on one cluster.

    With `staleness` 1, a step is an iteration in the middle of a run: it trains on what the one before rolled out.

    Attributes:
        steps: how many are simulated.
        barrier: whether every rank waits for all others at the end of a step.
    """

    graph: DataflowGraph
    estimates: Estimates
    world_size: int
    steps: int = 1
    barrier: bool = True
    staleness: int = 0
    _schedules: dict[object, tuple[Operation, ...]] = field(default_factory=dict, repr=False, compare=False)

    def run(self, plan: ExecutionPlan) -> Simulation:
        """Simulate a plan, with everything that happens."""
        clock = self._clock(plan, detailed=True)
        seconds = float(clock.free.max()) / self.steps
        idle = seconds - clock.busy / self.steps
        peak = {name: tuple(values.tolist()) for name, values in zip(CATEGORIES, clock.peak, strict=True)}
        return Simulation(seconds, peak, tuple(idle.tolist()), tuple(clock.spans))

    def measure(self, plan: ExecutionPlan) -> tuple[float, float]:
        """Return the seconds of a step, and the most bytes that a rank holds."""
        clock = self._clock(plan, detailed=False)
        return float(clock.free.max()) / self.steps, float(clock.most.max())

    def _clock(self, plan: ExecutionPlan, detailed: bool) -> _Clock:
        clock = _Clock(self.graph, plan, self.estimates, self.world_size, detailed)
        operations = self._operations(plan, clock)
        for step in range(self.steps):
            for operation in operations:
                clock.run(step, operation)
            if self.barrier:
                clock.free[:] = clock.free.max()
        return clock

    def _operations(self, plan: ExecutionPlan, clock: _Clock) -> tuple[Operation, ...]:
        """Return the schedule, made once for all plans whose calls share copies in the same way."""
        copies = list(clock.copies)
        aliases = [shares_memory(copy, source) for copy, source in clock.sources.items()]
        alone = [len(plan[call.name].ranks) == 1 for call in self.graph.calls]  # nothing is sent to oneself
        shared = tuple(
            (tuple(call.name for call in calls), alias)
            for calls, alias in zip(clock.copies.values(), aliases, strict=True)
        )
        trained = tuple(clock.sources[copy] == copy for copy in copies)
        key = (shared, trained, plan.offload, tuple(alone) if any(alone) else ())
        if key not in self._schedules:
            sharing = frozenset(copy for copy, alias in zip(copies, aliases, strict=True) if alias)
            self._schedules[key] = schedule(self.graph, plan, self.world_size, sharing, staleness=self.staleness)
        return self._schedules[key]


class _Clock:
    """When each rank is free, what it holds, and what it held when it held most.

    Operations may come from another plan with the same copies: they are run with the layouts of this one.
    """

    def __init__(
        self, graph: DataflowGraph, plan: ExecutionPlan, estimates: Estimates, world_size: int, detailed: bool
    ) -> None:
        self._graph, self._plan, self._estimates, self._detailed = graph, plan, estimates, detailed
        self.free, self.busy = np.zeros(world_size), np.zeros(world_size)
        self.spans: list[Span] = []
        self._ended: dict[str, float] = {}  # by call: when it ended last
        self._arrives: dict[str, float] = {}  # by call: when the last of its inputs arrives
        self._total = np.zeros(world_size)
        self._held = np.zeros((len(CATEGORIES), world_size if detailed else 0))  # the same by category
        self.copies = weight_copies(graph, plan)
        self.sources = {copy: trained_copy(graph, plan, copy.role) for copy in self.copies}
        self._of_call = {call.name: copy for copy, calls in self.copies.items() for call in calls}
        for copy, source in self.sources.items():
            at = rank_index(copy.layout.ranks)
            if source == copy or (source is None and copy.role not in plan.offload):
                self._hold(_WEIGHTS, at, estimates.weight_bytes(copy))
            if source == copy and optimizer_of(copy.role) not in plan.offload:
                self._hold(_OPTIMIZER, at, estimates.state_bytes(copy))
        self.peak, self.most = self._held.copy(), self._total.copy()

    def run(self, step: int, operation: Operation) -> None:
        """Run an operation on its ranks."""
        if operation.kind == "transfer":
            self._transfer(operation)
        elif operation.kind == "call":
            call, layout = self._graph[operation.call], self._plan[operation.call]
            begins = self._arrives.get(call.name, 0.0)
            self._ended[call.name] = self._occupy(
                step, call.kind, operation, layout.ranks, self._call(call, layout), begins
            )
        elif operation.calls and operation.copy:
            copy = self._of_call[operation.calls[0]]
            source = self.sources[copy] if operation.kind == "reallocate" else None
            ranks = _union(copy.layout.ranks, source.layout.ranks) if source else copy.layout.ranks
            self._occupy(step, operation.kind, operation, ranks, self._move(operation.kind, copy, source))
        else:
            self._occupy(step, operation.kind, operation, operation.ranks, 0.0)  # an announcement: a few bytes

    def _occupy(
        self, step: int, kind: str, operation: Operation, ranks: tuple[int, ...], seconds: float, begins: float = 0.0
    ) -> float:
        """Occupy ranks once all of them are free, and return when they are free again."""
        at = rank_index(ranks)
        start = max(begins, float(self.free[at].max()))
        self.free[at] = end = start + seconds
        if self._detailed:
            self.busy[at] += seconds
            self.spans.append(Span(step, kind, operation.name, ranks, start, end))
        return end

    def _transfer(self, operation: Operation) -> None:
        source, begins = self._plan[operation.call], self._ended.get(operation.call, 0.0)
        for name in operation.calls:
            seconds = self._estimates.transfer_seconds(operation.call, source, self._plan[name])
            self._arrives[name] = max(self._arrives.get(name, 0.0), begins + seconds)

    def _call(self, call: ModelCall, layout: CallLayout) -> float:
        """Return the time of a call, and count its memory."""
        at, copy = rank_index(layout.ranks), self._of_call.get(call.name)
        seconds, taken = self._estimates.call_seconds(call.name, layout), self._estimates.call_bytes(call.name, layout)
        if copy and isinstance(call.work, TrainStep) and optimizer_of(call.role) in self._plan.offload:
            seconds += 2 * self._estimates.state_load_seconds(copy)
            taken += self._estimates.state_bytes(copy)
        self._hold(_CALLS, at, taken)
        self._note(at)
        self._hold(_CALLS, at, -taken)
        return seconds

    def _move(self, kind: str, copy: WeightCopy, source: WeightCopy | None) -> float:
        """Return the time of an operation on weights, and count what it leaves in memory."""
        at, size = rank_index(copy.layout.ranks), self._estimates.weight_bytes(copy)
        if kind in ("reallocate", "load"):
            self._hold(_COPIES, at, size)
            self._note(at)
        else:
            self._hold(_COPIES, at, -size)
        if source:
            return self._estimates.fill_seconds(source, copy)
        return self._estimates.load_seconds(copy) if kind in ("load", "offload") else 0.0

    def _hold(self, category: int, at: slice | list[int], nbytes: float) -> None:
        """Let ranks hold more bytes, or fewer."""
        self._total[at] += nbytes
        if self._detailed:
            self._held[category, at] += nbytes

    def _note(self, at: slice | list[int]) -> None:
        """Remember what the ranks hold where it is more than before."""
        total, most = self._total[at], self.most[at]
        if self._detailed:
            self.peak[:, at] = np.where(total > most, self._held[:, at], self.peak[:, at])
        self.most[at] = np.maximum(most, total)


@lru_cache(1 << 16)
def rank_index(ranks: tuple[int, ...]) -> slice | list[int]:
    """Return an index of ranks into an array, a slice for consecutive ones."""
    if ranks and ranks[-1] - ranks[0] == len(ranks) - 1:
        return slice(ranks[0], ranks[-1] + 1)
    return list(ranks)


@lru_cache(1 << 16)
def _union(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*some, *others}))
