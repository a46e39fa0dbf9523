"""Packing documents into rows: which tokens of a store are in row 0, 1, 2, ... of an endless sequence of rows.

    documents --permute--> one stream of tokens --cut every seq_len--> rows --permute-->

Each epoch has its own two permutations, fixed by the seed, or none without a seed. So a row depends only on its number:
any row can be read without those before it. A document that crosses a cut continues in another row as a separate
document. The last row of an epoch is filled up with the beginning of the stream, so there is no padding and no token is
left out.

The permutations hold nothing in memory. To find a place in an epoch's stream, its documents are taken in at most BLOCKS
blocks, whose lengths are added up once per epoch, in the order in which the store has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .permutation import Numbers, Permutation
from .store import TokenStore

BLOCKS = 2**20
BLOCK = 64  # documents, or more where BLOCKS such blocks are too few


@dataclass(frozen=True)
class Row:
    """Which tokens of `store` a row consists of.

    begins: int64 (documents,), where in the store each document of the row begins. boundaries: int64 (documents + 1,),
    where in the row, from 0 to seq_len, or less if the rest of the row is padding.
    """

    store: TokenStore
    begins: Numbers
    boundaries: Numbers

    def pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return where in the store the tokens at places begin to end - 1 of the row are, as half-open intervals."""
        first = int(np.searchsorted(self.boundaries, begin, side="right")) - 1
        last = int(np.searchsorted(self.boundaries, end, side="left"))
        at = self.begins[first:last].copy()
        lengths = np.diff(self.boundaries[first : last + 1])
        ends = at + lengths
        at[0] += begin - self.boundaries[first]
        ends[-1] -= self.boundaries[last] - end
        breaks = np.flatnonzero(at[1:] != ends[:-1])  # documents that follow each other in the store are one piece
        starts = np.concatenate(([0], breaks + 1))
        stops = np.concatenate((breaks, [len(at) - 1]))
        return list(zip(at[starts].tolist(), ends[stops].tolist(), strict=True))


