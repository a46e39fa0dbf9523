"""Packing documents into rows: which tokens of a store are in row 0, 1, 2, ... of an endless sequence of rows.

    documents --permute--> one stream of tokens --cut every seq_len--> rows --permute-->

Each epoch has its own two permutations, fixed by the seed, or none without a seed. So a row depends only on its number:
any row can be read without those before it. A document that crosses a cut continues in another row as a separate
document. The last row of an epoch is filled up with the beginning of the stream, so there is no padding and no token is
left out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .store import TokenStore
from .tokenizer import Ids

BLOCK = 64  # documents of an epoch's stream whose place in it is remembered together

PackedRow = tuple[Ids, list[int]]  # ids, and the document boundaries in them, from 0 to seq_len


class PackedRows:
    """The rows of `seq_len` tokens of a store, in the order of `seed`, or for None in the order of the store.

    per_epoch: number of rows in which every token of the store occurs.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int | None) -> None:
        self.store, self.seq_len, self.seed = store, seq_len, seed
        self.per_epoch = -(-store.manifest.tokens // seq_len)
        self._epoch = -1
        # The last block of documents that was read: its number, the documents, and their ends in the epoch's stream.
        self._block: tuple[int, npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]

    def __getitem__(self, number: int) -> PackedRow:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._permute(epoch)
        row = np.empty(self.seq_len, np.int64)
        boundaries = [0]
        at = int(self._rows[place]) * self.seq_len  # in the epoch's stream
        while boundaries[-1] < self.seq_len:
            at %= self.store.manifest.tokens
            part = self._document_from(at, self.seq_len - boundaries[-1])
            row[boundaries[-1] : boundaries[-1] + len(part)] = part
            boundaries.append(boundaries[-1] + len(part))
            at += len(part)
        return row, boundaries

    def _document_from(self, at: int, longest: int) -> Ids:
        """Return at most `longest` ids of the document at place `at` of the epoch's stream, from there on."""
        documents, ends = self._block_at(at)
        place = int(np.searchsorted(ends, at, side="right"))
        left = int(ends[place]) - at
        begin = int(self.store.ends[documents[place]]) - left
        return self.store.read(begin, begin + min(left, longest))

    def _block_at(self, at: int) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
        """Return the documents around place `at` of the epoch's stream, and the places in it at which they end."""
        index = int(np.searchsorted(self._begins, at, side="right")) - 1
        if index != self._block[0]:
            documents = self._documents[index * BLOCK : (index + 1) * BLOCK]
            self._block = index, documents, self._begins[index] + np.cumsum(self.store.lengths(documents))
        return self._block[1:]

    def _permute(self, epoch: int) -> None:
        draw = None if self.seed is None else np.random.default_rng((self.seed, epoch))
        self._documents = _numbers(self.store.manifest.documents, draw)
        sizes = []  # of blocks of documents: the place of each document would take much memory
        for first in range(0, len(self._documents), 2**12 * BLOCK):
            lengths = self.store.lengths(self._documents[first : first + 2**12 * BLOCK])
            sizes.append(np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK)))
        self._begins = np.cumsum(np.concatenate(([0], *sizes)))[:-1]  # of the blocks
        self._block = -1, self._documents[:0], self._begins[:0]
        self._rows = _numbers(self.per_epoch, draw)
        self._epoch = epoch


def _numbers(count: int, draw: np.random.Generator | None) -> npt.NDArray[np.unsignedinteger]:
    """Return the numbers below `count` in random order, or ascending without `draw`, in the smallest type."""
    numbers = np.arange(count, dtype=np.min_scalar_type(count))
    if draw is not None:
        draw.shuffle(numbers)
    return numbers
