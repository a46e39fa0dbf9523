"""Reading a rank's part of the batches: its rows, and of those the tokens of its spans, ahead of the step.

What depends on neighboring tokens, positions and shifted labels, follows from the boundaries of documents, which are
part of the row's index. Of the tokens, a rank reads its own, and at the end of a span the next one, which is the last
target. Striped spans alternate with those of other ranks, so that a rank reads what lies between its tokens as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attention import SequenceLayout
from attention.layout import Span
from usp.sp.batch import IGNORED_LABEL

from .packing import PackedRows, Row
from .stream import BatchStream, Rows

AHEAD = 2  # batches that are read before they are asked for

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """What a rank reads of every global batch: the rows from `first` on, `rows` of them, and of each row the spans."""

    first: int
    rows: int
    spans: tuple[Span, ...]

    @staticmethod
    def of(layout: SequenceLayout, ring_rank: int, ulysses_rank: int, first: int, rows: int) -> Part:
        """Return the part of a rank of the ring x ulysses grid; its tokens are those of `layout.positions`."""
        return Part(first, rows, tuple(_own(layout, ring_rank, ulysses_rank)))

    @staticmethod
    def whole(rows: int, seq_len: int) -> Part:
        return Part(0, rows, (Span(0, seq_len),))


def _own(layout: SequenceLayout, ring_rank: int, ulysses_rank: int) -> Iterator[Span]:
    begin = ulysses_rank * layout.local_len  # in the ring rank's order
    for span in layout.ring_spans(ring_rank):
        first, last = max(begin, 0), min(begin + layout.local_len, span.length)
        if first < last:
            yield Span(span.start + first * span.step, last - first, span.step)
        begin -= span.length


@dataclass(frozen=True)
class Batch:
    """A part of a global batch, on CPU, as `usp.sp.batch.shard_batch` gives it.

    numbers: of the rows of the global batch. input_ids, position_ids, shift_labels: int64 (rows, tokens).
    cu_seqlens: int32 (rows, documents + 1), each row from 0 to the end of its last document, which is repeated.
    """

    numbers: range
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    shift_labels: torch.Tensor
    cu_seqlens: torch.Tensor

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what the model and the loss take, on `device`; cu_seqlens stay on the CPU."""
        tokens = {name: getattr(self, name).to(device) for name in ("input_ids", "position_ids", "shift_labels")}
        return tokens | {"cu_seqlens": self.cu_seqlens}


def read_batch(packed: Rows, numbers: range, part: Part, targets: int | None = None) -> Batch:
    """Read a part of the global batch of the rows `numbers`.

    targets: with it, of all rows one after another only the first `targets` tokens are targets.
    """
    rows, columns = [], []
    for number in numbers[part.first : part.first + part.rows]:
        rows.append(packed.row(number))
        limit = packed.seq_len if targets is None else targets - number * packed.seq_len
        spans = [_read(rows[-1], span, limit) for span in part.spans]
        columns.append([np.concatenate(values) for values in zip(*spans, strict=True)])
    ids, positions, labels = (torch.from_numpy(np.stack(column)) for column in zip(*columns, strict=True))
    return Batch(numbers, ids, positions, labels, _padded([row.boundaries for row in rows]))


def _read(row: Row, span: Span, limit: int) -> tuple[Ids, Ids, Ids]:
    """Return the ids of a span, their positions in their documents, and their targets before place `limit`.

    Behind the last document ids are 0, positions are counted from its end, and there are no targets.
    """
    places = span.start + span.step * np.arange(span.length)
    documents = np.searchsorted(row.boundaries, places, side="right")
    ends = np.append(row.boundaries, 0)[documents]
    end = int(places[-1]) + 1
    end = min(end + (end < ends[-1]), int(row.boundaries[-1]))  # with the next token, which is the last target
    tokens, wanted = np.zeros(places[-1] + 2 - span.start, np.int64), np.zeros(places[-1] + 2 - span.start, np.bool_)
    if span.start < end:
        pieces = row.pieces(span.start, end)
        tokens[: end - span.start] = np.concatenate([row.store.read(*piece) for piece in pieces])
        wanted[: end - span.start] = np.concatenate([row.store.read_mask(*piece) for piece in pieces])
    after = places + 1 - span.start
    targets = np.where((places + 1 < np.minimum(ends, limit)) & wanted[after], tokens[after], IGNORED_LABEL)
    return tokens[places - span.start], places - row.boundaries[documents - 1], targets


def _padded(boundaries: Sequence[Ids]) -> torch.Tensor:
    width = max(map(len, boundaries))
    rows = [np.pad(row, (0, width - len(row)), mode="edge") for row in boundaries]
    return torch.from_numpy(np.stack(rows)).to(torch.int32)


class BatchReader(Iterator[Batch]):
    """A rank's part of one global batch after another, from the place of `stream` on, which moves with them.

    A thread reads the next AHEAD batches in the background. waited: seconds that the last batch took to arrive.
    """

    def __init__(self, stream: BatchStream, part: Part) -> None:
        self.stream, self.part, self.waited = stream, part, 0.0
        self._thread = ThreadPoolExecutor(1, "data")
        self._coming: deque[Future[Batch]] = deque()
        self._next = stream.next_row  # to be asked for

    def close(self) -> None:
        """End the reading ahead; no batch can be asked for afterwards."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        while len(self._coming) <= AHEAD:
            numbers = range(self._next, self._next + self.stream.rows)
            self._coming.append(self._thread.submit(read_batch, self.stream.packed, numbers, self.part))
            self._next = numbers.stop
        batch = self._coming.popleft().result()
        self.stream.next_row = batch.numbers.stop
        self.waited = time.perf_counter() - begin
        return batch


def one_epoch(packed: PackedRows, rows: int, part: Part) -> Iterator[Batch]:
    """Yield a part of the first epoch in global batches of `rows` rows, with each token of the store a target once.

    What fills up the last row and the last batch is no target. `packed` has no seed, so that this is its end.
    """
    for first in range(0, packed.per_epoch, rows):
        yield read_batch(packed, range(first, first + rows), part, targets=packed.store.manifest.tokens)
