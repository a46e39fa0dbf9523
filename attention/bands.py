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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .intervals import Array, Intervals, expanded, union
from .layout import SequenceLayout
from .spec import AttentionSpec, Joint

FAR = 1 << 60  # stands for no limit
_ROW = 32  # bits of a document's number in its row


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


@dataclass(frozen=True, eq=False)
class Tile:
    """Attention of queries from q_start on to keys from k_start on where `mask` (heads or 1, queries, keys) is True."""

    q_start: int
    k_start: int
    mask: Tensor


class Tasks(Sequence[Task]):
    """Tasks as rows of an array, for a block may have one for each of thousands of documents: the fields of `Task` in
    their order, with -FAR or FAR for a limit that is None. tiles: what more is attended, of a mask by function."""

    def __init__(self, rows: Array, tiles: Sequence[Tile] = ()) -> None:
        self.rows, self.tiles = rows, tiles

    @staticmethod
    def of(tasks: Iterable[Task]) -> Tasks:
        """Make rows of tasks."""
        return tasks if isinstance(tasks, Tasks) else Tasks(np.array(list(map(_row, tasks)), np.int64).reshape(-1, 6))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Task]:
        return map(_task, self.rows.tolist())

    def __getitem__(self, index: Any) -> Any:
        return _task(self.rows[index].tolist())

    def needed_keys(self) -> Intervals:
        """Return the keys that are attended to."""
        starts, stops = self.rows[:, 2:4].T
        if self.tiles:
            more = np.array([(tile.k_start, tile.k_start + tile.mask.shape[2]) for tile in self.tiles])
            starts, stops = np.concatenate((starts, more[:, 0])), np.concatenate((stops, more[:, 1]))
        return union(starts, stops)

    def shift_keys(self, starts: Array, offsets: Array) -> Tasks:
        """Return the same tasks in a buffer where the keys from each of `starts` on are moved by its offset."""

        def offset_of(keys: Any) -> Any:
            return offsets[np.searchsorted(starts, keys, side="right") - 1]

        rows = self.rows.copy()
        offset = offset_of(rows[:, 2])
        rows[:, 2:4] += offset[:, None]
        rows[:, 4:] -= np.where(abs(rows[:, 4:]) < FAR, offset[:, None], 0)
        tiles = [replace(tile, k_start=int(tile.k_start + offset_of(tile.k_start))) for tile in self.tiles]
        return Tasks(rows, tiles)


def _row(task: Task) -> tuple[int, ...]:
    lowest, highest = -FAR if task.lowest is None else task.lowest, FAR if task.highest is None else task.highest
    return task.q_start, task.q_stop, task.k_start, task.k_stop, lowest, highest


def _task(row: Sequence[int]) -> Task:
    q_start, q_stop, k_start, k_stop, lowest, highest = row
    return Task(
        q_start, q_stop, k_start, k_stop, None if lowest == -FAR else lowest, None if highest == FAR else highest
    )


def layers(rows: Array) -> tuple[Array, Array]:
    """Return the order of rows of `Tasks` by queries and, in that order, the number of a layer; within a layer no query
    row occurs twice."""
    order = np.lexsort((rows[:, 2], rows[:, 0]))
    starts, stops = rows[order, 0], rows[order, 1]
    if not (starts[1:] < stops[:-1]).any():
        return order, np.zeros_like(order)
    ends: list[int] = []  # end of the last task of each layer
    numbers = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        layer = 0
        while layer < len(ends) and ends[layer] > start:
            layer += 1
        ends[layer : layer + 1] = [stop]
        numbers.append(layer)
    return order, np.array(numbers)


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


class Parts(NamedTuple):
    """Documents of a row, cut where their prefix ends, without empty ones: arrays with an entry for each.

    Attributes:
        group: number of the document among those of all rows.
        start, stop: global positions.
        shift: what is added to them: with a prefix tree, positions count from the document's root.
        in_prefix: 1 for tokens of the document's prefix, 0 for others.
    """

    group: Array
    start: Array
    stop: Array
    shift: Array
    in_prefix: Array


