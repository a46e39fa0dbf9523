"""The schedule of a step: one global order of operations; each rank executes those that it takes part in.

Operations without a common rank overlap, because a rank only waits for its own. Messages are posted in this order and
waited for where their values are needed, so it cannot deadlock.

Where the graph's `depth` is 1, a step's rollouts run beside the training of the step before, on other ranks:

    rollout ranks     weights | generate, score, infer, ... (step 3) | announce, transfer | weights ...
    training ranks    weights | train (step 2) ..................... | announce, transfer | weights | train (step 3) ...

Weights move from the trained copy of a role to the others:

    trained copy ──fill──> copy for generation ... its last call
         └──────fill──────────────└──fill──> copy for inference ... its last call

A step computes with the weights of the step before until a role's train step, its last call. So every copy of a role in
memory holds the same values as the trained one: a rank keeps what it has in any of them, and receives the rest from the
nearest. A copy stays past its last call, until another one is filled, if ranks or hosts then receive less and memory
allows: the copies on a rank during a call never take more than they do at most if none stays. While weights move,
activations and KV caches are not in memory. For rollouts ahead, all copies are filled at the beginning, before training
changes the weights, so they are in memory together until their last calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce

from usp.parallel import ParamLayout, ReallocPlan, format_ranks, plan_realloc
from usp.rlhf.graph import DataflowGraph, Generate, ModelCall, canonical, key_kinds

from .plan import OWN, CallLayout, ExecutionPlan, optimizer_of


@dataclass(frozen=True)
class WeightCopy:
    """The weights of a role in one layout. Calls whose layouts are equal `of_weights` share them.

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
        stay: all copies but those of engines keep their memory and values from step to step, for updates of what has
            changed.
    """

    sources: Mapping[WeightCopy, tuple[WeightCopy, ...]] = field(default_factory=dict)
    kept: Mapping[WeightCopy, WeightCopy] = field(default_factory=dict)
    fills: Mapping[WeightCopy, ReallocPlan] = field(default_factory=dict)
    stay: bool = False


@dataclass(frozen=True)
class Operation:
    """A collective step of the schedule.

    Attributes:
        kind: reallocate: allocate `copy` and fill it from the role's trained copy and `sources`. release: free it.
            load, offload: move `copy` to the device or to the host. call: run `call`. announce: tell every rank the
            lengths of the sequences that `calls` generated. transfer: send outputs of `call` to `calls`.
        ranks: participants, ascending. Lengths of rollouts ahead are announced to their ranks first.
        calls: for weights: the calls that use them.
        served: for a transfer: calls that received the outputs of `call` in earlier transfers.
        ahead: by how many steps its samples are ahead of those that are trained on. Transfers to calls that are not
            ahead are the edges between two iterations: those calls run in a later one.
    """

    kind: str
    ranks: tuple[int, ...]
    call: str = ""
    calls: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    copy: WeightCopy | None = None
    sources: tuple[WeightCopy, ...] = ()
    ahead: int = 0

    @cached_property
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
    copy, generates = WeightCopy(call.role, plan[call.name].of_weights), isinstance(call.work, Generate)
    return replace(copy, for_generation=generates and copy == trained_copy(graph, plan, call.role))


def weight_copies(graph: DataflowGraph, plan: ExecutionPlan) -> dict[WeightCopy, tuple[ModelCall, ...]]:
    """Return the copies that a plan needs, in the order of first use, each with the calls that use it."""
    uses: dict[WeightCopy, tuple[ModelCall, ...]] = {}
    for call in graph.order:
        if call.role:
            copy = copy_of(graph, plan, call)
            uses[copy] = (*uses.get(copy, ()), call)
    return uses


def trained_copy(graph: DataflowGraph, plan: ExecutionPlan, role: str) -> WeightCopy | None:
    """Return the copy that the optimizer updates and other copies are filled from; None for an untrained role."""
    call = graph.train_call(role)
    return WeightCopy(role, plan[call.name].of_weights) if call else None


@lru_cache(1 << 16)
def shares_memory(copy: WeightCopy, source: WeightCopy | None) -> bool:
    """Return whether a copy uses the memory of its role's trained copy: both hold the same on each of its ranks."""
    if source is None or source == copy or copy.layout.zero or copy.layout.engine != OWN:
        return False
    trained, other = source.layout, copy.layout
    sharded = trained.zero and trained.dims.dp_shard * trained.dims.sp > 1
    same = (trained.dims.pp, trained.dims.tp, trained.dims.ep) == (other.dims.pp, other.dims.tp, other.dims.ep)
    if sharded or not same or not set(other.ranks) <= set(trained.ranks):
        return False
    places = [[each.dims.coordinates(each.ranks.index(rank)) for rank in other.ranks] for each in (other, trained)]
    return all((ours["pp"], ours["tp"]) == (its["pp"], its["tp"]) for ours, its in zip(*places, strict=True))


