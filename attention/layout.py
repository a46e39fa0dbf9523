"""Assignment of global token positions to sequence-parallel ranks.

    8 tokens, ring = 2:                  rank 0                rank 1
      contiguous                         0 1 2 3               4 5 6 7
      zigzag   (balances causal)         0 1 6 7               2 3 4 5
      striped  (balances causal)         0 2 4 6               1 3 5 7
      balanced (of documents 0-4, 5-7)   0 1 2 4               3 5 6 7     as equal in causal pairs as documents allow
      auto                               each row as zigzag or balanced, by its documents

A ring rank owns a few ascending spans of tokens. Its ulysses ranks hold consecutive equal parts of them, so that the
all-to-all rebuilds the ring rank's sequence by concatenation.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .balance import FULL, Windows, balanced_ranges, load
from .spec import AttentionSpec, Documents

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced", "auto")
OF_DOCUMENTS = ("balanced", "auto")  # layouts that depend on them


def counted_windows(windows: Iterable[int]) -> Windows:
    """Return the windows of a model's layers, each with the number of layers.

    windows: per layer, the causal sliding window in tokens, the query included; 0 for full attention, negative for a
        layer without attention.
    """
    return tuple(sorted(Counter(window for window in windows if window >= 0).items()))


def layout_name(kind: str, windows: Iterable[int]) -> str:
    """Return the name of a layout for layers with these windows, as in `counted_windows`: such as `balanced:0x1,1024x5`
    for one that balances their work, its kind for all others."""
    counted = counted_windows(windows) if kind in OF_DOCUMENTS else ()
    if not any(window for window, _ in counted):
        return kind
    return f"{kind}:{','.join(f'{window}x{layers}' for window, layers in counted)}"


@lru_cache(maxsize=64)
def parse_layout(name: str) -> tuple[str, Windows]:
    """Return the kind of a layout and (window, layers) of its windows. Raises ValueError if none has this name."""
    kind, colon, windows = name.partition(":")
    counted = kind in OF_DOCUMENTS and re.fullmatch(r"\d+x[1-9]\d*(,\d+x[1-9]\d*)*", windows)
    if kind not in LAYOUTS or (colon and not counted):
        with_windows = "the last two also with windows of layers, as in auto:0x1,1024x5"
        raise ValueError(f"layout={name!r} must be one of {', '.join(LAYOUTS)}; {with_windows}")
    pairs = (pair.split("x") for pair in windows.split(",") if pair)
    return kind, tuple((int(window), int(layers)) for window, layers in pairs) or FULL


@dataclass(frozen=True)
class Span:
    """`length` global positions start, start + step, ..."""

    start: int
    length: int
    step: int = 1

    def index_range(self, lower: int, upper: int) -> tuple[int, int]:
        """Return the half-open range of indices into this span whose positions are in [lower, upper)."""
        first, last = (-((self.start - position) // self.step) for position in (lower, upper))
        return max(0, first), min(self.length, last)


@dataclass(frozen=True)
class SequenceLayout:
    """Division of `seq_len` global tokens over a ring x ulysses grid of ranks.

    Zigzag (USP paper, Algorithm 2) splits the sequence into 2 * ring chunks and assigns chunks r and 2 * ring - 1 - r
    to ring rank r; striped assigns it every ring-th token, starting at r; balanced plans each row by its documents (see
    `balance.py`). Auto divides each row as zigzag or balanced, whichever leaves the busiest rank fewer causal pairs (5%
    more than the mean count as even), then sends fewer keys, and zigzag if neither differs. Pairs and keys are those of
    one layer with full attention, or with a name of `layout_name` of all layers of a model.

    name: one of `LAYOUTS`, or from `layout_name`.
    documents: of the balanced and the auto layout, as in `AttentionSpec`; None for one document per row.

    Raises:
        ValueError: for an unknown name, a degree below 1, documents that do not fit or that the layout does not depend
            on, or a length that is not divisible, with the nearest lengths that are.
    """

    name: str
    seq_len: int
    ring: int = 1
    ulysses: int = 1
    documents: tuple[Documents, ...] | None = None

    def __post_init__(self) -> None:
        parse_layout(self.name)
        if min(self.ring, self.ulysses, self.seq_len) < 1:
            raise ValueError(
                f"seq_len={self.seq_len}, ring={self.ring} and ulysses={self.ulysses} must each be at least 1"
            )
        multiple = self.multiple_of(self.kind, self.ring, self.ulysses)
        if self.seq_len % multiple:
            below = self.seq_len // multiple * multiple
            nearest = " or ".join(str(n) for n in (below, below + multiple) if n)
            raise ValueError(
                f"seq_len={self.seq_len} cannot be divided by layout={self.kind!r} over ring={self.ring} x "
                f"ulysses={self.ulysses}: it must be a multiple of {multiple}; use {nearest}, or pad, "
                f"with cu_seqlens=[0, {self.seq_len}]"
            )
        if self.documents is not None:
            if self.kind not in OF_DOCUMENTS:
                raise ValueError(f"layout={self.kind!r} does not depend on documents: leave them out")
            spec = AttentionSpec(documents=self.documents)
            if violation := spec.document_violation(len(self.documents), self.seq_len):
                raise ValueError(violation)

    @staticmethod
    def multiple_of(name: str, ring: int, ulysses: int) -> int:
        """Return the number that must divide the global sequence length."""
        chunks_per_rank = 2 if name.startswith(("zigzag", "auto")) and ring > 1 else 1
        return ring * math.lcm(chunks_per_rank, ulysses)

    @staticmethod
    def padded_len(name: str, seq_len: int, ring: int, ulysses: int) -> int:
        """Return `seq_len` with as many more tokens as it lacks to be divided."""
        return seq_len + -seq_len % SequenceLayout.multiple_of(name, ring, ulysses)

    @property
    def kind(self) -> str:
        """The one of `LAYOUTS` that it is."""
        return parse_layout(self.name)[0]

    @property
    def ring_len(self) -> int:
        """Tokens per ring rank, shared by its ulysses ranks."""
        return self.seq_len // self.ring

    @property
    def local_len(self) -> int:
        """Tokens per rank."""
        return self.ring_len // self.ulysses

    @property
    def rows(self) -> int:
        """Number of rows that are divided differently; 1 if all are alike."""
        return len(self.documents or (0,))

    @property
    def decided(self) -> SequenceLayout:
        """This layout; auto as zigzag or balanced if all rows are divided alike."""
        if self.kind != "auto":
            return self
        kind, *others = {self._kind_of(row) for row in range(self.rows)}
        if others:
            return self
        if kind == "zigzag":
            return replace(self, name=kind, documents=None)
        return replace(self, name=self.name.replace("auto", kind))

    def _kind_of(self, row: int) -> str:
        kind, windows = parse_layout(self.name)
        if kind == "auto":
            is_even = self.documents is None and windows == FULL  # by zigzag
            return "zigzag" if is_even else _better(self._row_documents(row), self.seq_len, self.ring, windows)
        return kind

    def _row_documents(self, row: int) -> Documents:
        return self.documents[row] if self.documents else (0, self.seq_len)

    def ring_spans(self, ring_rank: int, row: int = 0) -> tuple[Span, ...]:
        """Return the positions of a ring rank in a row, ascending, as the Ulysses all-to-all orders them."""
        n, row = self.ring_len, row if self.rows > 1 else 0
        kind = self._kind_of(row)
        if kind == "balanced":
            windows = parse_layout(self.name)[1]
            ranges = balanced_ranges(self._row_documents(row), self.seq_len, self.ring, windows)[ring_rank]
            return tuple(Span(begin, end - begin) for begin, end in ranges)
        if kind == "striped":
            return (Span(ring_rank, n, self.ring),)
        if kind == "contiguous" or self.ring == 1:
            return (Span(ring_rank * n, n),)
        half, mirrored = n // 2, 2 * self.ring - 1 - ring_rank
        if mirrored == ring_rank + 1:  # the last rank's two chunks are adjacent
            return (Span(ring_rank * half, n),)
        return (Span(ring_rank * half, half), Span(mirrored * half, half))

    def local_spans(self, ring_rank: int, ulysses_rank: int = 0, row: int = 0) -> tuple[Span, ...]:
        """Return the positions of one rank in a row, ascending."""
        begin, spans = ulysses_rank * self.local_len, []
        for span in self.ring_spans(ring_rank, row):
            first, last = max(0, begin), min(span.length, begin + self.local_len)
            if first < last:
                spans.append(Span(span.start + first * span.step, last - first, span.step))
            begin -= span.length
        return tuple(spans)

    def positions(self, ring_rank: int, ulysses_rank: int = 0, row: int = 0) -> torch.Tensor:
        """Return the global positions of one rank's tokens of a row in local order, int64 of shape (local_len,)."""
        return _positions(self.local_spans(ring_rank, ulysses_rank, row))

    def ring_positions(self, ring_rank: int, row: int = 0) -> torch.Tensor:
        """Return the global positions of a ring rank's tokens of a row, in its order."""
        return _positions(self.ring_spans(ring_rank, row))


def _positions(spans: tuple[Span, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(s.start, s.start + s.length * s.step, s.step) for s in spans])


@lru_cache(maxsize=64)
def _better(documents: Documents, seq_len: int, ring: int, windows: Windows) -> str:
    """Return the layout of a row under `auto`."""
    zigzag = SequenceLayout("zigzag", seq_len, ring)
    spans = [[(span.start, span.start + span.length) for span in zigzag.ring_spans(rank)] for rank in range(ring)]
    divisions = {"zigzag": spans, "balanced": balanced_ranges(documents, seq_len, ring, windows)}
    return min(divisions, key=lambda kind: load(documents, divisions[kind], windows))