class Tree(NamedTuple):
    """For each group the one that it continues, or -1, and how many it continues through others."""

    parents: Array
    generation: Array


class Pieces(NamedTuple):
    """Consecutive tokens of one document within a rank's span, by document and ascending: arrays as of `Parts`.

    Attributes:
        position: of the first token, shifted.
        offset: local index of the first token.
        length: number of tokens.
        step: from the position of a token to that of the next.
        joint: 1 for joint tokens, whose positions count only among them, 0 for others.
    """

    group: Array
    position: Array
    offset: Array
    length: Array
    step: Array
    in_prefix: Array
    joint: Array

    def take(self, index: Array) -> Pieces:
        """Select pieces by number, or by a mask."""
        return Pieces(*(x[index] for x in self))


def row_parts(spec: AttentionSpec, batch: int, seq_len: int) -> tuple[list[Parts], Tree]:
    """Return the parts of each row, and the tree of all rows' documents."""
    rows, parents, groups = [], [np.empty(0, np.int64)], 0
    for row in range(batch):
        boundaries, parent = np.array(spec.row_documents(row, seq_len)), np.array(spec.row_parents(row), np.int64)
        start, stop, depth = boundaries[:-1], boundaries[1:], np.array(spec.row_depths(row, seq_len))
        # Without a tree, which has an entry for each, numbers are those of other tokens with these documents, too.
        group = np.arange(len(start)) + (groups if spec.parents else row << _ROW)
        shift = depth - start if len(parent) else np.zeros_like(start)
        in_prefix = np.zeros_like(start)
        if prefixes := spec.row_prefixes(row):
            middle = start + np.array(prefixes)
            start, stop = (np.stack(ends, 1).ravel() for ends in ((start, middle), (middle, stop)))
            group, shift, in_prefix = (np.repeat(x, 2) for x in (group, shift, in_prefix))
            in_prefix[::2] = 1
        rows.append(Parts(*(x[start < stop] for x in (group, start, stop, shift, in_prefix))))
        parents.append(np.where(parent < 0, -1, parent + groups) if len(parent) else np.full(len(depth), -1))
        groups += len(depth)
    parent = ancestor = np.concatenate(parents)
    generation = np.zeros_like(parent)
    while (ancestor >= 0).any():
        generation += ancestor >= 0
        ancestor = np.where(ancestor < 0, -1, parent[ancestor])
    return rows, Tree(parent, generation)