class PackedRows:
    """The rows of `seq_len` tokens of a store, in the order of `seed`, or for None in the order of the store.

    per_epoch: number of rows in which every token of the store occurs.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int | None) -> None:
        self.store, self.seq_len, self.seed = store, seq_len, seed
        self.per_epoch = -(-store.manifest.tokens // seq_len)
        self._epoch: tuple[int, _Stream, Permutation] | None = None  # the last one that was read

    @property
    def sources(self) -> tuple[PackedRows, ...]:
        """The rows of each store that these are rows of."""
        return (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        """The part of the rows that is of each of `sources`."""
        return (1.0,)

    @property
    def identity(self) -> str:
        """What two sequences of rows from the same data have in common, whatever their seq_len and seed."""
        held = self.store.manifest
        return f"{held.documents} documents, {held.tokens} tokens, digest {held.digest}"

    def row(self, number: int) -> Row:
        """Return what row `number` consists of; its tokens are not read."""
        epoch, place = divmod(number, self.per_epoch)
        stream, order = self._orders(epoch)
        tokens = self.store.manifest.tokens
        first = int(order.at(np.array([place]))[0]) * self.seq_len
        parts: list[tuple[Numbers, Numbers]] = []
        left = self.seq_len
        while left:
            at = (first + self.seq_len - left) % tokens
            end = min(at + left, tokens)
            parts += stream.parts(at, end)
            left -= end - at
        begins, lengths = (np.concatenate(values) for values in zip(*parts, strict=True))
        return Row(self.store, begins, np.cumsum(np.concatenate(([0], lengths))))

    def _orders(self, epoch: int) -> tuple[_Stream, Permutation]:
        if self._epoch is None or self._epoch[0] != epoch:
            documents, rows = (None if self.seed is None else (self.seed, epoch, which) for which in (0, 1))
            self._epoch = epoch, _Stream(self.store, documents), Permutation(self.per_epoch, rows)
        return self._epoch[1:]


class StageRows(PackedRows):
    """The rows of a stage of a curriculum, which go on where the stage before has left the store.

    All stages cut the same endless stream, the documents of one epoch after those of another, so that no token is in
    two stages of one epoch, however long their rows are. Rows are permuted among those of the stage that begin in the
    same epoch.

    begin: tokens of the endless stream before this stage. count: rows of the stage; later ones follow in order.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int, begin: int, count: int) -> None:
        super().__init__(store, seq_len, seed)
        self.begin, self.count, self._key = begin, count, seed
        self._streams: dict[int, _Stream] = {}  # the last two that were read
        self._order: tuple[int, Permutation] | None = None

    @property
    def identity(self) -> str:
        return f"tokens {self.begin} to {self.begin + self.count * self.seq_len} of {super().identity}"

    def row(self, number: int) -> Row:
        tokens = self.store.manifest.tokens
        at = self.begin + self._place(number) * self.seq_len
        end, parts = at + self.seq_len, list[tuple[Numbers, Numbers]]()
        while at < end:
            epoch, within = divmod(at, tokens)
            upto = min(within + end - at, tokens)
            parts += self._stream(epoch).parts(within, upto)
            at += upto - within
        begins, lengths = (np.concatenate(values) for values in zip(*parts, strict=True))
        return Row(self.store, begins, np.cumsum(np.concatenate(([0], lengths))))

    def _place(self, number: int) -> int:
        """Return which row of the stage, as they follow each other in the stream, has this number."""
        if number >= self.count:
            return number
        epoch = (self.begin + number * self.seq_len) // self.store.manifest.tokens
        first, last = self._first_of(epoch), min(self._first_of(epoch + 1), self.count)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(last - first, (self._key, epoch, 1, self.begin))
        return first + int(self._order[1].at(np.array([number - first]))[0])

    def _first_of(self, epoch: int) -> int:
        """Return the first row of the stage that begins in this epoch or later."""
        return max(0, -(-(epoch * self.store.manifest.tokens - self.begin) // self.seq_len))

    def _stream(self, epoch: int) -> _Stream:
        if epoch not in self._streams:
            near = {other: stream for other, stream in self._streams.items() if abs(other - epoch) == 1}
            self._streams = near | {epoch: _Stream(self.store, (self._key, epoch, 0))}
        return self._streams[epoch]


class _Stream:
    """The documents of a store one after another, in the order of `key`: what is where in this stream."""

    def __init__(self, store: TokenStore, key: tuple[int, ...] | None) -> None:
        self._store, self._order = store, Permutation(store.manifest.documents, key)
        self._block = max(BLOCK, -(-store.manifest.documents // BLOCKS))
        sizes = np.zeros(-(-store.manifest.documents // self._block), np.int64)
        for documents, lengths in store.lengths():
            np.add.at(sizes, self._order.place_of(documents) // self._block, lengths)
        self._begins = np.cumsum(sizes) - sizes
        self._last: tuple[int, Numbers, Numbers, Numbers] = (-1, sizes, sizes, sizes)

    def parts(self, begin: int, end: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield where in the store the documents between two places of the stream begin, and their lengths.

        The first and the last are cut to these places; empty documents are left out.
        """
        for block in range(int(np.searchsorted(self._begins, begin, side="right")) - 1, len(self._begins)):
            if self._begins[block] >= end:
                return
            in_store, begins, ends = self._documents_of(block)
            cut = np.maximum(begins, begin)
            lengths = np.minimum(ends, end) - cut
            some = lengths > 0
            yield (in_store + cut - begins)[some], lengths[some]

    def _documents_of(self, block: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return where the documents of a block begin in the store, and where in the stream they begin and end."""
        if block != self._last[0]:
            last = min((block + 1) * self._block, self._store.manifest.documents)
            in_store, ends = self._store.bounds(self._order.at(np.arange(block * self._block, last)))
            in_stream = self._begins[block] + np.cumsum(ends - in_store)
            self._last = block, in_store, in_stream - (ends - in_store), in_stream
        return self._last[1:]
