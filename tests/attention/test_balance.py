"""The balanced layout: equal tokens, equal work, and few bytes, for documents of any lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from usp.attention import AttentionSpec, SequenceLayout, layout_name, parse_layout, ring_schedule
from usp.attention.balance import FULL, Windows, balanced_ranges, load

WINDOWS: dict[str, Windows] = {  # of the layers of models
    "full": FULL,
    "gemma 3": ((0, 1), (1024, 5)),
    "gpt-oss": ((0, 1), (128, 1)),
    "mistral": ((4096, 1),),
}


def causal_pairs(boundaries: tuple[int, ...], ranges: tuple[tuple[int, int], ...], windows: Windows = FULL) -> int:
    return sum(
        layers * sum(min(position - start + 1, window or stop) for position in range(max(begin, start), min(end, stop)))
        for begin, end in ranges
        for start, stop in pairwise(boundaries)
        for window, layers in windows
    )


def long_tail(seq_len: int, seed: int, median: int = 1000, sigma: float = 1.5) -> tuple[int, ...]:
    """Boundaries of documents with log-normal lengths, most of them short and a few that are long."""
    draw, boundaries = random.Random(seed), [0]
    while boundaries[-1] < seq_len:
        length = max(16, int(draw.lognormvariate(0, sigma) * median))
        boundaries.append(min(boundaries[-1] + length, seq_len))
    return tuple(boundaries)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.just(FULL) | st.lists(st.tuples(st.integers(0, 70), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_every_rank_has_as_many_tokens_and_every_token_a_rank(
    ring: int, tokens: int, lengths: list[int], windows: Sequence[tuple[int, int]]
) -> None:
    seq_len, boundaries = ring * tokens, [0]
    for length in lengths:
        boundaries.append(min(boundaries[-1] + length, seq_len))
    divided = balanced_ranges(tuple(boundaries), seq_len, ring, tuple(windows))
    held = [[position for begin, end in ranges for position in range(begin, end)] for ranges in divided]
    assert all(len(positions) == tokens and positions == sorted(positions) for positions in held)
    assert sorted(position for positions in held for position in positions) == list(range(seq_len))


@pytest.mark.parametrize("model", WINDOWS)
@pytest.mark.parametrize(
    ("ring", "seed", "seq_len"),
    [
        *((ring, seed, 16_384) for ring in (2, 4, 8) for seed in range(4)),
        *((ring, seed, 65_536) for ring, seed in ((4, 9), (8, 4), (8, 31), (64, 5))),
    ],
)
@pytest.mark.slow(but=11, full=30)
def test_work_differs_by_at_most_5_percent(model: str, ring: int, seed: int, seq_len: int) -> None:
    boundaries, windows = long_tail(seq_len, seed), WINDOWS[model]
    pairs = [causal_pairs(boundaries, x, windows) for x in balanced_ranges(boundaries, seq_len, ring, windows)]
    assert max(pairs) <= 1.05 * sum(pairs) / ring


@pytest.mark.parametrize(("ring", "most"), [(4, 0.86), (8, 0.95), (64, 1.03)])
@pytest.mark.slow
def test_ranks_send_little_of_what_they_send_by_zigzag(ring: int, most: float) -> None:
    """In a ring of 64, zigzag leaves the longest document of some rows to fewer ranks than its work is worth."""
    sent = {"balanced": 0, "zigzag": 0}
    for seed in range(8):
        boundaries = long_tail(65_536, seed)
        zigzag = SequenceLayout("zigzag", 65_536, ring)
        spans = [[(span.start, span.start + span.length) for span in zigzag.ring_spans(rank)] for rank in range(ring)]
        for kind, ranges in (("balanced", balanced_ranges(boundaries, 65_536, ring)), ("zigzag", spans)):
            work, keys = load(boundaries, ranges)
            sent[kind] += keys
            assert kind == "zigzag" or work == 1.05
    assert sent["balanced"] <= most * sent["zigzag"]


def test_one_document_is_divided_as_by_zigzag() -> None:
    for ring in (1, 2, 4, 8):
        balanced, zigzag = (SequenceLayout(kind, 512, ring) for kind in ("balanced", "zigzag"))
        assert sorted(map(balanced.ring_spans, range(ring)), key=str) == sorted(
            map(zigzag.ring_spans, range(ring)), key=str
        )


def test_documents_that_fit_on_a_rank_stay_whole_and_send_nothing() -> None:
    boundaries = tuple(range(0, 65, 8))
    layout = SequenceLayout("balanced", 64, 4, documents=(boundaries,))
    spec = AttentionSpec(documents=(boundaries,))
    assert [ring_schedule(layout, spec, 1, rank).tokens_sent for rank in range(4)] == [0] * 4


def test_short_documents_cross_no_rank_while_a_long_one_is_spread() -> None:
    boundaries = (0, 128, *range(136, 257, 8))
    layout = SequenceLayout("balanced", 256, 4, documents=(boundaries,))
    holders = {
        start: {
            rank for rank in range(4) for s in layout.ring_spans(rank) if s.start < stop and s.start + s.length > start
        }
        for start, stop in pairwise(boundaries)
    }
    assert holders[0] == {0, 1, 2, 3} and sum(len(ranks) > 1 for ranks in holders.values()) <= 4


def test_auto_divides_each_row_as_zigzag_unless_balanced_is_more_even_or_sends_less() -> None:
    one, short, tail = (0, 256), (0, *range(32, 257, 32)), (0, 128, *range(136, 257, 8))
    rows = [documents + (256,) * (len(tail) - len(documents)) for documents in (one, short, tail)]
    chosen = {one: "zigzag", short: "zigzag", tail: "balanced"}
    for documents, kind in zip(rows, chosen.values(), strict=True):
        layout = SequenceLayout("auto", 256, 4, documents=(documents,))
        assert layout.decided.kind == kind
        assert [*map(layout.ring_spans, range(4))] == [*map(layout.decided.ring_spans, range(4))]
    mixed = SequenceLayout("auto", 256, 4, documents=tuple(rows))
    assert mixed.decided == mixed and SequenceLayout("auto", 256, 4).decided == SequenceLayout("zigzag", 256, 4)
    for row, kind in enumerate(chosen.values()):
        alike = SequenceLayout(kind, 256, 4, documents=tuple(rows) if kind == "balanced" else None)
        assert all(mixed.ring_spans(rank, row) == alike.ring_spans(rank, row) for rank in range(4))


def test_auto_counts_windows() -> None:
    """In short ones, tokens of long documents have hardly more pairs than others; in long ones, those of one document
    have as many from its middle on, so that zigzag gives most to the ranks with its middle."""
    documents = ((0, 128, *range(136, 257, 8)),)
    for windows, kind in (((0,), "balanced"), ((8,), "zigzag"), ((8, 0, 8), "balanced"), ((256,), "balanced")):
        layout = SequenceLayout(layout_name("auto", windows), 256, 4, documents=documents)
        assert layout.decided.kind == kind, windows
    assert SequenceLayout("auto:512x1", 1024, 8).decided == SequenceLayout("balanced:512x1", 1024, 8)


def test_names_have_the_windows_of_layers() -> None:
    assert layout_name("balanced", (1024, 1024, 0, -1)) == "balanced:0x1,1024x2"
    assert parse_layout("balanced:0x1,1024x2") == ("balanced", ((0, 1), (1024, 2)))
    assert [layout_name("zigzag", (8,)), layout_name("auto", (0, 0, -1))] == ["zigzag", "auto"]
    for name in ("spiral", "zigzag:8x1", "auto:", "auto:8", "auto:8x0", "auto:8x1,", "auto:-1x1"):
        with pytest.raises(ValueError, match=f"layout='{name}' must be one of contiguous, .* auto:0x1,1024x5"):
            SequenceLayout(name, 16, 2)


@pytest.mark.parametrize(("seed", "model"), list(enumerate(WINDOWS)))
@pytest.mark.slow(but=1)
def test_auto_is_as_even_as_the_better_layout(seed: int, model: str) -> None:
    boundaries, windows = long_tail(16_384, seed), WINDOWS[model]
    name = layout_name("auto", [window for window, layers in windows for _ in range(layers)])
    layout = SequenceLayout(name, 16_384, 8, documents=(boundaries,))
    divided = [[(span.start, span.start + span.length) for span in layout.ring_spans(rank)] for rank in range(8)]
    pairs, needed = [0] * 8, 0
    for window, layers in windows:
        spec = AttentionSpec(window=(window - 1, -1), documents=(boundaries,))
        for rank in range(8):
            schedule = ring_schedule(layout, spec, 1, rank)
            pairs[rank] += layers * sum(task.visible() for step in schedule.steps for task in step.tasks)
            needed += layers * schedule.tokens_sent
    assert pairs == [causal_pairs(boundaries, ranges, windows) for ranges in divided]
    assert max(pairs) <= 1.05 * sum(pairs) / 8
    assert load(boundaries, divided, windows) == (1.05, needed)


def test_padding_counts_as_tokens_without_work() -> None:
    boundaries = (0, 64)
    divided = balanced_ranges(boundaries, 128, 4)
    pairs = [causal_pairs(boundaries, ranges) for ranges in divided]
    assert max(pairs) <= 1.05 * sum(pairs) / 4


def test_documents_are_refused_where_they_have_no_effect_or_do_not_fit() -> None:
    with pytest.raises(ValueError, match="layout='zigzag' does not depend on documents"):
        SequenceLayout("zigzag", 16, 2, documents=((0, 16),))
    with pytest.raises(ValueError, match="cu_seqlens ends at 20, past the 16 tokens"):
        SequenceLayout("balanced", 16, 2, documents=((0, 20),))