def rank_pieces(
    layout: SequenceLayout,
    rows: Sequence[Parts],
    ring_rank: int,
    row_len: int | None = None,
    ulysses_rank: int | None = None,
) -> Pieces:
    """Return a ring rank's tokens; local indices count the flattened (batch, row_len) tokens.

    row_len: None for the rank's own tokens, more if others follow in each row. ulysses_rank: for the tokens of this
    rank alone.
    """
    pieces = []
    for row, parts in enumerate(rows):
        spans = layout.ring_spans(ring_rank, row)
        if ulysses_rank is not None:
            spans = layout.local_spans(ring_rank, ulysses_rank, row)
        begin, length, step = np.array([(span.start, span.length, span.step) for span in spans]).T
        place = row * (row_len or layout.ring_len) + np.cumsum(length) - length
        ends = begin + (length - 1) * step
        span, part = _matches(np.searchsorted(parts.stop, begin, "right"), np.searchsorted(parts.start, ends, "right"))
        begin, length, step, place = begin[span], length[span], step[span], place[span]
        group, start, stop, shift, in_prefix = (x[part] for x in parts)
        first, last = np.maximum(0, -((begin - start) // step)), np.minimum(length, -((begin - stop) // step))
        position, joint = begin + first * step + shift, np.zeros_like(group)
        found = Pieces(group, position, place + first, last - first, step, in_prefix, joint)
        pieces.append(found.take(first < last))
    return _concatenated(pieces)


def joint_pieces(joint: Joint, batch: int, row_len: int) -> Pieces:
    """Return the joint tokens, which are the last of each row of `row_len` tokens."""
    rows, pieces = joint.documents or ((0, joint.tokens),), []
    for row in range(batch):
        boundaries = np.array(rows[row if len(rows) > 1 else 0])
        start, length, one = boundaries[:-1], np.diff(boundaries), np.ones_like(boundaries[1:])
        group, offset = np.arange(len(start)) + (row << _ROW), (row + 1) * row_len - joint.tokens + start
        pieces.append(Pieces(group, start, offset, length, one, 0 * one, one).take(np.flatnonzero(length)))
    return _concatenated(pieces)


def united(*pieces: Pieces) -> Pieces:
    """Return all of these pieces, in order."""
    return _ordered(_concatenated(pieces), join=False)


def _matches(first: Array, last: Array) -> tuple[Array, Array]:
    """Return all pairs of a number i and one of first[i] to last[i] - 1, as two arrays."""
    return np.repeat(np.arange(len(first)), last - first), expanded(first, last)


def below(pieces: Pieces, tree: Tree, spec: AttentionSpec) -> Pieces:
    """Return the pieces of the documents that continue each document of a prefix tree, through any others.

    Adjacent ones are one piece where no window tells them apart: all of them see the whole document.
    """
    lower = pieces.take(np.empty(0, np.int64))
    if spec.parents is None:
        return lower
    generation, levels = tree.generation[pieces.group], [lower]
    for number in range(tree.generation.max(initial=0), 0, -1):
        level = _concatenated([pieces.take(generation == number), lower])
        lower = _ordered(level._replace(group=tree.parents[level.group]), spec.one_sided)
        levels.append(lower)
    return _ordered(_concatenated(levels), join=False)


def _concatenated(pieces: Iterable[Pieces]) -> Pieces:
    none = Pieces(*[np.empty(0, np.int64)] * len(Pieces._fields))  # of a batch without rows
    return Pieces(*map(np.concatenate, zip(none, *pieces, strict=True)))


def _ordered(pieces: Pieces, join: bool) -> Pieces:
    """Return pieces in order, as few as possible if `join`."""
    pieces = pieces.take(np.lexsort((pieces.offset, pieces.group)))
    if not join:
        return pieces
    ends, first = pieces.offset + pieces.length, np.ones(len(pieces.group), bool)
    first[1:] = (pieces.group[1:] != pieces.group[:-1]) | (pieces.offset[1:] != ends[:-1])
    return pieces.take(first)._replace(length=ends[np.roll(first, -1)] - pieces.offset[first])


def block_tasks(q: Pieces, q_below: Pieces, k: Pieces, spec: AttentionSpec) -> Tasks:
    """Return the visible pairs between two ranks' queries and keys as a few tight, disjoint tasks. q_below: `below` of
    the queries."""
    queries, keys = _matches(*(np.searchsorted(k.group, q.group, side) for side in ("left", "right")))
    rows, seen = _tight_tasks(q.take(queries), k.take(keys), spec)
    rows = _merged(rows, q.group[queries[seen]], _absorb)
    if len(q_below.group):
        keys, queries = _matches(*(np.searchsorted(q_below.group, k.group, side) for side in ("left", "right")))
        more, seen = _tight_tasks(q_below.take(queries), k.take(keys), spec)
        apart = (np.diff(keys[seen]) > 0) | (more[1:, 0] > more[:-1, 1])  # rows between two tasks are part of neither
        rows = np.concatenate((rows, _merged(more, np.cumsum(np.append(False, apart))[: len(more)], _append)))
    return Tasks(rows)


def summary_tasks(q: Pieces, k: Pieces, rows: Sequence[Parts], every: int) -> Tasks:
    """Return the visible pairs of queries and joint tokens that stand for `every` tokens each: a rectangle for those
    queries that see the same ones. rows: as in `rank_pieces`."""
    none = np.empty(0, np.int64)
    groups, starts = (np.concatenate([none, *(getattr(row, name) for row in rows)]) for name in ("group", "start"))
    held = np.searchsorted(k.group, q.group)
    some = np.flatnonzero(held < len(k.group))
    q, held = q.take(some), held[some]
    begin, total = q.position - starts[np.searchsorted(groups, q.group)], k.length[held]
    ends = begin + (q.length - 1) * q.step
    total = np.where(k.group[held] == q.group, np.minimum(total, (ends + 1) // every), 0)
    least = np.maximum(np.minimum((begin + 1) // every, total), 1)
    piece, seen = _matches(least, total + 1)  # how many a rectangle's queries see

    def first(seen: Array) -> Array:
        return np.maximum(-((begin[piece] + 1 - seen * every) // q.step[piece]), 0)

    start, stop = first(seen), np.where(seen == total[piece], q.length[piece], first(seen + 1))
    q_offset, k_offset, far = q.offset[piece], k.offset[held[piece]], np.full_like(seen, FAR)
    every_row = np.stack((q_offset + start, q_offset + stop, k_offset, k_offset + seen, -far, far), 1)
    return Tasks(every_row[start < stop])


def _tight_tasks(q: Pieces, k: Pieces, spec: AttentionSpec) -> tuple[Array, Array]:
    """Return the tasks that `tight_task` makes of pairs of pieces, as rows of `Tasks`, and the numbers of the pairs."""
    lowest, within_prefix = (-FAR if x is None else x for x, _ in map(spec.difference_range, (False, True)))
    highest = spec.difference_range()[1]
    least = np.where(q.in_prefix & k.in_prefix, within_prefix, lowest)
    most = np.full_like(least, FAR if highest is None else highest)
    hidden = np.zeros_like(least)
    if spec.joint is not None:
        among = 0 if spec.causal else -FAR  # joint tokens
        least = np.where(q.joint | k.joint, np.where(q.joint & k.joint, among, -FAR), least)
        most = np.where(q.joint | k.joint, FAR, most)
        hidden = spec.causal * ((q.joint != k.joint) & (q.joint == spec.joint.front))  # the key comes later
    # query position - key position = apart + step * (i - j), with i and j indices into the buffers
    apart = q.position - k.position - q.step * (q.offset - k.offset)
    low, high = -((apart - least) // q.step), (most - apart) // q.step
    q_stop, k_stop = q.offset + q.length, k.offset + k.length
    k_stop = np.minimum(k_stop, q_stop - low)
    q_start = np.maximum(q.offset, k.offset + low)
    k_start = np.maximum(k.offset, q_start - high)
    q_stop = np.minimum(q_stop, k_stop + high)
    seen = np.flatnonzero((low <= high) & (q_start < q_stop) & (k_start < k_stop) & (hidden == 0))
    low = np.where(low <= q_start - (k_stop - 1), -FAR, low)
    high = np.where(high >= q_stop - 1 - k_start, FAR, high)
    return np.stack((q_start, q_stop, k_start, k_stop, low, high), 1)[seen], seen


def _merged(rows: Array, group: Array, add: Callable[[list[Task], Task], list[Task]]) -> Array:
    """Return the rows with those of each group merged by `add`, task by task."""
    first = np.flatnonzero(np.diff(group, prepend=-1))
    last = np.append(first, len(group))[1:]
    parts, done = [], 0
    for start, stop in np.stack((first, last), 1)[last - first > 1].tolist():
        parts += [rows[done:start], _merged_group(tuple(map(tuple, rows[start:stop].tolist())), add)]
        done = stop
    return np.concatenate((*parts, rows[done:]))


@lru_cache(maxsize=1024)  # most blocks of a ring are alike
def _merged_group(rows: tuple[tuple[int, ...], ...], add: Callable[[list[Task], Task], list[Task]]) -> Array:
    merged: list[Task] = reduce(add, map(_task, rows), [])
    return Tasks.of(merged).rows


def _append(tasks: list[Task], task: Task) -> list[Task]:
    """Add a task, merging it with the last one if they form one band."""
    joined = _join(tasks[-1], task) if tasks else None
    return [*tasks[:-1], joined] if joined else [*tasks, task]


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
