"""Batches of packed sequences: the same global batches whatever the number of data-parallel ranks, from any point on.

The sequences are those of `packing`, drawn from a window of WINDOW_TOKENS, so that the sequences of a long document do
not follow one another.

Every rank walks the whole stream and keeps its rows of each global batch: ranks cannot drift apart, and a fault in
the data shows on all of them before any of them communicates. The stream is one of sequences: how many make a batch
may change where it is continued.
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
        """A short fingerprint: equal batches have equal digests."""
        state = hashlib.blake2b(self.ids.numpy().tobytes(), digest_size=8)
        state.update(self.cu_seqlens.numpy().tobytes())
        return state.hexdigest()


class BatchStream(Iterator[PackedBatch]):
    """Global batches of `rows` sequences, without end.

    Reads nothing before the first batch is asked for, which raises ValueError for an id that a model of `vocab_size`
    has no embedding for, and for data without text.
    """

    def __init__(
        self, units: Sequence[Unit], tokenizer: Tokenizer, *, rows: int, seq_len: int, seed: int, vocab_size: int
    ) -> None:
        self.units, self.tokenizer = units, tokenizer
        self.rows, self.seq_len, self.seed, self.vocab_size = rows, seq_len, seed, vocab_size
        self._given = 0
        self._ahead: tuple[dict[str, Any], PackedBatch] | None = None  # the state before a batch, and that batch
        self._begin(None)

    def __next__(self) -> PackedBatch:
        if self._ahead is not None:
            (_, batch), self._ahead = self._ahead, None
        else:
            batch = self._read()
        self._given += self.rows
        return batch

    def peek(self) -> PackedBatch:
        """The batch that comes next, which stays the next one."""
        if self._ahead is None:
            self._ahead = (self.state_dict(), self._read())
        return self._ahead[1]

    def state_dict(self) -> dict[str, Any]:
        """What continues the stream after the batches given so far: values JSON knows, and two tensors.

        window_ids: int32 (sequences, seq_len), the sequences read and not given yet. window_borders: int32
        (sequences, documents + 1), as in `PackedBatch`. Both have 0 rows before the first batch.
        """
        if self._ahead is not None:
            return self._ahead[0]
        position = self._tokens.position
        window = self._shuffled.window
        ids = np.stack([ids for ids, _ in window]) if window else np.empty((0, self.seq_len))
        return {
            **self._identity,
            "sequences": self._given,
            "position": position and asdict(replace(position, offset=self._packed.offset)),
            "draw": dict(self._shuffled.draw.bit_generator.state),
            "window_ids": torch.from_numpy(ids.astype(np.int32)),
            "window_borders": _pad_borders([borders for _, borders in window]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the stream that gave `state` was; `rows` and `vocab_size` may be others than there.

        Raises ValueError, and stays where it is, when seq_len, seed, data or tokenizer differ; names all that do.
        """
        if violations := self._violations(state):
            raise ValueError("; ".join(violations))
        self._given, self._ahead = state["sequences"], None
        self._begin(Position(**state["position"]) if state["position"] else None)
        self._shuffled.draw.bit_generator.state = state["draw"]
        ids = state["window_ids"].numpy().astype(np.int64)
        self._shuffled.window = list(zip(ids, map(_without_padding, state["window_borders"].tolist()), strict=True))

    def _begin(self, start: Position | None) -> None:
        self._tokens = TokenStream(self.units, self.tokenizer, self.seed, start)
        self._packed = PackedSequences(self._tokens, self.seq_len, start.offset if start else 0)
        size = max(1, WINDOW_TOKENS // self.seq_len)
        self._shuffled: ShuffleWindow[PackedSequence] = ShuffleWindow(self._packed, size, self.seed)

    def _read(self) -> PackedBatch:
        chosen = list(itertools.islice(self._shuffled, self.rows))
        batch = PackedBatch(
            ids=torch.from_numpy(np.stack([ids for ids, _ in chosen])),
            cu_seqlens=_pad_borders([borders for _, borders in chosen]),
        )
        check_ids(batch.ids, self.tokenizer.name, self.vocab_size)
        return batch

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must not change where the stream is continued."""
        return {
            "seq_len": self.seq_len,
            "seed": self.seed,
            "data": f"{len(self.units)} units, digest {_digest_of_units(self.units)}",
            "tokenizer": f"vocabulary size {self.tokenizer.vocab_size}, digest {_digest_of_tokenizer(self.tokenizer)}",
        }

    def _violations(self, state: Mapping[str, Any]) -> list[str]:
        return [
            f"{key} = {here}, but the stream to continue has {key} = {state[key]}: it can go on only with its own "
            f"seq_len, seed, data and tokenizer (the number of ranks and of rows may change)"
            for key, here in self._identity.items()
            if state[key] != here
        ]


def check_ids(ids: torch.Tensor, tokenizer_name: str, vocab_size: int) -> None:
    """Raise ValueError when an id is not in 0 .. vocab_size - 1."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"tokenizer={tokenizer_name} gave token id {low if low < 0 else high}, and the model's vocabulary holds "
            f"ids 0 to {vocab_size - 1} (vocabulary size {vocab_size}): use the tokenizer that belongs to the model, "
            f"or a model with a larger vocabulary"
        )


def _pad_borders(borders: list[list[int]]) -> torch.Tensor:
    width = max((len(row) for row in borders), default=0)
    padded = [row + row[-1:] * (width - len(row)) for row in borders]
    return torch.tensor(padded, dtype=torch.int32).view(len(borders), width)


def _without_padding(borders: list[int]) -> list[int]:
    return borders[: borders.index(borders[-1]) + 1]


def _digest_of_units(units: Sequence[Unit]) -> str:
    """Of their order, kinds, places below their common folder, and sizes: the data may move, and must not change."""
    sizes = {path: path.stat().st_size for path in {unit.path for unit in units}}
    root = os.path.commonpath([path.parent for path in sizes])
    seen = [(asdict(unit) | {"path": os.path.relpath(unit.path, root)}, sizes[unit.path]) for unit in units]
    return _digest(repr(seen).encode())


def _digest_of_tokenizer(tokenizer: Tokenizer) -> str:
    return _digest(tokenizer.encode(PROBE.encode()).tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
