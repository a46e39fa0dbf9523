"""The schedule of a step: one global order of operations, of which each rank executes those that it takes part in.

Operations without a common rank overlap, because a rank only waits for its own. Messages are posted in this order and
waited for where their values are needed, so it cannot deadlock.

With staleness 1 a step's rollouts, all calls with outputs, run beside the training of the step before, on other ranks:

    rollout ranks     weights | generate, score, infer, ... (step 3) | announce, transfer | weights ...
    training ranks    weights | train (step 2) ..................... | announce, transfer | weights | train (step 3) ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parallel import ReallocPlan, format_ranks
from usp.rlhf.graph.calls import Generate, ModelCall
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import KeyKind, canonical, key_kinds

from .plan import CallLayout, ExecutionPlan, optimizer_of


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
        ranks: participants, ascending. With staleness, lengths are announced to the ranks of the rollouts first.
        calls: for weights: the calls that use them.
        served: for a transfer: calls that received the outputs of `call` in earlier transfers.
        ahead: 1: of the samples of the next step. Its transfers to calls that are not ahead are the edges between two
            iterations: those calls run in the next one.
    """

    kind: str
    ranks: tuple[int, ...]
    call: str = ""
    calls: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    copy: WeightCopy | None = None
    sources: tuple[WeightCopy, ...] = ()
    ahead: int = 0

    @property
    def name(self) -> str:
        """The name in a timeline."""
        if self.copy:
            return f"{self.copy.role} for {', '.join(self.calls)}"
        if self.kind == "transfer":
            more = f" and {len(self.calls) - 2} more" if len(self.calls) > 2 else ""
            return f"{self.call} to {', '.join(self.calls[:2])}{more}"
        if self.kind == "announce" and self.ahead:
            return f"lengths to ranks {format_ranks(self.ranks)}"
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


def kept_copies(graph: DataflowGraph, before: ExecutionPlan, after: ExecutionPlan) -> frozenset[WeightCopy]:
    """Return the copies that stay as they are when another plan begins.

    Of a role that is trained, all copies change with the layout of its train step, and with where its optimizer is.
    """

    def trains(plan: ExecutionPlan, role: str) -> object:
        call = graph.train_call(role)
        return call and (plan[call.name], optimizer_of(role) in plan.offload)

    both = weight_copies(graph, before).keys() & weight_copies(graph, after).keys()
    return frozenset(copy for copy in both if trains(before, copy.role) == trains(after, copy.role))


def schedule(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    world_size: int,
    aliases: frozenset[WeightCopy] = frozenset(),
    weights: StepWeights | None = None,
    staleness: int = 0,
) -> tuple[Operation, ...]:
    """Return the operations of a step.

    All weights that a level of the graph needs move before its calls; otherwise ranks would wait for weights until the
    calls of their owners end. A copy is released after its last call of the step, or after the reallocation that it
    stays for. With staleness 1, all weights move first: those that training changes are the ones that rollouts need.

    Args:
        aliases: copies that share the memory of their role's trained copy, and need no reallocation.
        weights: how the others are filled; None: from the trained copy alone.
        staleness: 1: return an iteration in the middle of a run. The first one has only what is ahead, the last nothing
            of it. The plan must have no `staleness_violations`.
    """
    scheduler = _Scheduler(graph, plan, world_size, aliases, weights or StepWeights())
    return tuple(scheduler.iteration() if staleness else scheduler.operations())


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
            yield from self._calls(level, self._world, [call.name for call in self._graph.calls])

    def iteration(self) -> Iterator[Operation]:
        """Yield the training of a step, and the rollouts of the next one."""
        rollouts = self._graph.rollouts
        names = [call.name for call in rollouts]
        ranks = tuple(sorted({rank for name in names for rank in self._plan[name].ranks}))
        first = {call.name: tuple(self._weights(call, first=True)) for call in rollouts}
        moves = [move for moves in first.values() for move in moves if move.kind != "load"]
        yield from (replace(move, ahead=1) for move in moves)
        last = [call for call in self._graph.order if call not in rollouts]
        for call in sorted(last, key=lambda call: call.kind == "train_step"):  # the others are short, and on any rank
            yield Operation("call", self._plan[call.name].ranks, call.name)
        for level in self._graph.levels:
            calls = tuple(call for call in level if call in rollouts)
            loads = [move for call in calls for move in first[call.name] if move.kind == "load"]
            for operation in (*loads, *self._calls(calls, ranks, names)):
                yield replace(operation, ahead=1)
        if generated := tuple(call.name for call in rollouts if isinstance(call.work, Generate)):
            yield Operation("announce", self._world, calls=generated, ahead=1)
        self._known.update(key for call in rollouts for key in call.outputs)
        for operation in self._transfers([call.name for call in last]):
            yield replace(operation, ahead=1)

    def _calls(
        self, calls: tuple[ModelCall, ...], ranks: tuple[int, ...], consumers: Sequence[str]
    ) -> Iterator[Operation]:
        """Yield calls of a level, what they need to know on `ranks`, and the transfers to `consumers`."""
        if generated := self._unannounced(calls):
            yield Operation("announce", ranks, calls=generated)
            self._known.update(key for name in generated for key in self._graph[name].outputs)
            yield from self._transfers(consumers)
        for call in calls:
            yield Operation("call", self._plan[call.name].ranks, call.name)
            self._done.append(call.name)
            yield from self._transfers(consumers)
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

    def _transfers(self, consumers: Sequence[str]) -> Iterator[Operation]:
        """Send the outputs of every completed call to those that read them, as soon as all lengths are known."""
        for name in self._done:
            call, served = self._graph[name], self._served.get(name, ())
            ready = tuple(
                consumer
                for consumer in self._graph.consumers(name)
                if consumer in consumers
                and consumer not in served
                and lengths_needed(call, self._graph[consumer], self._kinds) <= self._known
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