def kept_copies(graph: DataflowGraph, before: ExecutionPlan, after: ExecutionPlan) -> frozenset[WeightCopy]:
    """Return the copies that stay as they are when another plan begins. Of a role that is trained, all copies change
    with the layout of its train step, and with where its optimizer is."""

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
) -> tuple[Operation, ...]:
    """Return the operations of an iteration: the rollouts of a step, and the training of the one `graph.depth` before.

    At the beginning of a run nothing is trained on, at its end nothing is made: `Operation.ahead` tells them apart. The
    plan must have no `staleness_violations`. All weights that a level of the graph needs move before its calls;
    otherwise ranks would wait for weights until the calls of their owners end.

    Args:
        aliases: copies that share the memory of their role's trained copy, and need no reallocation.
        weights: how the others are filled; None: only from the trained copy.
    """
    scheduler = _Scheduler(graph, plan, tuple(range(world_size)), aliases, weights or StepWeights())
    return tuple(scheduler.operations())


@dataclass(eq=False)
class _Scheduler:
    _graph: DataflowGraph
    _plan: ExecutionPlan
    _world: tuple[int, ...]
    _aliases: frozenset[WeightCopy]
    _step: StepWeights

    def __post_init__(self) -> None:
        self._uses = weight_copies(self._graph, self._plan)
        self._kinds = key_kinds(self._graph)
        self._done: list[str] = []
        self._known = set(self._graph.given)  # keys of sequences whose lengths every rank knows
        self._served: dict[str, tuple[str, ...]] = {}

    def operations(self) -> Iterator[Operation]:
        """Yield the calls of the newest step, and beside them those that train on samples of `depth` steps ago."""
        graph, depth, ahead = self._graph, self._graph.depth, self._graph.rollouts_ahead or self._graph.calls
        names, behind = [call.name for call in ahead], [call for call in graph.order if call not in ahead]
        ranks = tuple(sorted({rank for name in names for rank in self._plan[name].ranks})) if behind else self._world
        before = {call.name: tuple(self._weights(call, first=True)) for call in ahead}
        early = {name: [move for move in moves if behind and move.kind != "load"] for name, moves in before.items()}
        yield from (replace(move, ahead=depth) for name in names for move in early[name])
        for call in sorted(behind, key=lambda call: call.kind == "train_step"):  # the others are short, and on any rank
            yield Operation("call", self._plan[call.name].ranks, call.name)
        for level in graph.levels:
            calls = tuple(call for call in level if call in ahead)
            moves = [move for call in calls for move in before[call.name] if move not in early[call.name]]
            for operation in (*moves, *self._calls(calls, ranks, names)):
                yield replace(operation, ahead=depth)
        if not behind:
            return
        if generated := tuple(call.name for call in ahead if isinstance(call.work, Generate)):
            yield Operation("announce", self._world, calls=generated, ahead=depth)
        self._known.update(key for call in ahead for key in call.outputs)
        for operation in self._transfers([call.name for call in behind]):
            yield replace(operation, ahead=depth)

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
        elif copy != source and copy not in self._step.kept and not (self._step.stay and copy.layout.engine == OWN):
            yield self._of_copy("release", copy)

    def _of_copy(self, kind: str, copy: WeightCopy, *filling: WeightCopy) -> Operation:
        """Return an operation on a copy; filling: the trained copy and the sources of a reallocation."""
        ranks = tuple(sorted({rank for member in (copy, *filling) for rank in member.layout.ranks}))
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
            outputs, served = self._graph[name].outputs, self._served.get(name, ())
            ready = tuple(
                consumer
                for consumer in self._graph.consumers(name)
                if consumer in consumers
                and consumer not in served
                and self._lengths_needed(outputs, self._graph[consumer].inputs) <= self._known
            )
            if not ready:
                continue
            self._served[name] = (*served, *ready)
            receivers = {rank for consumer in ready for rank in self._plan[consumer].ranks}
            ranks = tuple(sorted({*self._plan[name].leaders, *receivers}))
            if len(ranks) > 1:
                yield Operation("transfer", ranks, name, ready, served)

    def _lengths_needed(self, outputs: Sequence[str], inputs: Sequence[str]) -> set[str]:
        """Return the keys of the sequences whose lengths a transfer needs: for message sizes and to divide samples."""
        moved = {self._kinds[key].tokens for key in outputs if key in inputs}
        return {key for key in moved if key} | {key for key in inputs if canonical(key) == "tokens"}


