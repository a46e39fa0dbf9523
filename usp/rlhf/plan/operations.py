"""The schedule of a step: one global order of operations, of which each rank executes those that it takes part in.

Operations without a common rank overlap, because a rank only waits for its own. Messages are posted in this order and
waited for where their values are needed, so it cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from parallel import ReallocPlan
from usp.rlhf.graph.calls import Generate, ModelCall
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import KeyKind, canonical, key_kinds

from .plan import CallLayout, ExecutionPlan


@dataclass(frozen=True)
class WeightCopy:
    """The weights of a role in one layout. Calls whose layouts are equal `of_weights` share them.

    Attributes:
        for_generation: separate from the trained copy of the same layout, because generation needs weights that are not
            wrapped for training.
    """

    role: str
    layout: CallLayout
    for_generation: bool = False


@dataclass(frozen=True)
class StepWeights:
    """How the copies of a step get their weights; see `plan_weights`.

    Attributes:
        sources: for each copy that is filled: copies of its role in memory then, besides the trained one.
        kept: copies that stay past their last call -> the copy that they stay for: they are released once it is filled.
        fills: the reallocation that fills each copy, from the trained one and its sources.
        call_bytes, fill_bytes: by rank, the most that filled copies take during a call, and while weights move.
    """

    sources: Mapping[WeightCopy, tuple[WeightCopy, ...]] = field(default_factory=dict)
    kept: Mapping[WeightCopy, WeightCopy] = field(default_factory=dict)
    fills: Mapping[WeightCopy, ReallocPlan] = field(default_factory=dict)
    call_bytes: Mapping[int, int] = field(default_factory=dict)
    fill_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """A collective step of the schedule.

    Attributes:
        kind: reallocate: allocate `copy` and fill it from the role's trained copy and `sources`. release: free it.
            load, offload: move `copy` to the device or to the host. call: run `call`. announce: tell every rank the
            lengths of the sequences that `calls` generated. transfer: send outputs of `call` to `calls`.
        ranks: participants, ascending.
        calls: for weights: the calls that use them.
        served: for a transfer: calls that received the outputs of `call` in earlier transfers.
    """

    kind: str
    ranks: tuple[int, ...]
    call: str = ""
    calls: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    copy: WeightCopy | None = None
    sources: tuple[WeightCopy, ...] = ()

    @property
    def name(self) -> str:
        """The name in a timeline."""
        if self.copy:
            return f"{self.copy.role} for {', '.join(self.calls)}"
        if self.kind == "transfer":
            more = f" and {len(self.calls) - 2} more" if len(self.calls) > 2 else ""
            return f"{self.call} to {', '.join(self.calls[:2])}{more}"
        return self.call or "lengths"


def copy_of(graph: DataflowGraph, plan: ExecutionPlan, call: ModelCall) -> WeightCopy:
    """Return the copy of the weights that a call uses."""
    copy = WeightCopy(call.role, plan[call.name].of_weights)
    return replace(
        copy, for_generation=isinstance(call.work, Generate) and copy == trained_copy(graph, plan, call.role)
    )


def weight_copies(graph: DataflowGraph, plan: ExecutionPlan) -> dict[WeightCopy, tuple[ModelCall, ...]]:
    """Return the copies that a plan needs, in the order of first use, each with the calls that use it."""
    found: dict[WeightCopy, tuple[ModelCall, ...]] = {}
    for call in graph.order:
        if call.role:
            copy = copy_of(graph, plan, call)
            found[copy] = (*found.get(copy, ()), call)
    return found


def trained_copy(graph: DataflowGraph, plan: ExecutionPlan, role: str) -> WeightCopy | None:
    """Return the copy that the optimizer updates and other copies are filled from; None for an untrained role."""
    call = graph.train_call(role)
    return WeightCopy(role, plan[call.name].of_weights) if call else None


def schedule(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    world_size: int,
    aliases: frozenset[WeightCopy] = frozenset(),
    weights: StepWeights | None = None,
) -> tuple[Operation, ...]:
    """Return the operations of a step.

    All weights that a level of the graph needs move before its calls; otherwise ranks would wait for weights until the
    calls of their owners end. A copy is released after its last call of the step, or after the reallocation that it
    stays for.

    Args:
        aliases: copies that share the memory of their role's trained copy, and need no reallocation.
        weights: how the others are filled; None: from the trained copy alone.
    """
    return tuple(_Scheduler(graph, plan, world_size, aliases, weights or StepWeights()).operations())


class _Scheduler:
    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        world_size: int,
        aliases: frozenset[WeightCopy],
        weights: StepWeights,
    ) -> None:
        self._step = weights
        self._graph, self._plan, self._world, self._aliases = graph, plan, tuple(range(world_size)), aliases
        self._uses = weight_copies(graph, plan)
        self._kinds = key_kinds(graph)
        self._done: list[str] = []
        self._known = set(graph.given)  # keys of sequences whose lengths every rank knows
        self._served: dict[str, tuple[str, ...]] = {}

    def operations(self) -> Iterator[Operation]:
        for level in self._graph.levels:
            for call in level:
                yield from self._weights(call, first=True)
            if generated := self._unannounced(level):
                yield Operation("announce", self._world, calls=generated)
                self._known.update(key for name in generated for key in self._graph[name].outputs)
                yield from self._transfers()
            for call in level:
                yield Operation("call", self._plan[call.name].ranks, call.name)
                self._done.append(call.name)
                yield from self._transfers()
                yield from self._weights(call, first=False)

    def _weights(self, call: ModelCall, first: bool) -> Iterator[Operation]:
        """Yield the weight operations before the first (or after the last) call of a step that uses a copy."""
        copy = copy_of(self._graph, self._plan, call)
        if not call.role or copy in self._aliases or self._uses[copy][0 if first else -1] is not call:
            return
        source = trained_copy(self._graph, self._plan, call.role)
        if source is None:
            if call.role in self._plan.offload:
                yield self._of_copy("load" if first else "offload", copy)
        elif copy != source and first:
            yield self._of_copy("reallocate", copy, source, *self._step.sources.get(copy, ()))
            yield from (self._of_copy("release", kept) for kept, until in self._step.kept.items() if until == copy)
        elif copy != source and copy not in self._step.kept:
            yield self._of_copy("release", copy)

    def _of_copy(self, kind: str, copy: WeightCopy, *filling: WeightCopy) -> Operation:
        """Return an operation on a copy; filling: the trained copy and the sources of a reallocation."""
        ranks = tuple(sorted({rank for one in (copy, *filling) for rank in one.layout.ranks}))
        calls = tuple(call.name for call in self._uses[copy])
        return Operation(kind, ranks, calls=calls, copy=copy, sources=filling[1:])

    def _unannounced(self, level: tuple[ModelCall, ...]) -> tuple[str, ...]:
        """Return the generate calls whose lengths this level is the first to need."""
        waiting = {key for call in level for key in call.inputs} - self._known
        producers = {self._graph.producers[key] for key in waiting}
        return tuple(c for c in self._done if c in producers and isinstance(self._graph[c].work, Generate))

    def _transfers(self) -> Iterator[Operation]:
        """Send the outputs of every completed call to their consumers, as soon as all lengths are known."""
        for name in self._done:
            call, served = self._graph[name], self._served.get(name, ())
            ready = tuple(
                consumer
                for consumer in self._graph.consumers(name)
                if consumer not in served and lengths_needed(call, self._graph[consumer], self._kinds) <= self._known
            )
            if not ready:
                continue
            self._served[name] = (*served, *ready)
            receivers = {rank for consumer in ready for rank in self._plan[consumer].ranks}
            ranks = tuple(sorted({*self._plan[name].leaders, *receivers}))
            if len(ranks) > 1:
                yield Operation("transfer", ranks, name, ready, served)


def lengths_needed(producer: ModelCall, consumer: ModelCall, kinds: Mapping[str, KeyKind]) -> set[str]:
    """Return the keys of the sequences whose lengths a transfer needs: for message sizes and to partition samples."""
    moved = {kinds[key].tokens for key in producer.outputs if key in consumer.inputs}
    return {key for key in moved if key} | {key for key in consumer.inputs if canonical(key) == "tokens"}
