"""Global batches of packed rows, the same for any number of data-parallel ranks, which can be resumed at any batch.

Every rank reads all rows of a global batch and keeps its own, so that ranks can compare what they read. The stream
consists of rows, so a resumed run may change the number of rows per batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from usp.sp.batch import IGNORED_LABEL

from .packing import PackedRows


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one global batch, on CPU.

    ids: int64 (rows, seq_len). labels: the ids, or -100 for those that are no targets. cu_seqlens: int32
    (rows, documents + 1), each row from 0 to seq_len and padded by repeating seq_len.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor

    def rows(self, begin: int, end: int) -> PackedBatch:
        return PackedBatch(self.ids[begin:end], self.labels[begin:end], self.cu_seqlens[begin:end])

    def digest(self) -> str:
        """Return a short fingerprint of the batch."""
        content = self.ids.numpy().tobytes() + self.cu_seqlens.numpy().tobytes()
        return hashlib.blake2b(content, digest_size=8).hexdigest()


class BatchStream(Iterator[PackedBatch]):
    """Endless iterator over global batches of `rows` rows of `packed`."""

    def __init__(self, packed: PackedRows, rows: int) -> None:
        self.packed, self.rows = packed, rows
        self._next = 0  # number of the next row

    @property
    def epoch(self) -> float:
        """Epochs read so far, with the part of the current one."""
        return self._next / self.packed.per_epoch

    def __next__(self) -> PackedBatch:
        ids, cu_seqlens = _read(self.packed, range(self._next, self._next + self.rows))
        self._next += self.rows
        return PackedBatch(ids, ids, cu_seqlens)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume after the batches read so far, as JSON values."""
        manifest = self.packed.store.manifest
        return {
            "row": self._next,
            "epoch": self._next // self.packed.per_epoch,
            "seq_len": self.packed.seq_len,
            "seed": self.packed.seed,
            "data": f"{manifest.documents} documents, {manifest.tokens} tokens, digest {manifest.digest}",
        }

    def load_state_dict(self, state: Mapping[str, Any], other_data: bool = False) -> None:
        """Resume from `state`; the number of rows in a batch may differ from that of the stream that saved it.

        other_data: accept other data, another tokenizer and another seq_len than those of `state`, and begin the
            epoch after the one that was left.

        Raises:
            ValueError: naming all of seq_len, seed and data that differ; the stream is unchanged.
        """
        differing = {key: here for key, here in self.state_dict().items() if key in _IDENTITY and state[key] != here}
        if other_data and differing:
            self._next = (state["epoch"] + 1) * self.packed.per_epoch
            return
        if differing:
            raise ValueError(
                "; ".join(f"{key} = {here}, but the checkpoint has {state[key]}" for key, here in differing.items())
            )
        self._next = state["row"]


_IDENTITY = ("seq_len", "seed", "data")


def one_epoch(packed: PackedRows, rows: int) -> Iterator[PackedBatch]:
    """Yield the first epoch in global batches of `rows` rows, with labels for each token of the store once.

    What fills up the last row and the last batch has no labels. `packed` has no seed, so that this is its end.
    """
    for first in range(0, packed.per_epoch, rows):
        numbers = range(first, first + rows)
        ids, cu_seqlens = _read(packed, numbers)
        place = torch.tensor(numbers)[:, None] * packed.seq_len + torch.arange(packed.seq_len)
        labels = torch.where(place < packed.store.manifest.tokens, ids, IGNORED_LABEL)
        yield PackedBatch(ids, labels, cu_seqlens)


def _read(packed: PackedRows, numbers: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and cu_seqlens of the rows."""
    chosen = [packed[number] for number in numbers]
    ids = torch.from_numpy(np.stack([ids for ids, _ in chosen]))
    return ids, _pad_boundaries([boundaries for _, boundaries in chosen])


def _pad_boundaries(boundaries: list[list[int]]) -> torch.Tensor:
    width = max(len(row) for row in boundaries)
    padded = [row + row[-1:] * (width - len(row)) for row in boundaries]
    return torch.tensor(padded, dtype=torch.int32).view(len(boundaries), width)
