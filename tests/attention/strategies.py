"""Random layouts and masks for property tests."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from usp.attention import LAYOUTS, AttentionSpec, SequenceLayout, layout_name


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    kind, ring = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 6))
    name = layout_name(kind, draw(st.lists(st.integers(0, 36), max_size=3)))
    multiple = SequenceLayout.multiple_of(name, ring, 1)
    return SequenceLayout(name, multiple * draw(st.integers(1, 36 // multiple)), ring)


@st.composite
def specs(draw: st.DrawFn, seq_len: int, batch: int) -> AttentionSpec:
    window = tuple(draw(st.integers(-1, seq_len)) for _ in range(2))
    documents = None
    if draw(st.booleans()):
        rows = []
        for _ in range(draw(st.sampled_from((1, batch)))):
            inner = sorted(draw(st.lists(st.integers(0, seq_len), max_size=6)))
            rows.append((0, *inner) if inner else (0, seq_len))
        width = max(map(len, rows))
        documents = tuple(row + (row[-1],) * (width - len(row)) for row in rows)
    causal, prefixes = draw(st.booleans()), None
    if causal and draw(st.booleans()):
        rows = documents or ((0, seq_len),)
        prefixes = tuple(tuple(draw(st.integers(0, b - a)) for a, b in pairwise(row)) for row in rows)
    return AttentionSpec(causal=causal, window=window, documents=documents, prefixes=prefixes)


@st.composite
def trees(draw: st.DrawFn, seq_len: int, batch: int) -> AttentionSpec:
    window = (draw(st.just(-1) | st.integers(0, seq_len)), -1)
    number, rows = draw(st.integers(2, 7)), draw(st.sampled_from((1, batch)))
    cuts = st.lists(st.integers(0, seq_len), min_size=number, max_size=number)
    documents = tuple((0, *sorted(draw(cuts))) for _ in range(rows))
    parents = tuple(tuple(draw(st.integers(-1, at - 1)) for at in range(number)) for _ in range(rows))
    prefixes = None
    if draw(st.booleans()):
        prefixes = tuple(tuple(draw(st.integers(0, b - a)) for a, b in pairwise(row)) for row in documents)
    return AttentionSpec(window=window, documents=documents, parents=parents, prefixes=prefixes)
