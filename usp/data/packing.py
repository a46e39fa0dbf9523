"""Packing documents into rows: which tokens of a store are in row 0, 1, 2, ... of an endless sequence of rows.

    documents --permute--> one stream of tokens --cut every seq_len--> rows --permute-->

Each epoch has its own two permutations, fixed by the seed, or none without a seed. So a row depends only on its number:
any row can be read without those before it. A document that crosses a cut continues in another row as a separate
document. The last row of an epoch is filled up with the beginning of the stream, so there is no padding and no token is
left out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .store import TokenStore
from .tokenizer import Ids

PackedRow = tuple[Ids, list[int]]  # ids, and the document boundaries in them, from 0 to seq_len


class PackedRows:
    """The rows of `seq_len` tokens of a store, in the order of `seed`, or for None in the order of the store.

    per_epoch: number of rows in which every token of the store occurs.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int | None) -> None:
        self.store, self.seq_len, self.seed = store, seq_len, seed
        self.per_epoch = -(-store.manifest.tokens // seq_len)
        self._lengths = store.document_lengths()
        self._epoch = -1

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
        place = int(np.searchsorted(self._ends, at, side="right"))
        left = min(int(self._ends[place]) - at, longest)
        document = int(self._documents[place])
        begin = int(self.store.ends[document]) - (int(self._ends[place]) - at)
        return self.store.read(begin, begin + left)

    def _permute(self, epoch: int) -> None:
        permutation: Callable[[int], npt.NDArray[np.int64]] = np.arange
        if self.seed is not None:
            permutation = np.random.default_rng((self.seed, epoch)).permutation
        self._documents = permutation(len(self._lengths))
        self._ends = np.cumsum(self._lengths[self._documents])  # of the documents in the epoch's stream
        self._rows = permutation(self.per_epoch)
        self._epoch = epoch
