"""Random layouts and masks for property tests."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from attention import LAYOUTS, AttentionSpec, SequenceLayout


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    kind, ring = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 6))
    multiple = SequenceLayout.multiple_of(kind, ring, 1)
    return SequenceLayout(kind, multiple * draw(st.integers(1, 36 // multiple)), ring)


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
    parents = None
    if causal and documents and prefixes is None and draw(st.booleans()):
        parents = tuple(tuple(draw(st.integers(-1, number - 1)) for number in range(len(row) - 1)) for row in documents)
    return AttentionSpec(causal=causal, window=window, documents=documents, prefixes=prefixes, parents=parents)
