"""Packing whole documents into rows, with padding at their ends, for fine-tuning.

    documents --permute--> windows of WINDOW documents --best fit--> rows --permute windows, then rows of a window-->

In a window, the longest document comes first, and each goes where the least room is left, or begins a row (best-fit
decreasing). A document that is longer than a row is cut every seq_len tokens, and only its last part is packed. Of a
store with a mask only the first seq_len tokens of a document are kept, because targets without what is before them
teach something else, and a document without a target there is left out. Windows are the same in every epoch, so that
all epochs have as many rows; their order, and that of their rows, differs. Of all this a rank holds a number a window.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .packing import PackedRows, Row
from .permutation import Numbers, Permutation
from .store import TokenStore

WINDOW = 4096


@dataclass(frozen=True)
class _Window:
    """Documents that are packed together: where in the store their parts begin, how long they are, and in which rows.

    long: documents longer than a row. left_out: those that have no part.
    """

    number: int
    begins: Numbers
    lengths: Numbers
    rows: list[list[int]]
    long: int
    left_out: int


class WholeRows(PackedRows):
    """Rows of at most `seq_len` tokens of whole documents of a store, in the order of `seed`.

    tokens: in the rows of an epoch. long: documents of more than `seq_len` tokens. left_out: of these, those without a
    target in their first `seq_len` tokens.

    Raises:
        ValueError: if all documents are left out.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int) -> None:
        super().__init__(store, seq_len, seed)
        self._key = seed
        self._documents = Permutation(store.manifest.documents, (seed, 0, 2))
        self._window: _Window | None = None  # the last one that was packed
        self.tokens = self.long = self.left_out = 0
        self._counts = np.zeros(-(-store.manifest.documents // WINDOW), np.int64)
        for number in range(len(self._counts)):
            window = self._packed(number)
            self._counts[number] = len(window.rows)
            self.tokens += int(window.lengths.sum())
            self.long += window.long
            self.left_out += window.left_out
        self.per_epoch = int(self._counts.sum())
        if not self.per_epoch:
            raise ValueError(
                f"no document of {store.folder} has a target in its first seq_len={seq_len} tokens: raise seq_len"
            )

    @property
    def identity(self) -> str:
        return f"whole documents of {super().identity}"

    def row(self, number: int) -> Row:
        epoch, place = divmod(number, self.per_epoch)
        order = Permutation(len(self._counts), (self._key, epoch, 3)).at(np.arange(len(self._counts)))
        ends = np.cumsum(self._counts[order])
        at = int(np.searchsorted(ends, place, side="right"))
        window = self._packed(int(order[at]))
        within = np.array([place - int(ends[at]) + len(window.rows)])
        parts = window.rows[int(Permutation(len(window.rows), (self._key, epoch, 4, window.number)).at(within)[0])]
        return Row(self.store, window.begins[parts], np.cumsum(np.concatenate(([0], window.lengths[parts]))))

    def _packed(self, number: int) -> _Window:
        if self._window is None or self._window.number != number:
            last = min((number + 1) * WINDOW, self.store.manifest.documents)
            begins, ends = self.store.bounds(self._documents.at(np.arange(number * WINDOW, last)))
            long = np.flatnonzero(ends - begins > self.seq_len)
            parts = -(-(ends - begins) // self.seq_len)  # none of an empty document
            if self.store.manifest.masked:
                firsts = begins[long].tolist()
                parts[long] = [self.store.read_mask(at + 1, at + self.seq_len).any() for at in firsts]
            part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # its number in its document
            begins = np.repeat(begins, parts) + part * self.seq_len
            lengths = np.minimum(np.repeat(ends, parts) - begins, self.seq_len)
            rows = best_fit(lengths.tolist(), self.seq_len)
            self._window = _Window(number, begins, lengths, rows, len(long), int((parts[long] == 0).sum()))
        return self._window


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Divide the indices of `lengths` into rows of at most `room` in all, by best-fit decreasing."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(left, (lengths[index], -1))
        free, row = left.pop(at) if at < len(left) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(left, (free - lengths[index], row))
    return rows