def plan_weights(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    layouts: Mapping[WeightCopy, ParamLayout],
    aliases: frozenset[WeightCopy] = frozenset(),
    *,
    bucket_bytes: int,
    ranks_per_host: int,
    stay: bool = False,
) -> StepWeights:
    """Plan how the copies of a step are filled and how long they stay.

    Args:
        layouts: of the copies of trained roles.
        aliases: copies that share the memory of their role's trained copy.
        stay: see `StepWeights`.
    """
    lives = _CopyLifetimes(graph, plan, layouts, aliases, stay)

    def filled_from(copy: WeightCopy, sources: Sequence[WeightCopy]) -> ReallocPlan:
        trained = trained_copy(graph, plan, copy.role)
        assert trained
        held = tuple(layouts[source] for source in sources)
        options = {"bucket_bytes": bucket_bytes, "ranks_per_host": ranks_per_host}
        return plan_realloc(layouts[trained], layouts[copy], copies=held, **options)

    for copy in lives.copies:
        best = filled_from(copy, lives.sources(copy))
        for gone in lives.released_before(copy):
            if lives.fits(gone, copy):
                longer = filled_from(copy, (*lives.sources(copy), gone))
                if longer.tier_bytes.between < best.tier_bytes.between or longer.total_bytes < best.total_bytes:
                    lives.kept[gone], best = copy, longer
    sources = {copy: lives.sources(copy) for copy in lives.copies}  # a copy that stays serves those in between as well
    fills = {copy: filled_from(copy, sources[copy]) for copy in lives.copies}
    return StepWeights(sources, lives.kept, fills, stay)


class _CopyLifetimes:
    """The levels of the graph in which filled copies are in memory; weights move before the calls of a level."""

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        layouts: Mapping[WeightCopy, ParamLayout],
        aliases: frozenset[WeightCopy],
        stay: bool,
    ) -> None:
        level_of = {call.name: number for number, level in enumerate(graph.levels) for call in level}
        used = {
            copy: [level_of[call.name] for call in calls]
            for copy, calls in weight_copies(graph, plan).items()
            if copy not in aliases and trained_copy(graph, plan, copy.role) not in (None, copy)
        }
        self.copies = tuple(used)  # in the order in which they are filled
        self.kept: dict[WeightCopy, WeightCopy] = {}
        self._first = {copy: 0 if graph.depth else min(levels) for copy, levels in used.items()}
        stays = {copy for copy in used if stay and copy.layout.engine == OWN}
        self._last = {copy: len(graph.levels) - 1 if copy in stays else max(levels) for copy, levels in used.items()}
        self._bytes = {copy: _bytes_by_rank(layouts[copy]) for copy in used}
        self._levels = range(len(graph.levels))
        self._most: Counter[int] = reduce(Counter.__or__, map(self._in_call, self._levels), Counter())

    def sources(self, copy: WeightCopy) -> tuple[WeightCopy, ...]:
        """Return the copies of the same role that are in memory when a copy is filled, in the order of filling."""
        number, level = self.copies.index(copy), self._first[copy]
        return tuple(
            other
            for other in self._filled_before(copy)
            if self._last[other] >= level or (other in self.kept and self.copies.index(self.kept[other]) >= number)
        )

    def released_before(self, copy: WeightCopy) -> list[WeightCopy]:
        """Return the copies of the same role that are released before a copy is filled, the last filled first."""
        sources = self.sources(copy)
        return [other for other in reversed(self._filled_before(copy)) if other not in sources]

    def _filled_before(self, copy: WeightCopy) -> list[WeightCopy]:
        """Return those of the same role that weights can be taken from, which an engine gives nobody."""
        before = self.copies[: self.copies.index(copy)]
        return [other for other in before if other.role == copy.role and other.layout.engine == OWN]

    def fits(self, copy: WeightCopy, until: WeightCopy) -> bool:
        """Return whether a copy can stay until another is filled, without more memory in any call than without it."""
        between = [level for level in self._levels if self._end(copy) <= level < self._first[until]]
        return all(
            self._in_call(level)[rank] + size <= self._most[rank]
            for level in between
            for rank, size in self._bytes[copy].items()
        )

    def _end(self, copy: WeightCopy) -> int:
        """Return the first level whose calls run without a copy that was filled before."""
        end = self._last[copy] + 1
        return max(end, self._first[self.kept[copy]]) if copy in self.kept else end

    def _in_call(self, level: int) -> Counter[int]:
        """Return the bytes of copies on each rank during the calls of a level."""
        inside = (copy for copy in self.copies if self._first[copy] <= level < self._end(copy))
        return sum((self._bytes[copy] for copy in inside), Counter())


def _bytes_by_rank(layout: ParamLayout) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for name, boxes in layout.boxes.items():
        for rank, box in boxes.items():
            sizes[rank] += box.numel * layout.parameters[name].dtype.itemsize
    return sizes
