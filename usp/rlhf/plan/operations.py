"""The one order of operations that every rank walks, taking part in those that name it.

Operations without a rank in common overlap, for no rank waits for what it has no part in. Messages between ranks are
posted in this order and waited for where their values are needed, so it cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from usp.rlhf.graph.calls import Generate, ModelCall
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import KeyKind, canonical, key_kinds

from .plan import CallLayout, ExecutionPlan


@dataclass(frozen=True)
class Copy:
    """The weights of a role in one layout. Calls with equal layouts share them.

    Attributes:
        apart: it generates, beside the trained copy of the same layout: a generate call takes weights that are not
            wrapped for training.
    """

    role: str
    layout: CallLayout
    apart: bool = False


@dataclass(frozen=True)
class Operation:
    """Something that some ranks do together.

    Attributes:
        kind: reallocate: give `copy` memory, and the weights of the role's trained copy; release: take it away.
            load, offload: bring `copy` from the host and back. call: run `call`. announce: tell every rank how long
            the sequences are that `calls` have generated. transfer: send outputs of `call` to `calls`.
        ranks: who takes part, ascending.
            Of weights: the calls that they are for.
        served: of a transfer: calls that have had outputs of `call` in earlier transfers.
    """

    kind: str
    ranks: tuple[int, ...]
    call: str = ""
    calls: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    copy: Copy | None = None

    @property
    def name(self) -> str:
        """What a timeline calls it."""
        if self.copy:
            return f"{self.copy.role} for {', '.join(self.calls)}"
        if self.kind == "transfer":
            more = f" and {len(self.calls) - 2} more" if len(self.calls) > 2 else ""
            return f"{self.call} to {', '.join(self.calls[:2])}{more}"
        return self.call or "lengths"


def copy_of(graph: DataflowGraph, plan: ExecutionPlan, call: ModelCall) -> Copy:
    """The copy that a model's call runs on."""
    copy = Copy(call.role, plan[call.name])
    return replace(copy, apart=isinstance(call.work, Generate) and copy == home(graph, plan, call.role))


def copies(graph: DataflowGraph, plan: ExecutionPlan) -> dict[Copy, tuple[ModelCall, ...]]:
    """The copies that a plan needs, and the calls that each serves, in the order of their first use."""
    found: dict[Copy, tuple[ModelCall, ...]] = {}
    for call in graph.order:
        if call.role:
            copy = copy_of(graph, plan, call)
            found[copy] = (*found.get(copy, ()), call)
    return found


def home(graph: DataflowGraph, plan: ExecutionPlan, role: str) -> Copy | None:
    """The copy that an optimiser changes and others are made of; None for an untrained role, whose copies all stay."""
    call = graph.train_call(role)
    return Copy(role, plan[call.name]) if call else None


def schedule(
    graph: DataflowGraph, plan: ExecutionPlan, world_size: int, aliases: frozenset[Copy] = frozenset()
) -> tuple[Operation, ...]:
    """The operations of a step.

    What a level of the graph needs comes before its calls: else a rank that has a call of the level would make those
    that want its weights wait for that call. A copy is released after its last call of the step.

    Args:
        aliases: copies that live in the memory of their role's trained copy, and need no reallocation.
    """
    return tuple(_Scheduler(graph, plan, world_size, aliases).operations())


class _Scheduler:
    def __init__(self, graph: DataflowGraph, plan: ExecutionPlan, world_size: int, aliases: frozenset[Copy]) -> None:
        self._graph, self._plan, self._world, self._aliases = graph, plan, tuple(range(world_size)), aliases
        self._uses = copies(graph, plan)
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
        """What a call's copy of the weights needs before its first and after its last call of a step."""
        copy = copy_of(self._graph, self._plan, call)
        if not call.role or copy in self._aliases or self._uses[copy][0 if first else -1] is not call:
            return
        source, names = home(self._graph, self._plan, call.role), tuple(used.name for used in self._uses[copy])
        if source is None:
            if call.role in self._plan.offload:
                yield Operation("load" if first else "offload", copy.layout.ranks, calls=names, copy=copy)
        elif copy != source and first:
            ranks = tuple(sorted({*source.layout.ranks, *copy.layout.ranks}))
            yield Operation("reallocate", ranks, calls=names, copy=copy)
        elif copy != source:
            yield Operation("release", copy.layout.ranks, calls=names, copy=copy)

    def _unannounced(self, level: tuple[ModelCall, ...]) -> tuple[str, ...]:
        """The generate calls whose lengths a level is the first to need."""
        waiting = {key for call in level for key in call.inputs} - self._known
        producers = {self._graph.producers[key] for key in waiting}
        return tuple(c for c in self._done if c in producers and isinstance(self._graph[c].work, Generate))

    def _transfers(self) -> Iterator[Operation]:
        """Outputs to everyone who takes them, from every call that has ended, as soon as all lengths are known."""
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
    """The sequences whose lengths a transfer needs: for its sizes, and to know who has the consumer's samples."""
    moved = {kinds[key].tokens for key in producer.outputs if key in consumer.inputs}
    return {key for key in moved if key} | {key for key in consumer.inputs if canonical(key) == "tokens"}
