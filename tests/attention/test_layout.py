from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from usp.attention import LAYOUTS, SequenceLayout, Span


@given(st.sampled_from(LAYOUTS), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_ranks_own_every_position_once_in_ascending_order(kind: str, ring: int, ulysses: int, times: int) -> None:
    layout = SequenceLayout(kind, times * SequenceLayout.multiple_of(kind, ring, ulysses), ring, ulysses)
    parts = [layout.positions(r, u) for r in range(ring) for u in range(ulysses)]
    assert all(len(part) == layout.local_len for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(layout.seq_len))
    for r in range(ring):
        own = torch.cat(parts[r * ulysses : (r + 1) * ulysses])  # as concatenated by the all-to-all
        assert (own.diff() > 0).all()
        spans = layout.ring_spans(r)
        assert own.tolist() == [s.start + i * s.step for s in spans for i in range(s.length)]


def test_layouts_match_examples_worked_out_by_hand() -> None:
    assert SequenceLayout("zigzag", 16, ring=4).positions(1).tolist() == [2, 3, 12, 13]
    assert SequenceLayout("zigzag", 16, ring=2, ulysses=2).positions(0, 1).tolist() == [12, 13, 14, 15]
    assert SequenceLayout("striped", 8, ring=2).positions(1).tolist() == [1, 3, 5, 7]
    assert SequenceLayout("contiguous", 8, ring=2, ulysses=2).positions(1, 0).tolist() == [4, 5]


@given(st.integers(0, 30), st.integers(1, 9), st.integers(1, 5), st.integers(0, 60), st.integers(0, 60))
def test_index_range_selects_the_positions_in_range(start: int, length: int, step: int, lower: int, upper: int) -> None:
    first, last = Span(start, length, step).index_range(lower, upper)
    inside = [i for i in range(length) if lower <= start + i * step < upper]
    assert list(range(first, last)) == inside


def test_an_indivisible_length_is_refused_with_the_nearest_divisible_ones() -> None:
    with pytest.raises(ValueError, match=r"seq_len=50 .*ring=4 x ulysses=2.* multiple of 8; use 48 or 56"):
        SequenceLayout("zigzag", 50, ring=4, ulysses=2)
    SequenceLayout("zigzag", 7, ring=1, ulysses=7)  # one ring rank needs no balancing


def test_unknown_layouts_and_degrees_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layout='strip' must be one of contiguous, zigzag, striped"):
        SequenceLayout("strip", 8)
    with pytest.raises(ValueError, match="ring=0"):
        SequenceLayout("zigzag", 8, ring=0)
