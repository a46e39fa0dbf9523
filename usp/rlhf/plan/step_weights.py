"""The weights of a step: what each copy is filled from, and how long it stays in memory. Pure.

    trained copy ──fill──> copy for generation ... its last call
         └──────fill──────────────└──fill──> copy for inference ... its last call

A step computes with the weights of the step before until a role's train step, its last call. So every copy of a role in
memory holds the same values as the trained one: a rank keeps what it has in any of them, and receives the rest from the
nearest. A copy stays past its last call, until another one is filled, if ranks or hosts then receive less and memory
allows: the copies on a rank during a call never take more than they do at most if none stays. While weights move,
activations and KV caches are not in memory, and those that stay are there beside those that are filled.

With staleness, all copies are filled at the beginning, before training changes the weights, so they are in memory
together until their last calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from parallel import ParamLayout, ReallocPlan, plan_realloc
from usp.rlhf.graph.dataflow import DataflowGraph

from .operations import StepWeights, WeightCopy, trained_copy, weight_copies
from .plan import ExecutionPlan


def plan_weights(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    layouts: Mapping[WeightCopy, ParamLayout],
    aliases: frozenset[WeightCopy] = frozenset(),
    *,
    bucket_bytes: int,
    ranks_per_host: int,
    staleness: int = 0,
) -> StepWeights:
    """Plan how the copies of a step are filled and how long they stay.

    Args:
        layouts: of the copies of trained roles.
        aliases: copies that share the memory of their role's trained copy.
        bucket_bytes, ranks_per_host: see `plan_realloc`.
        staleness: see `schedule`.
    """
    lives = _Lives(graph, plan, layouts, aliases, staleness)

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
    return StepWeights(sources, lives.kept, fills, lives.call_bytes(), lives.fill_bytes())


class _Lives:
    """When filled copies are in memory, in levels of the graph: weights move before the calls of a level."""

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        layouts: Mapping[WeightCopy, ParamLayout],
        aliases: frozenset[WeightCopy],
        staleness: int,
    ) -> None:
        level_of = {call.name: number for number, level in enumerate(graph.levels) for call in level}
        used = {
            copy: [level_of[call.name] for call in calls]
            for copy, calls in weight_copies(graph, plan).items()
            if copy not in aliases and trained_copy(graph, plan, copy.role) not in (None, copy)
        }
        self.copies = tuple(used)  # in the order in which they are filled
        self.kept: dict[WeightCopy, WeightCopy] = {}
        self._first = {copy: 0 if staleness else min(levels) for copy, levels in used.items()}
        self._last = {copy: max(levels) for copy, levels in used.items()}
        self._bytes = {copy: _bytes_by_rank(layouts[copy]) for copy in used}
        self._levels = range(len(graph.levels))
        self._most = self.call_bytes()

    def sources(self, copy: WeightCopy) -> tuple[WeightCopy, ...]:
        """Return the copies of the same role that are in memory when a copy is filled, in the order of filling."""
        return tuple(other for other in self._at_fill(copy) if other.role == copy.role)

    def released_before(self, copy: WeightCopy) -> list[WeightCopy]:
        """Return the copies of the same role that are released before a copy is filled, the last filled first."""
        before = self.copies[: self.copies.index(copy)]
        here = self._at_fill(copy)
        return [other for other in reversed(before) if other.role == copy.role and other not in here]

    def fits(self, copy: WeightCopy, until: WeightCopy) -> bool:
        """Return whether a copy can stay until another is filled, without more memory in any call than without it."""
        between = [level for level in self._levels if self._end(copy) <= level < self._first[until]]
        return all(
            self._in_call(level)[rank] + size <= self._most[rank]
            for level in between
            for rank, size in self._bytes[copy].items()
        )

    def call_bytes(self) -> dict[int, int]:
        """Return the most bytes of copies on each rank during a call."""
        return _most(self._in_call(level) for level in self._levels)

    def fill_bytes(self) -> dict[int, int]:
        """Return the most bytes of copies on each rank while weights move."""
        return _most(self._sum((*self._at_fill(copy), copy)) for copy in self.copies)

    def _end(self, copy: WeightCopy) -> int:
        """Return the first level whose calls run without a copy that was filled before."""
        end = self._last[copy] + 1
        return max(end, self._first[self.kept[copy]]) if copy in self.kept else end

    def _in_call(self, level: int) -> Counter[int]:
        return self._sum(copy for copy in self.copies if self._first[copy] <= level < self._end(copy))

    def _at_fill(self, copy: WeightCopy) -> list[WeightCopy]:
        """Return the copies, of all roles, that are in memory when a copy is filled."""
        number, level = self.copies.index(copy), self._first[copy]
        return [
            other
            for other in self.copies[:number]
            if self._last[other] >= level or (other in self.kept and self.copies.index(self.kept[other]) >= number)
        ]

    def _sum(self, copies: Iterable[WeightCopy]) -> Counter[int]:
        return sum((self._bytes[copy] for copy in copies), Counter())


def _bytes_by_rank(layout: ParamLayout) -> Counter[int]:
    found: Counter[int] = Counter()
    for name, boxes in layout.boxes.items():
        for rank, box in boxes.items():
            found[rank] += box.numel * layout.parameters[name].dtype.itemsize
    return found


def _most(sizes: Iterable[Mapping[int, int]]) -> dict[int, int]:
    most: Counter[int] = Counter()
    for of_ranks in sizes:
        most |= Counter(of_ranks)
    return dict(sorted(most.items()))
