"""Who holds which span of the sequence, and what a layer that works in sequence order sends from span to span.

A recurrence or a convolution reads only what came before, so each span needs a state, or the last few tokens, of the
span before it. Zigzag over ring = 2:

    span          0         1         2         3
    tokens        0 1       2 3       4 5       6 7
    rank          0    ->   1    ->   1    ->   0          (spans 1 and 2 are adjacent on rank 1: one span)

Documents end anywhere. They cut a rank's part of a span into segments, and nothing crosses their boundaries. The
striped layout has spans of one token, and the balanced and the auto one other spans in every row, so their layers run
on the contiguous layout instead (`in_order.Reshard`).

Everything here is a pure function of the layout and the documents; every rank derives the same messages from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from attention import SequenceLayout

UNORDERED = ("striped", "balanced", "auto")  # their ranks hold no spans of consecutive tokens that all rows share


@dataclass(frozen=True)
class HeldSpan:
    """Consecutive positions start, ..., start + length - 1 on one rank, at `offset` in its local order.

    Ranks of the ring x ulysses grid are numbered ring_rank * ulysses + ulysses_rank.
    """

    rank: int
    start: int
    length: int
    offset: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Segment:
    """The part of one document that a rank holds in one span of one row.

    span: number of the span in sequence order.
    start: index of the first token among the rank's tokens, row after row.
    before: tokens of the document in earlier spans.
    continues: the document goes on in the next span.
    """

    row: int
    span: int
    start: int
    length: int
    before: int
    continues: bool


def held_spans(layout: SequenceLayout) -> tuple[HeldSpan, ...]:
    """Return the maximal spans of all ranks in sequence order. Raises ValueError for the striped, the balanced and the
    auto layout."""
    if layout.kind in UNORDERED and layout.ring > 1:
        raise ValueError(f"layout={layout.kind!r} has no spans that all rows share: reshard to contiguous first")
    spans = []
    for ring_rank in range(layout.ring):
        offset = 0  # in the ring rank's order
        for span in layout.ring_spans(ring_rank):
            done = 0
            while done < span.length:
                ulysses_rank, local = divmod(offset + done, layout.local_len)
                length = min(span.length - done, layout.local_len - local)
                spans.append(HeldSpan(ring_rank * layout.ulysses + ulysses_rank, span.start + done, length, local))
                done += length
            offset += span.length
    return tuple(sorted(spans, key=lambda span: span.start))


@dataclass(frozen=True)
class SpanPlan:
    """One rank's part of a layer that works in sequence order on (rows, local_len) tokens.

    layout: contiguous or zigzag.
    documents: global boundaries by row (one tuple for all rows, or one per row); None if each row is one document.
        Tokens after a row's last boundary form a document of their own.
    rank: this rank in the grid, ring_rank * ulysses + ulysses_rank.
    """

    layout: SequenceLayout
    documents: tuple[tuple[int, ...], ...] | None
    rows: int
    rank: int

    @cached_property
    def spans(self) -> tuple[HeldSpan, ...]:
        return held_spans(self.layout)

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Positions at which documents start, ascending, by row."""
        if self.documents is None:
            return ((0,),) * self.rows
        rows = self.documents if len(self.documents) > 1 else self.documents * self.rows
        return tuple(tuple(sorted({0, *(p for p in row if 0 <= p < self.layout.seq_len)})) for row in rows)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """This rank's segments, in the order of its tokens."""
        local = [(number, span) for number, span in enumerate(self.spans) if span.rank == self.rank]
        local.sort(key=lambda numbered: numbered[1].offset)
        return tuple(
            segment
            for row in range(self.rows)
            for number, span in local
            for segment in self._segments_of(row, number, span)
        )

    def _segments_of(self, row: int, number: int, span: HeldSpan) -> Iterator[Segment]:
        starts, tokens = self.starts[row], row * self.layout.local_len + span.offset
        first = bisect_right(starts, span.start) - 1
        inside = [start for start in starts[first + 1 :] if start < span.end]
        for begin, end in zip((span.start, *inside), (*inside, span.end), strict=True):
            before = span.start - starts[first] if begin == span.start else 0
            continues = end == span.end < self.layout.seq_len and not self._starts(row, end)
            yield Segment(row, number, tokens + begin - span.start, end - begin, before, continues)

    def _starts(self, row: int, position: int) -> bool:
        """Return whether a document of the row starts at the position."""
        starts = self.starts[row]
        return starts[bisect_right(starts, position) - 1] == position

    @cached_property
    def crossings(self) -> tuple[tuple[int, ...], ...]:
        """The rows with a document that goes on from each span to the next; the last span's are empty."""
        ends = [span.end for span in self.spans[:-1]]
        return (*(tuple(row for row in range(self.rows) if not self._starts(row, end)) for end in ends), ())


