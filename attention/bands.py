"""What a block of queries sees of a block of keys, as rectangles of local indices under a band.

A rank's tokens are spans of equal step (layout.py). Between one span of queries and one span of keys every mask that
is a range of `query position - key position` is a range of `query index - key index`:

      keys ->                   full          causal        window        striped, later keys
      queries                   # # # #       # . . .       # . . .       . . . .
         |                      # # # #       # # . .       # # . .       # . . .
         v                      # # # #       # # # .       . # # .       # # . .

so one function makes the tasks for every layout and mask. A task is tight: each of its rows and columns holds a visible
pair. That is what the kernels' alignment rules, the trimming of what travels, and lse > -inf rest on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .layout import SequenceLayout
from .spec import AttentionSpec


@dataclass(frozen=True)
class Task:
    """Queries [q_start, q_stop) attend to keys [k_start, k_stop) where lowest <= i - j <= highest.

    i and j count in the whole query and key buffers, so a band keeps its numbers when its rectangle is cut. A limit
    is None where it hides nothing of the rectangle.
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
        """Whether the rectangle is visible throughout."""
        return self.lowest is None and self.highest is None

    def shift_keys(self, offset: int) -> Task:
        """The same task with its keys `offset` further on in their buffer."""
        lowest = None if self.lowest is None else self.lowest - offset
        highest = None if self.highest is None else self.highest - offset
        return Task(self.q_start, self.q_stop, self.k_start + offset, self.k_stop + offset, lowest, highest)

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> Task | None:
        """The part within the given query and key ranges, tight; None if nothing of it is visible."""
        q_start, q_stop = max(self.q_start, rows[0]), min(self.q_stop, rows[1])
        k_start, k_stop = max(self.k_start, columns[0]), min(self.k_stop, columns[1])
        return tight_task(q_start, q_stop, k_start, k_stop, self.lowest, self.highest)

    @property
    def relative_band(self) -> tuple[int | None, int | None]:
        """(lowest, highest) with rows and columns counted from the rectangle's own corner."""
        offset = self.q_start - self.k_start
        lowest = None if self.lowest is None else self.lowest - offset
        return lowest, None if self.highest is None else self.highest - offset

    def visible(self) -> int:
        """The number of visible (query, key) pairs."""
        return band_pairs(self.rows, self.columns, self.q_start - self.k_start, self.lowest, self.highest)


def tight_task(
    q_start: int, q_stop: int, k_start: int, k_stop: int, lowest: int | None, highest: int | None
) -> Task | None:
    """The task shrunk to the rows and columns that hold a visible pair; None where there is none."""
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
    """The tasks by their queries, each with the number of a layer in which no query row is twice."""
    ends: list[int] = []  # where the last task of each layer ends
    for task in sorted(tasks, key=lambda t: (t.q_start, t.k_start)):
        layer = next((i for i, end in enumerate(ends) if end <= task.q_start), len(ends))
        ends[layer : layer + 1] = [task.q_stop]
        yield layer, task


def band_pairs(rows: int, columns: int, offset: int, lowest: int | None, highest: int | None) -> int:
    """Count the pairs (i, j) of a rows x columns rectangle with lowest <= offset + i - j <= highest."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    def above(limit: int) -> int:  # pairs with i - j > limit, by inclusion and exclusion of half planes
        corner = rows - limit - 1
        return (
            triangle(corner) - triangle(corner - columns) - triangle(corner - rows) + triangle(corner - rows - columns)
        )

    count = rows * columns if lowest is None else above(lowest - offset - 1)
    return count if highest is None else count - above(highest - offset)


@dataclass(frozen=True)
class Piece:
    """A run of one document's tokens within a rank's span; `position` is the first's, `offset` its local index."""

    position: int
    offset: int
    length: int
    step: int


Pieces = dict[tuple[int, int], list[Piece]]


def rank_pieces(layout: SequenceLayout, spec: AttentionSpec, batch: int, ring_rank: int) -> Pieces:
    """A ring rank's tokens, by (row, document). Local indices count through the flattened (batch, ring_len) tokens."""
    pieces: Pieces = defaultdict(list)
    for row in range(batch):
        borders = spec.row_documents(row, layout.seq_len)
        offset = row * layout.ring_len
        for span in layout.ring_spans(ring_rank):
            end = span.start + (span.length - 1) * span.step
            for document in range(max(0, bisect_right(borders, span.start) - 1), bisect_right(borders, end)):
                lower, upper = borders[document], borders[min(document + 1, len(borders) - 1)]
                first, last = span.index_range(lower, upper)
                if first < last:
                    position = span.start + first * span.step
                    pieces[row, document].append(Piece(position, offset + first, last - first, span.step))
            offset += span.length
    return pieces


def block_tasks(q_pieces: Pieces, k_pieces: Pieces, spec: AttentionSpec) -> tuple[Task, ...]:
    """What one rank's queries see of one rank's keys, in few tight tasks. No pair is in two tasks."""
    lowest, highest = spec.difference_range()
    tasks: list[Task] = []
    for group, queries in q_pieces.items():
        found: list[Task] = []
        for q in queries:
            for k in k_pieces.get(group, ()):
                # position of q - position of k = apart + step * (i - j), i and j counted from the buffers' starts
                apart = q.position - k.position - q.step * (q.offset - k.offset)
                low = None if lowest is None else -((apart - lowest) // q.step)
                high = None if highest is None else (highest - apart) // q.step
                task = tight_task(q.offset, q.offset + q.length, k.offset, k.offset + k.length, low, high)
                if task is not None:
                    found = _absorb(found, task)
        tasks += found
    return tuple(tasks)


def _absorb(tasks: list[Task], task: Task) -> list[Task]:
    """Add a task, joined with those that make one band with it (zigzag's halves become one triangle)."""
    for index, other in enumerate(tasks):
        joined = _join(other, task)
        if joined is not None:
            return _absorb(tasks[:index] + tasks[index + 1 :], joined)
    return [*tasks, task]


def _join(a: Task, b: Task) -> Task | None:
    """One task that sees exactly the pairs of two disjoint ones, if a band of theirs does."""
    rectangle = min(a.q_start, b.q_start), max(a.q_stop, b.q_stop), min(a.k_start, b.k_start), max(a.k_stop, b.k_stop)
    wanted = a.visible() + b.visible()
    for lowest in dict.fromkeys((a.lowest, b.lowest, None)):
        for highest in dict.fromkeys((a.highest, b.highest, None)):
            hull = tight_task(*rectangle, lowest, highest)
            # A hull that sees every pair of a and of b, and as many as they have, sees no other pair.
            if hull is not None and hull.visible() == wanted and _covers(hull, a) and _covers(hull, b):
                return hull
    return None


def _covers(hull: Task, part: Task) -> bool:
    lowest = max((limit for limit in (hull.lowest, part.lowest) if limit is not None), default=None)
    highest = min((limit for limit in (hull.highest, part.highest) if limit is not None), default=None)
    both = tight_task(part.q_start, part.q_stop, part.k_start, part.k_stop, lowest, highest)
    return both is not None and both.visible() == part.visible()
