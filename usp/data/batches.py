"""Global batches of rows, the same for any number of ranks and resumed at any row, and a rank's part of them.

A rank reads its rows, and in them the tokens of its spans, ahead of the step. What depends on neighboring tokens,
positions and shifted labels, follows from the boundaries of documents, which are part of the row's index. A rank reads
its own tokens, and at the end of a span the next one, which is the last target. Striped spans alternate with those of
other ranks, so that a rank reads what lies between its tokens as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attention import SequenceLayout
from attention.layout import Span
from usp.sp.sequence import IGNORED_LABEL

from .mixture import MixedRows
from .rows import PackedRows, Row
from .tokenizer import Ids

AHEAD = 2  # batches that are read before they are asked for
Rows = PackedRows | MixedRows


class BatchStream:
    """A place in the sequence of global batches of `rows` rows of `packed`. next_row: the first of the next batch."""

    def __init__(self, packed: Rows, rows: int) -> None:
        self.packed, self.rows = packed, rows
        self.next_row = 0

    @property
    def epoch(self) -> float:
        """Epochs read so far, with the fraction of the current one."""
        return self.next_row / self.packed.per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume after the batches read so far, as JSON values."""
        return {
            "row": self.next_row,
            "epoch": self.next_row // self.packed.per_epoch,
            "seq_len": self.packed.seq_len,
            "seed": self.packed.seed,
            "data": self.packed.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any], other_data: bool = False) -> None:
        """Resume from `state`; the number of rows in a batch may differ from that of the stream that saved it.

        other_data: accept other data, another tokenizer and another seq_len than those of `state`, and begin the
            epoch after the one that was left.

        Raises ValueError, naming those of seq_len, seed and data that differ; the stream is unchanged.
        """
        identity = {key: value for key, value in self.state_dict().items() if key in ("seq_len", "seed", "data")}
        differing = {key: value for key, value in identity.items() if state[key] != value}
        if other_data and differing:
            self.next_row = (state["epoch"] + 1) * self.packed.per_epoch
            return
        if differing:
            raise ValueError(
                "; ".join(f"{key} = {value}, but the checkpoint has {state[key]}" for key, value in differing.items())
            )
        self.next_row = state["row"]


@dataclass(frozen=True)
class Part:
    """What a rank reads of every global batch: `rows` rows from `first` on, and the spans of each row."""

    first: int
    rows: int
    spans: tuple[Span, ...]

    @staticmethod
    def of(layout: SequenceLayout, ring_rank: int, ulysses_rank: int, first: int, rows: int) -> Part:
        """Return the part of a rank of the ring x ulysses grid; its tokens are those of `layout.positions`."""
        spans = []
        begin = ulysses_rank * layout.local_len  # in the ring rank's order
        for span in layout.ring_spans(ring_rank):
            low, high = max(begin, 0), min(begin + layout.local_len, span.length)
            if low < high:
                spans.append(Span(span.start + low * span.step, high - low, span.step))
            begin -= span.length
        return Part(first, rows, tuple(spans))

    @staticmethod
    def whole(rows: int, seq_len: int) -> Part:
        return Part(0, rows, (Span(0, seq_len),))


@dataclass(frozen=True)
class Batch:
    """A part of a global batch, on CPU, as `usp.sp.sequence.shard_batch` gives it.

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

    targets: number of tokens, counted over all rows, after which there are no targets; None for no limit.
    """
    rows, columns = [], []
    for number in numbers[part.first : part.first + part.rows]:
        rows.append(packed.row(number))
        limit = packed.seq_len if targets is None else targets - number * packed.seq_len
        spans = [_read(rows[-1], span, limit) for span in part.spans]
        columns.append([np.concatenate(values) for values in zip(*spans, strict=True)])
    ids, positions, labels = (torch.from_numpy(np.stack(column)) for column in zip(*columns, strict=True))
    width = max(len(row.boundaries) for row in rows)
    padded = [np.pad(row.boundaries, (0, width - len(row.boundaries)), mode="edge") for row in rows]
    return Batch(numbers, ids, positions, labels, torch.from_numpy(np.stack(padded)).to(torch.int32))


def _read(row: Row, span: Span, limit: int) -> tuple[Ids, Ids, Ids]:
    """Return the ids of a span, their positions in their documents, and their targets, which are before place `limit`.
    Behind the last document ids are 0, positions are counted from its end, and there are no targets."""
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


class BatchReader(Iterator[Batch]):
    """Reads a rank's part of one global batch after another, from the place of `stream` on, which moves with them. A
    thread reads the next AHEAD batches in the background. waited: seconds that the last batch took to arrive."""

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
    What fills up the last row and the last batch is no target. `packed` has no seed, so that it ends there."""
    for first in range(0, packed.per_epoch, rows):
        yield read_batch(packed, range(first, first + rows), part, targets=packed.store.manifest.tokens)
