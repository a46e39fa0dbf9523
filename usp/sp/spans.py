"""Who holds which span of the sequence, and what a layer that works in sequence order sends from span to span.

A recurrence or a convolution reads only what came before, so each span needs a state, or the last few tokens, of the
span before it. Zigzag over ring = 2:

    span          0         1         2         3
    tokens        0 1       2 3       4 5       6 7
    rank          0    ->   1    ->   1    ->   0          (spans 1 and 2 are adjacent on rank 1: one span)

Documents end anywhere. They cut a rank's part of a span into segments, and nothing crosses their boundaries, except to
a document that continues an earlier one: its first segment needs what the last one of that document ended with. The
striped layout has spans of one token, and the balanced and the auto one other spans in every row, so their layers run
on the contiguous layout instead (`in_order.Reshard`).

Everything here is a pure function of the layout and the documents; every rank derives the same messages from it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from usp.attention import SequenceLayout

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
    before: tokens before it in its document and the documents that this one continues.
    source: number, among the segments of all ranks, of the one that these tokens end with; -1 without any.
    """

    row: int
    span: int
    start: int
    length: int
    before: int
    source: int


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
    parents: for each document the earlier one that it continues, or -1, in rows like `documents`; None: none does.
    """

    layout: SequenceLayout
    documents: tuple[tuple[int, ...], ...] | None
    rows: int
    rank: int
    parents: tuple[tuple[int, ...], ...] | None = None

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
    def continued(self) -> tuple[dict[int, int], ...]:
        """By row, where the document starts that the one at each start continues; empty documents are passed over."""
        if self.documents is None or self.parents is None:
            return ({},) * self.rows
        found = []
        for row in range(self.rows):
            ends, parents = self.documents[row % len(self.documents)], self.parents[row % len(self.parents)]
            starts: dict[int, int] = {}
            for document, parent in enumerate(parents):
                while parent >= 0 and ends[parent] == ends[parent + 1]:
                    parent = parents[parent]
                if parent >= 0 and ends[document] < ends[document + 1]:
                    starts[ends[document]] = ends[parent]
            found.append(starts)
        return tuple(found)

    @cached_property
    def everywhere(self) -> tuple[Segment, ...]:
        """The segments of all ranks, by span, row and position: each after the one that it continues."""
        segments: list[Segment] = []
        last: dict[tuple[int, int], int] = {}  # the last segment so far of the document of a row at a start
        for number, span in enumerate(self.spans):
            for row, (starts, continued) in enumerate(zip(self.starts, self.continued, strict=True)):
                inside = starts[bisect_right(starts, span.start) : bisect_left(starts, span.end)]
                for begin, end in pairwise((span.start, *inside, span.end)):
                    document = starts[bisect_right(starts, begin) - 1]
                    came_from = document if document < begin else continued.get(document, -1)
                    source = last.get((row, came_from), -1)
                    before = segments[source].before + segments[source].length if source >= 0 else 0
                    start = row * self.layout.local_len + span.offset + begin - span.start
                    last[row, document] = len(segments)
                    segments.append(Segment(row, number, start, end - begin, before, source))
        return tuple(segments)

    def holder(self, number: int) -> int:
        """Return the rank of a segment among those of all ranks."""
        return self.spans[self.everywhere[number].span].rank

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The numbers of this rank's segments among those of all ranks, in the order of its tokens."""
        held = (number for number in range(len(self.everywhere)) if self.holder(number) == self.rank)
        return tuple(sorted(held, key=lambda number: self.everywhere[number].start))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """This rank's segments, in the order of its tokens."""
        return tuple(self.everywhere[number] for number in self.own)

    @cached_property
    def messages(self) -> tuple[dict[int, list[int]], ...]:
        """By message, the segments that continue each of some segments, all of which are on one rank.

        A message takes all of a span to another rank, or one segment to those of its own rank. Their order is the same
        on every rank, and each is after what its states depend on.
        """
        messages: dict[tuple[int, bool, int], dict[int, list[int]]] = {}
        for number, segment in enumerate(self.everywhere):
            if (source := segment.source) >= 0:
                destination = self.holder(number)
                leaves = destination != self.holder(source)
                key = (self.everywhere[source].span, leaves, destination if leaves else source)
                messages.setdefault(key, {}).setdefault(source, []).append(number)
        return tuple(messages[key] for key in sorted(messages))


@dataclass(frozen=True, eq=False)
class TokenMoves:
    """What a rank sends where tokens move to any ranks. By rank of the grid, `sends` are indices of this rank's tokens,
    and `receives` of those that it has afterwards. lengths: of its tokens, before and afterwards."""

    sends: tuple[torch.Tensor, ...]
    receives: tuple[torch.Tensor, ...]
    lengths: tuple[int, int]

    @property
    def inverse(self) -> TokenMoves:
        return TokenMoves(self.receives, self.sends, (self.lengths[1], self.lengths[0]))

    def to(self, device: torch.device) -> TokenMoves:
        sends, receives = (tuple(x.to(device) for x in side) for side in (self.sends, self.receives))
        return TokenMoves(sends, receives, self.lengths)


@dataclass(frozen=True)
class HaloPlan:
    """The tokens that this rank's segments need from before their spans, for a causal convolution of `kernel` taps: an
    output reads its own token and `kernel - 1` before it."""

    spans: SpanPlan
    kernel: int

    @cached_property
    def needs(self) -> tuple[tuple[int, int, int, int], ...]:
        """(destination rank, segment, source rank, token index there) of every halo token, of all ranks.

        Sorted by segment and position. Both ends of a message filter this list, so they agree on its order.
        """
        plan, halo = self.spans, []
        for number, segment in enumerate(plan.everywhere):
            found: list[tuple[int, int, int, int]] = []
            while len(found) < self.kernel - 1 and segment.source >= 0:
                source, segment = segment.source, plan.everywhere[segment.source]
                taken = min(segment.length, self.kernel - 1 - len(found))
                last = range(segment.start + segment.length - taken, segment.start + segment.length)
                found[:0] = [(plan.holder(number), number, plan.holder(source), index) for index in last]
            halo += found
        return tuple(halo)

    @cached_property
    def moves(self) -> TokenMoves:
        """The moves of this rank's tokens to the padded sequence, in which `kernel - 1` tokens precede each segment, so
        that one convolution over all of it mixes no two documents; zeros precede a document. This rank's own tokens
        come first among what it sends to itself, in their order."""
        plan, width, end = self.spans, self.kernel - 1, 0
        peers = range(plan.layout.ring * plan.layout.ulysses)
        sends, receives = ([list[int]() for _ in peers] for _ in range(2))
        missing = Counter(number for _, number, _, _ in self.needs)
        places, own = dict[int, int](), []
        for number, segment in zip(plan.own, plan.segments, strict=True):
            places[number], end = end + width - missing[number], end + width + segment.length
            own.append(torch.arange(end - segment.length, end))
        for destination, number, source, index in self.needs:
            if source == plan.rank:
                sends[destination].append(index)
            if destination == plan.rank:
                receives[source].append(places[number])
                places[number] += 1
        sent, received = ([torch.tensor(each, dtype=torch.int64) for each in side] for side in (sends, receives))
        tokens = plan.rows * plan.layout.local_len
        sent[plan.rank] = torch.cat((torch.arange(tokens), sent[plan.rank]))
        received[plan.rank] = torch.cat((*own, received[plan.rank]))
        return TokenMoves(tuple(sent), tuple(received), (tokens, end))
