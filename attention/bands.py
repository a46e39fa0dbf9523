"""Masks between a block of queries and a block of keys, as rectangles of local indices with a diagonal band.

A rank's tokens are spans of equal step (layout.py). Between a span of queries and a span of keys, a mask that limits
`query position - key position` to a range also limits `query index - key index` to a range:

      keys ->                   full          causal        window        striped, later keys
      queries                   # # # #       # . . .       # . . .       . . . .
         |                      # # # #       # # . .       # # . .       # . . .
         v                      # # # #       # # # .       . # # .       # # . .

so one function builds the tasks for every layout and mask. Tasks are tight: every row and every column contains a
visible pair. The kernels' alignment rules, the trimming of messages, and lse > -inf depend on that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from .layout import SequenceLayout
from .spec import AttentionSpec, Joint


@dataclass(frozen=True)
class Task:
    """Attention of queries [q_start, q_stop) to keys [k_start, k_stop) where lowest <= i - j <= highest.

    i and j index the whole query and key buffers, so cutting the rectangle does not change the limits. A limit that
    masks nothing in the rectangle is None.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lowest: int | None = None
    highest: int | None = None

    @property
    def rows(self) -> int:
        return self.q_stop - self.q_start

    @property
    def columns(self) -> int:
        return self.k_stop - self.k_start

    @property
    def full(self) -> bool:
        """True if nothing in the rectangle is masked."""
        return self.lowest is None and self.highest is None

    def shift_keys(self, offset: int) -> Task:
        """Return the same task with its keys moved by `offset` within their buffer."""
        lowest = None if self.lowest is None else self.lowest - offset
        highest = None if self.highest is None else self.highest - offset
        return Task(self.q_start, self.q_stop, self.k_start + offset, self.k_stop + offset, lowest, highest)

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> Task | None:
        """Return the tight part within the given query and key ranges, or None if nothing in it is visible."""
        q_start, q_stop = max(self.q_start, rows[0]), min(self.q_stop, rows[1])
        k_start, k_stop = max(self.k_start, columns[0]), min(self.k_stop, columns[1])
        return tight_task(q_start, q_stop, k_start, k_stop, self.lowest, self.highest)

    @property
    def relative_band(self) -> tuple[int | None, int | None]:
        """(lowest, highest) with rows and columns counted from the rectangle's corner."""
        offset = self.q_start - self.k_start
        lowest = None if self.lowest is None else self.lowest - offset
        return lowest, None if self.highest is None else self.highest - offset

    def visible(self) -> int:
        """Count the visible (query, key) pairs."""
        return band_pairs(self.rows, self.columns, self.q_start - self.k_start, self.lowest, self.highest)


def tight_task(
    q_start: int, q_stop: int, k_start: int, k_stop: int, lowest: int | None, highest: int | None
) -> Task | None:
    """Shrink a task to the rows and columns that contain a visible pair; None if there is none."""
    if lowest is not None and highest is not None and lowest > highest:
        return None
    if lowest is not None:
        k_stop = min(k_stop, q_stop - lowest)
        q_start = max(q_start, k_start + lowest)
    if highest is not None:
        k_start = max(k_start, q_start - highest)
        q_stop = min(q_stop, k_stop + highest)
    if q_start >= q_stop or k_start >= k_stop:
        return None
    if lowest is not None and lowest <= q_start - (k_stop - 1):
        lowest = None
    if highest is not None and highest >= q_stop - 1 - k_start:
        highest = None
    return Task(q_start, q_stop, k_start, k_stop, lowest, highest)


def query_layers(tasks: Iterable[Task]) -> Iterator[tuple[int, Task]]:
    """Yield tasks in query order, each with the number of a layer; within a layer no query row occurs twice."""
    ends: list[int] = []  # end of the last task of each layer
    for task in sorted(tasks, key=lambda t: (t.q_start, t.k_start)):
        layer = next((i for i, end in enumerate(ends) if end <= task.q_start), len(ends))
        ends[layer : layer + 1] = [task.q_stop]
        yield layer, task


def band_pairs(rows: int, columns: int, offset: int, lowest: int | None, highest: int | None) -> int:
    """Count the pairs (i, j) of a rows x columns rectangle with lowest <= offset + i - j <= highest."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    def above(limit: int) -> int:  # pairs with i - j > limit, by inclusion-exclusion of half-planes
        corner = rows - limit - 1
        outside = triangle(corner - columns) + triangle(corner - rows)
        return triangle(corner) - outside + triangle(corner - rows - columns)

    count = rows * columns if lowest is None else above(lowest - offset - 1)
    return count if highest is None else count - above(highest - offset)


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document within a rank's span: position and local index of the first.

    position: global, without a prefix tree; with one, counted from the document's root. `in_prefix`: they are part of
    the document's prefix; otherwise none of them is. `joint`: of joint tokens, whose positions count only among them.
    """

    position: int
    offset: int
    length: int
    step: int
    in_prefix: bool = False
    joint: bool = False


Pieces = dict[tuple[int, int], list[Piece]]


