"""Global batches of packed sequences, independent of the number of data-parallel ranks and resumable at any batch.

The sequences of `packing` are shuffled in a window of WINDOW_TOKENS, to separate the sequences of a long document.

Every rank reads the whole stream and keeps its rows of each global batch: ranks cannot diverge, and bad data raises on
all of them before any of them communicates. The stream consists of sequences, so a resumed run may change the number
of rows per batch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .documents import Unit
from .packing import PackedSequence, PackedSequences, Position, ShuffleWindow, TokenStream
from .tokenizer import Tokenizer

WINDOW_TOKENS = 2**20
PROBE = "The quick brown fox\njumps over\t13 lazy dogs; größer, 语言, def f(x): return x**2"


@dataclass(frozen=True)
class PackedBatch:
    """Rows of one global batch.

    ids: int64 (rows, seq_len). cu_seqlens: int32 (rows, documents + 1), each row from 0 to seq_len and padded by
    repeating seq_len. Both on CPU.
    """

    ids: torch.Tensor
    cu_seqlens: torch.Tensor

    def rows(self, begin: int, end: int) -> PackedBatch:
        return PackedBatch(self.ids[begin:end], self.cu_seqlens[begin:end])

    def digest(self) -> str:
        """Return a short fingerprint of the batch."""
        return _digest(self.ids.numpy().tobytes() + self.cu_seqlens.numpy().tobytes())


class BatchStream(Iterator[PackedBatch]):
    """Endless iterator over global batches of `rows` sequences.

    Nothing is read before the first batch. Reading raises ValueError for an id outside of `vocab_size`, and for data
    without text.
    """

    def __init__(
        self, units: Sequence[Unit], tokenizer: Tokenizer, *, rows: int, seq_len: int, seed: int, vocab_size: int
    ) -> None:
        self.units, self.tokenizer = units, tokenizer
        self.rows, self.seq_len, self.seed, self.vocab_size = rows, seq_len, seed, vocab_size
        self._sequences = 0  # returned so far
        self._ahead: tuple[dict[str, Any], PackedBatch] | None = None  # state before the peeked batch, and that batch
        self._begin(None)

    def __next__(self) -> PackedBatch:
        if self._ahead is not None:
            (_, batch), self._ahead = self._ahead, None
        else:
            batch = self._read()
        self._sequences += self.rows
        return batch

    def peek(self) -> PackedBatch:
        """Return the next batch without consuming it."""
        if self._ahead is None:
            self._ahead = (self.state_dict(), self._read())
        return self._ahead[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume after the batches consumed so far: JSON values, and two tensors.

        window_ids: int32 (sequences, seq_len), sequences read but not returned yet. window_borders: int32 (sequences,
        documents + 1), their boundaries as in `PackedBatch`. Both have 0 rows before the first batch.
        """
        if self._ahead is not None:
            return self._ahead[0]
        position = self._tokens.position
        window = self._shuffled.window
        ids = np.stack([ids for ids, _ in window]) if window else np.empty((0, self.seq_len))
        return {
            **self._identity,
            "sequences": self._sequences,
            "position": position and asdict(replace(position, offset=self._packed.offset)),
            "draw": dict(self._shuffled.draw.bit_generator.state),
            "window_ids": torch.from_numpy(ids.astype(np.int32)),
            "window_borders": _pad_boundaries([boundaries for _, boundaries in window]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; `rows` and `vocab_size` may differ from those of the stream that saved it.

        Raises ValueError naming all of seq_len, seed, data and tokenizer that differ, and leaves the stream unchanged.
        """
        violations = [
            f"{key} = {here}, but the stream to resume has {key} = {state[key]}: seq_len, seed, data and tokenizer "
            f"must stay the same (the numbers of ranks and rows may change)"
            for key, here in self._identity.items()
            if state[key] != here
        ]
        if violations:
            raise ValueError("; ".join(violations))
        self._sequences, self._ahead = state["sequences"], None
        self._begin(Position(**state["position"]) if state["position"] else None)
        self._shuffled.draw.bit_generator.state = state["draw"]
        ids = state["window_ids"].numpy().astype(np.int64)
        unpadded = [row[: row.index(row[-1]) + 1] for row in state["window_borders"].tolist()]
        self._shuffled.window = list(zip(ids, unpadded, strict=True))

    def _begin(self, start: Position | None) -> None:
        self._tokens = TokenStream(self.units, self.tokenizer, self.seed, start)
        self._packed = PackedSequences(self._tokens, self.seq_len, start.offset if start else 0)
        size = max(1, WINDOW_TOKENS // self.seq_len)
        self._shuffled: ShuffleWindow[PackedSequence] = ShuffleWindow(self._packed, size, self.seed)

    def _read(self) -> PackedBatch:
        chosen = list(itertools.islice(self._shuffled, self.rows))
        batch = PackedBatch(
            ids=torch.from_numpy(np.stack([ids for ids, _ in chosen])),
            cu_seqlens=_pad_boundaries([boundaries for _, boundaries in chosen]),
        )
        low, high = int(batch.ids.min()), int(batch.ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"tokenizer={self.tokenizer.name} produced token id {low if low < 0 else high}, but the model has only "
                f"ids 0 to {self.vocab_size - 1} (vocabulary size {self.vocab_size}): use the model's own tokenizer, "
                f"or a model with a larger vocabulary"
            )
        return batch

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Return the values that a resumed stream must share."""
        probe = _digest(self.tokenizer.encode(PROBE.encode()).tobytes())
        return {
            "seq_len": self.seq_len,
            "seed": self.seed,
            "data": f"{len(self.units)} units, digest {_digest_of_units(self.units)}",
            "tokenizer": f"vocabulary size {self.tokenizer.vocab_size}, digest {probe}",
        }


def _pad_boundaries(boundaries: list[list[int]]) -> torch.Tensor:
    width = max((len(row) for row in boundaries), default=0)
    padded = [row + row[-1:] * (width - len(row)) for row in boundaries]
    return torch.tensor(padded, dtype=torch.int32).view(len(boundaries), width)


def _digest_of_units(units: Sequence[Unit]) -> str:
    """Return a digest of the units' order, kinds, relative paths and sizes: data may move, but not change."""
    sizes = {path: path.stat().st_size for path in {unit.path for unit in units}}
    root = os.path.commonpath([path.parent for path in sizes])
    seen = [(asdict(unit) | {"path": os.path.relpath(unit.path, root)}, sizes[unit.path]) for unit in units]
    return _digest(repr(seen).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
