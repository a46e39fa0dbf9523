"""Packing whole documents into rows, with padding at their ends, for fine-tuning.

    documents --permute--> windows of WINDOW documents --best fit--> rows --permute windows, then rows of a window-->

In a window, the longest document comes first, and each goes where the least room is left, or begins a row (best-fit
decreasing). A document that is longer than a row is cut every seq_len tokens, and only its last part is packed. Windows
are the same in every epoch, so that all epochs have as many rows; their order, and that of their rows, differs. Of all
this a rank holds a number per window.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from .packing import PackedRows, Row
from .permutation import Numbers, Permutation
from .store import TokenStore

WINDOW = 4096


class WholeRows(PackedRows):
    """Rows of at most `seq_len` tokens of whole documents of a store, in the order of `seed`."""

    def __init__(self, store: TokenStore, seq_len: int, seed: int) -> None:
        super().__init__(store, seq_len, seed)
        self._key = seed
        self._documents = Permutation(store.manifest.documents, (seed, 0, 2))
        self._window: tuple[int, Numbers, Numbers, list[list[int]]] | None = None  # the last one that was packed
        windows = range(-(-store.manifest.documents // WINDOW))
        self._counts = np.array([len(self._packed(window)[2]) for window in windows])
        self.per_epoch = int(self._counts.sum())

    @property
    def identity(self) -> str:
        return f"whole documents of {super().identity}"

    def row(self, number: int) -> Row:
        epoch, place = divmod(number, self.per_epoch)
        order = Permutation(len(self._counts), (self._key, epoch, 3)).at(np.arange(len(self._counts)))
        ends = np.cumsum(self._counts[order])
        at = int(np.searchsorted(ends, place, side="right"))
        begins, lengths, rows = self._packed(int(order[at]))
        within = np.array([place - int(ends[at]) + len(rows)])
        parts = rows[int(Permutation(len(rows), (self._key, epoch, 4, int(order[at]))).at(within)[0])]
        return Row(self.store, begins[parts], np.cumsum(np.concatenate(([0], lengths[parts]))))

    def _packed(self, window: int) -> tuple[Numbers, Numbers, list[list[int]]]:
        """Return where the parts of a window begin in the store, their lengths, and the parts of each row."""
        if self._window is None or self._window[0] != window:
            last = min((window + 1) * WINDOW, self.store.manifest.documents)
            begins, ends = self.store.bounds(self._documents.at(np.arange(window * WINDOW, last)))
            parts = -(-(ends - begins) // self.seq_len)  # none of an empty document
            number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a part in its document
            begins = np.repeat(begins, parts) + number * self.seq_len
            lengths = np.minimum(np.repeat(ends, parts) - begins, self.seq_len)
            self._window = window, begins, lengths, best_fit(lengths.tolist(), self.seq_len)
        return self._window[1:]


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