def rank_pieces(
    layout: SequenceLayout,
    spec: AttentionSpec,
    batch: int,
    ring_rank: int,
    row_len: int | None = None,
    ulysses_rank: int | None = None,
) -> Pieces:
    """Return a ring rank's tokens by (row, document); local indices count the flattened (batch, row_len) tokens.

    row_len: None for the rank's own tokens, more if others follow in each row. ulysses_rank: for the tokens of this
    rank alone.
    """
    pieces: Pieces = defaultdict(list)
    row_len = layout.ring_len if row_len is None else row_len
    for row in range(batch):
        boundaries, prefixes = spec.row_documents(row, layout.seq_len), spec.row_prefixes(row)
        depths = spec.row_depths(row, layout.seq_len) if spec.parents else None
        offset, spans = row * row_len, layout.ring_spans(ring_rank, row)
        if ulysses_rank is not None:
            spans = layout.local_spans(ring_rank, ulysses_rank, row)
        for span in spans:
            end = span.start + (span.length - 1) * span.step
            for document in range(max(0, bisect_right(boundaries, span.start) - 1), bisect_right(boundaries, end)):
                lower, upper = boundaries[document], boundaries[min(document + 1, len(boundaries) - 1)]
                shift = depths[document] - lower if depths and document < len(depths) else 0
                parts = [(lower, upper, False)]
                if document < len(prefixes) and prefixes[document]:
                    middle = lower + prefixes[document]
                    parts = [(lower, middle, True), (middle, upper, False)]
                for start, stop, in_prefix in parts:
                    first, last = span.index_range(start, stop)
                    if first < last:
                        position = span.start + first * span.step
                        piece = Piece(position + shift, offset + first, last - first, span.step, in_prefix)
                        pieces[row, document].append(piece)
            offset += span.length
    return pieces


def joint_pieces(joint: Joint, batch: int, row_len: int) -> Pieces:
    """Return the joint tokens by (row, document), which are the last of each row of `row_len` tokens."""
    rows = joint.documents or ((0, joint.tokens),)
    return {
        (row, document): [Piece(start, (row + 1) * row_len - joint.tokens + start, stop - start, 1, joint=True)]
        for row in range(batch)
        for document, (start, stop) in enumerate(pairwise(rows[row if len(rows) > 1 else 0]))
        if start < stop
    }


def below(pieces: Pieces, spec: AttentionSpec) -> Pieces:
    """Return the pieces of the documents that continue each document of a prefix tree, through any others.

    Adjacent ones are one piece where no window tells them apart: all of them see the whole document.
    """
    if spec.parents is None:
        return {}
    following: dict[tuple[int, int], list[tuple[Piece, int]]] = defaultdict(list)  # first pieces, and ends of runs
    joining = spec.one_sided
    for (row, document), of_document in pieces.items():
        parents = spec.row_parents(row)
        while document < len(parents) and (document := parents[document]) >= 0:
            runs = following[row, document]
            for piece in of_document:
                end = piece.offset + piece.length
                if joining and runs and runs[-1][1] == piece.offset:
                    runs[-1] = runs[-1][0], end
                else:
                    runs.append((piece, end))
    return {
        group: [replace(piece, length=end - piece.offset) for piece, end in runs] for group, runs in following.items()
    }


def block_tasks(q_pieces: Pieces, q_below: Pieces, k_pieces: Pieces, spec: AttentionSpec) -> tuple[Task, ...]:
    """Return the visible pairs between two ranks' queries and keys as a few tight, disjoint tasks. q_below: `below` of
    the queries."""
    ranges = {in_prefix: spec.difference_range(in_prefix) for in_prefix in (False, True)}
    front = spec.joint is not None and spec.joint.front

    def visible(q: Piece, k: Piece) -> Task | None:
        # query position - key position = apart + step * (i - j), with i and j indices into the buffers
        lowest, highest = ranges[q.in_prefix and k.in_prefix]
        if q.joint or k.joint:
            if spec.causal and q.joint != k.joint and q.joint == front:
                return None  # the key comes later
            lowest, highest = 0 if spec.causal and q.joint == k.joint else None, None
        apart = q.position - k.position - q.step * (q.offset - k.offset)
        low = None if lowest is None else -((apart - lowest) // q.step)
        high = None if highest is None else (highest - apart) // q.step
        return tight_task(q.offset, q.offset + q.length, k.offset, k.offset + k.length, low, high)

    tasks: list[Task] = []
    for group, queries in q_pieces.items():
        found: list[Task] = []
        for q in queries:
            for k in k_pieces.get(group, ()):
                if (task := visible(q, k)) is not None:
                    found = _absorb(found, task)
        tasks += found
    for group, keys in k_pieces.items() if q_below else ():
        for k in keys:
            found = []
            for q in q_below.get(group, ()):
                if (task := visible(q, k)) is not None:
                    joined = _join(found[-1], task) if found else None
                    found[-1:] = [joined] if joined else [*found[-1:], task]
            tasks += found
    return tuple(tasks)


def _absorb(tasks: list[Task], task: Task) -> list[Task]:
    """Add a task, merging it with tasks that form one band with it (zigzag's halves become one triangle)."""
    for index, other in enumerate(tasks):
        joined = _join(other, task)
        if joined is not None:
            return _absorb(tasks[:index] + tasks[index + 1 :], joined)
    return [*tasks, task]


def _join(a: Task, b: Task) -> Task | None:
    """Return one task with exactly the visible pairs of two disjoint tasks, if one of their bands describes it."""
    rectangle = min(a.q_start, b.q_start), max(a.q_stop, b.q_stop), min(a.k_start, b.k_start), max(a.k_stop, b.k_stop)
    wanted = a.visible() + b.visible()
    for lowest in dict.fromkeys((a.lowest, b.lowest, None)):
        for highest in dict.fromkeys((a.highest, b.highest, None)):
            hull = tight_task(*rectangle, lowest, highest)
            # A hull that covers a and b, with as many pairs as they have, contains no other pair.
            if hull is not None and hull.visible() == wanted and _covers(hull, a) and _covers(hull, b):
                return hull
    return None


def _covers(hull: Task, part: Task) -> bool:
    lowest = max((limit for limit in (hull.lowest, part.lowest) if limit is not None), default=None)
    highest = min((limit for limit in (hull.highest, part.highest) if limit is not None), default=None)
    both = tight_task(part.q_start, part.q_stop, part.k_start, part.k_stop, lowest, highest)
    return both is not None and both.visible() == part.visible()