@dataclass(frozen=True)
class HaloPlan:
    """The tokens that this rank's segments need from before their spans, for a causal convolution of `kernel` taps: an
    output reads its own token and `kernel - 1` before it."""

    spans: SpanPlan
    kernel: int

    @cached_property
    def needs(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """(destination rank, span, row, source rank, token index there) of every halo token, of all ranks.

        Sorted by span, row and position. Both ends of a message filter this list, so they agree on its order.
        """
        plan, halo = self.spans, []
        tokens, starts = plan.layout.local_len, [span.start for span in plan.spans]
        for number, span in enumerate(plan.spans):
            for row in range(plan.rows):
                begins = plan.starts[row]
                document = begins[bisect_right(begins, span.start) - 1]
                for position in range(max(document, span.start - self.kernel + 1), span.start):
                    holder = plan.spans[bisect_right(starts, position) - 1]
                    index = row * tokens + holder.offset + position - holder.start
                    halo.append((span.rank, number, row, holder.rank, index))
        return tuple(halo)

    @cached_property
    def sends(self) -> dict[int, list[int]]:
        """The indices of this rank's tokens that each other rank needs."""
        indices: dict[int, list[int]] = {}
        for destination, _, _, source, index in self.needs:
            if source == self.spans.rank != destination:
                indices.setdefault(destination, []).append(index)
        return indices

    @cached_property
    def receives(self) -> dict[int, int]:
        """How many tokens come from each other rank. They are concatenated in this order."""
        counts: dict[int, int] = {}
        for destination, _, _, source, _ in self.needs:
            if destination == self.spans.rank != source:
                counts[source] = counts.get(source, 0) + 1
        return counts

    def padded_index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which token stands where in the padded sequence, and where this rank's tokens stand in it.

        The padded sequence holds `kernel - 1` tokens before each segment, so one convolution over all of it mixes no
        two documents. Index 0 is a zero, 1, 2, ... are this rank's tokens, and the received ones follow.
        """
        plan, width = self.spans, self.kernel - 1
        after = 1 + plan.rows * plan.layout.local_len
        first, placed = {}, after
        for source, count in self.receives.items():
            first[source], placed = placed, placed + count
        halos: dict[tuple[int, int], list[int]] = {}
        for destination, number, row, source, index in self.needs:
            if destination == plan.rank:
                if source != plan.rank:
                    index, first[source] = first[source] - 1, first[source] + 1
                halos.setdefault((number, row), []).append(index + 1)
        pieces, own, end = [], [], 0
        for segment in plan.segments:
            halo = halos.get((segment.span, segment.row), []) if segment.before else []
            pieces += [torch.tensor([0] * (width - len(halo)) + halo, dtype=torch.int64)]
            pieces += [torch.arange(1 + segment.start, 1 + segment.start + segment.length)]
            own.append(torch.arange(end + width, end + width + segment.length))
            end += width + segment.length
        return torch.cat(pieces), torch.cat(own)
