"""Documents to batches of packed sequences, the same global batches whatever the number of data-parallel ranks.

    units --shuffle--> documents --shuffle in a unit--> ids --concatenate--> sequences of seq_len, back to back

A sequence is cut from the stream wherever it ends: a document that reaches over the cut goes on in the next
sequence as a document of its own, so no token is padding and none is lost. `cu_seqlens` marks where the documents
of a sequence begin. An epoch that runs out is followed by the next, in another order; epoch and seed fix the order.

Every rank walks the whole stream and keeps its rows of each global batch: ranks cannot drift apart, and a fault in
the data shows on all of them before any of them communicates.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from usp.documents import Unit
from usp.tokenizer import Ids, Tokenizer


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


def token_stream(units: Sequence[Unit], tokenizer: Tokenizer, seed: int) -> Iterator[Ids]:
    """The ids of one document after another, for ever; raises ValueError when an epoch holds no token."""
    for epoch in itertools.count():
        order = np.random.default_rng((seed, epoch))
        found = False
        for unit_index in order.permutation(len(units)):
            documents = units[unit_index].read()
            for document_index in order.permutation(len(documents)):
                if document := documents[document_index]:
                    found = True
                    yield tokenizer.encode(document)
        if not found:
            raise ValueError("the data holds no text: every document in it is empty")


def packed_sequences(documents: Iterator[Ids], seq_len: int) -> Iterator[tuple[Ids, list[int]]]:
    """Cut the stream every `seq_len` ids: (ids, where its documents begin and where the last one ends)."""
    row = np.empty(seq_len, dtype=np.int64)
    borders = [0]
    for ids in documents:
        while len(ids):
            taken = min(len(ids), seq_len - borders[-1])
            row[borders[-1] : borders[-1] + taken] = ids[:taken]
            borders.append(borders[-1] + taken)
            ids = ids[taken:]
            if borders[-1] == seq_len:
                yield row, borders
                row, borders = np.empty(seq_len, dtype=np.int64), [0]


def global_batches(
    units: Sequence[Unit], tokenizer: Tokenizer, *, rows: int, seq_len: int, seed: int, vocab_size: int
) -> Iterator[PackedBatch]:
    """Global batches of `rows` sequences, without end.

    Raises ValueError for an id that a model of `vocab_size` has no embedding for, and for data without text.
    """
    sequences = packed_sequences(token_stream(units, tokenizer, seed), seq_len)
    while True:
        chosen = list(itertools.islice(sequences, rows))
        batch = PackedBatch(
            ids=torch.from_numpy(np.stack([ids for ids, _ in chosen])),
            cu_seqlens=_pad_borders([borders for _, borders in chosen]),
        )
        check_ids(batch.ids, tokenizer.name, vocab_size)
        yield batch


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
    width = max(len(row) for row in borders)
    return torch.tensor([row + row[-1:] * (width - len(row)) for row in borders], dtype=torch.int32)
