"""Division of query and KV heads over Ulysses ranks and in groups, for any number of heads and ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

Range = tuple[int, int]


@dataclass(frozen=True)
class HeadPlan:
    """Query heads divided as evenly as possible over the Ulysses ranks, each rank with the KV heads it needs.

    A KV head is sent only to ranks whose query heads use it: if the number of KV heads is a multiple of the number of
    ranks, none is replicated. With more ranks than query heads, the last ranks get none.

    A rank's heads may be exchanged in groups of its KV heads, with the query heads that use them: `part` is the number
    of the group that this plan is about, None for all heads. A rank with fewer KV heads has no head in some groups.

    Raises:
        ValueError: if num_kv_heads does not divide num_heads.
    """

    num_heads: int
    num_kv_heads: int
    ulysses: int = 1
    groups: int = 1
    part: int | None = None

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.ulysses) < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}: each KV head is shared by "
                f"num_heads / num_kv_heads query heads"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def q_ranges(self) -> tuple[Range, ...]:
        """Query heads of each rank."""
        each, extra = divmod(self.num_heads, self.ulysses)
        starts = [rank * each + min(rank, extra) for rank in range(self.ulysses + 1)]
        if self.part is None:
            return tuple(pairwise(starts))
        # A rank's first and last KV head may have query heads of its neighbours.
        limits = ((self.group * start, self.group * stop) for start, stop in self.kv_ranges)
        both = zip(pairwise(starts), limits, strict=True)
        return tuple((max(a, low), max(a, low, min(b, high))) for (a, b), (low, high) in both)

    @cached_property
    def kv_ranges(self) -> tuple[Range, ...]:
        """KV heads of each rank."""
        if self.part is None:
            return tuple(
                (start // self.group, (stop - 1) // self.group + 1) if stop > start else (0, 0)
                for start, stop in self.q_ranges
            )
        cuts = (self.part, self.part + 1)
        widths = ((a, b - a) for a, b in replace(self, part=None).kv_ranges)
        return tuple((a + n * cuts[0] // self.groups, a + n * cuts[1] // self.groups) for a, n in widths)

    @cached_property
    def by_group(self) -> tuple[HeadPlan, ...]:
        """The plan of each group of heads."""
        return tuple(replace(self, part=part) for part in range(self.groups)) if self.groups > 1 else (self,)

    def kv_index(self, rank: int) -> tuple[int, ...] | None:
        """Return the local KV head of each local query head, or None if standard GQA grouping is correct."""
        (q_start, q_stop), (kv_start, _) = self.q_ranges[rank], self.kv_ranges[rank]
        index = tuple(head // self.group - kv_start for head in range(q_start, q_stop))
        queries, keys = self.q_width(rank), self.kv_width(rank)
        if keys == 0 or (queries % keys == 0 and index == tuple(i // (queries // keys) for i in range(queries))):
            return None
        return index

    def even_places(self, rank: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the most query heads of a local KV head, and where the local query heads stand if each KV head has so
        many places; None if `kv_index` is."""
        if (index := self.kv_index(rank)) is None:
            return None
        most = max(map(index.count, index))
        return most, tuple(head * most + index[:at].count(head) for at, head in enumerate(index))

    def q_width(self, rank: int) -> int:
        """Return the number of query heads of a rank."""
        return len(range(*self.q_ranges[rank]))

    def kv_width(self, rank: int) -> int:
        """Return the number of KV heads of a rank."""
        return len(range(*self.kv_ranges[rank]))

    def elements(self, rank: int, head_dim: int, v_head_dim: int) -> int:
        """Return the total size of a token's q, k and v that a rank receives."""
        return self.q_width(rank) * head_dim + self.kv_width(rank) * (head_dim + v_head_dim)
