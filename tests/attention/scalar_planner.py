"""The tasks of a block found pair by pair, in Python: what the planner's arrays must give."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

from usp.attention import AttentionSpec, SequenceLayout, Task
from usp.attention.bands import _join, tight_task


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document within a rank's span: position and local index of the first."""

    position: int
    offset: int
    length: int
    step: int
    in_prefix: bool


Pieces = dict[tuple[int, int], list[Piece]]


def pieces_of(layout: SequenceLayout, spec: AttentionSpec, batch: int, rank: int) -> Pieces:
    """Return a rank's tokens by row and document."""
    pieces: Pieces = defaultdict(list)
    for row in range(batch):
        boundaries, prefixes = spec.row_documents(row, layout.seq_len), spec.row_prefixes(row)
        depths, offset = spec.row_depths(row, layout.seq_len), row * layout.ring_len
        for span in layout.ring_spans(rank, row):
            for document, (lower, upper) in enumerate(pairwise(boundaries)):
                middle = lower + (prefixes[document] if prefixes else 0)
                for start, stop, in_prefix in ((lower, middle, True), (middle, upper, False)):
                    first, last = span.index_range(start, stop)
                    if first < last:
                        shift = depths[document] - lower if spec.parents else 0
                        at = span.start + first * span.step + shift
                        pieces[row, document].append(Piece(at, offset + first, last - first, span.step, in_prefix))
            offset += span.length
    return dict(sorted(pieces.items()))


def below(pieces: Pieces, spec: AttentionSpec) -> Pieces:
    """Return the pieces of the documents that continue each document; adjacent ones joined where no window is."""
    following: Pieces = defaultdict(list)
    for (row, document), of_document in pieces.items():
        while spec.parents and (document := spec.row_parents(row)[document]) >= 0:
            runs = following[row, document]
            for piece in of_document:
                if spec.one_sided and runs and runs[-1].offset + runs[-1].length == piece.offset:
                    runs[-1] = replace(runs[-1], length=runs[-1].length + piece.length)
                else:
                    runs.append(piece)
    return following


def scalar_tasks(layout: SequenceLayout, spec: AttentionSpec, batch: int, q_rank: int, k_rank: int) -> list[Task]:
    """Return the tasks of a rank's queries and a rank's keys, as indices into their own tokens."""
    queries, keys = (pieces_of(layout, spec, batch, rank) for rank in (q_rank, k_rank))
    tasks: list[Task] = []
    for group, of_group in queries.items():
        found: list[Task] = []
        for task in (visible(q, k, spec) for q in of_group for k in keys.get(group, ())):
            found = found if task is None else absorbed(found, task)
        tasks += found
    lower = below(queries, spec)
    for group, of_group in keys.items():
        for k in of_group:
            found = []
            for task in (visible(q, k, spec) for q in lower.get(group, ())):
                joined = _join(found[-1], task) if found and task else None
                found = [*found[:-1], joined] if joined else found if task is None else [*found, task]
            tasks += found
    return tasks


def visible(q: Piece, k: Piece, spec: AttentionSpec) -> Task | None:
    lowest, highest = spec.difference_range(q.in_prefix and k.in_prefix)
    apart = q.position - k.position - q.step * (q.offset - k.offset)
    low = None if lowest is None else -((apart - lowest) // q.step)
    high = None if highest is None else (highest - apart) // q.step
    return tight_task(q.offset, q.offset + q.length, k.offset, k.offset + k.length, low, high)


def absorbed(tasks: list[Task], task: Task) -> list[Task]:
    for index, other in enumerate(tasks):
        joined = _join(other, task)
        if joined is not None:
            return absorbed(tasks[:index] + tasks[index + 1 :], joined)
    return [*tasks, task]
