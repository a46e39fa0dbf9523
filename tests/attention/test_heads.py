from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from usp.attention import HeadPlan


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12))
def test_every_query_head_is_on_one_rank_together_with_its_kv_head(group: int, num_kv_heads: int, ulysses: int) -> None:
    plan = HeadPlan(group * num_kv_heads, num_kv_heads, ulysses)
    seen = [head for start, stop in plan.q_ranges for head in range(start, stop)]
    assert seen == list(range(plan.num_heads))
    sizes = [stop - start for start, stop in plan.q_ranges]
    assert max(sizes) - min(sizes) <= 1
    for rank, ((q_start, q_stop), (kv_start, kv_stop)) in enumerate(zip(plan.q_ranges, plan.kv_ranges, strict=True)):
        read = [head // group for head in range(q_start, q_stop)]
        assert sorted(set(read)) == list(range(kv_start, kv_stop))  # no KV head is sent to a rank that does not use it
        if read:
            index = plan.kv_index(rank)
            per_key = len(read) // (kv_stop - kv_start)
            assert [kv_start + (i // per_key if index is None else index[i]) for i in range(len(read))] == read


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12), st.integers(1, 8))
def test_groups_have_each_head_of_a_rank_once_beside_its_kv_head(
    group: int, num_kv_heads: int, ulysses: int, groups: int
) -> None:
    plan = HeadPlan(group * num_kv_heads, num_kv_heads, ulysses, groups)
    for rank in range(ulysses):
        for ranges in ("q_ranges", "kv_ranges"):
            parts = [getattr(part, ranges)[rank] for part in plan.by_group]
            assert [head for part in parts for head in range(*part)] == [*range(*getattr(plan, ranges)[rank])]
        for part in plan.by_group:
            assert {head // group for head in range(*part.q_ranges[rank])} == {*range(*part.kv_ranges[rank])}


def test_kv_heads_are_replicated_only_where_needed() -> None:
    assert HeadPlan(8, 2, 4).kv_ranges == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert HeadPlan(8, 8, 4).kv_ranges == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert HeadPlan(6, 3, 4).q_ranges == ((0, 2), (2, 4), (4, 5), (5, 6))
    assert HeadPlan(6, 3, 2).kv_index(0) == (0, 0, 1)


def test_kv_heads_must_divide_the_query_heads() -> None:
    with pytest.raises(ValueError, match=r"num_kv_heads=4 must divide num_heads=6"):
        HeadPlan(6, 4)
