"""Lowering for kernels that compute dense rectangles (full, causal square, or with a small mask).

A hundred one-token documents become one launch, a triangle uses the kernel's causal mode, and a mask is never larger
than a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from usp.attention.accumulate import Rows
from usp.attention.bands import Task, Tasks, Tile, layers
from usp.attention.intervals import Array

from .base import KernelLaunch

CHUNK = 256  # rows of a ragged band computed together with one mask
TINY = 32  # tasks with no longer side are batched: separate calls would cost more than the computation
KEPT = 1 << 24  # bytes of the different masks by function of some tasks, as float, up to which they are made once
SMALLEST_PAD = 16  # sides of batched tasks are padded to this or to TINY


@dataclass(frozen=True, eq=False)
class DenseLaunch(KernelLaunch):
    """`causal`: square and top-left aligned. `mask`: float, 0 or -inf, (A, B) or (n, 1, A, B); of a mask by function
    (1, N or 1, A, B), bool if it is large. `empty`: (1, N or 1, A), rows of such a mask without a visible key, if there
    are any."""

    causal: bool = False
    mask: Tensor | None = None
    empty: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the mask as float."""
        return self.mask if self.mask is None or self.mask.dtype != torch.bool else _float_mask(self.mask, dtype)


@dataclass
class DenseLowering:
    """Lowers tasks to launches on one device.

    Attributes:
        dtype: dtype of the masks.
        leaf: for kernels whose causal mode also computes the masked half: triangles longer than twice this are split
            into triangles of about this size and the squares between them. None disables splitting.
    """

    device: torch.device
    dtype: torch.dtype
    leaf: int | None = None
    masks: dict[tuple[int, int, int | None, int | None], Tensor] = field(default_factory=dict)

    def lower(self, tasks: Sequence[Task]) -> tuple[KernelLaunch, ...]:
        tasks = Tasks.of(tasks)
        rows = tasks.rows
        tiny = np.maximum(rows[:, 1] - rows[:, 0], rows[:, 3] - rows[:, 2]) <= TINY
        large = [launch for task in Tasks(rows[~tiny]) for launch in self._large(task)]
        masks = {id(tile.mask): tile.mask.unsqueeze(0).to(self.device) for tile in tasks.tiles}  # many tiles are alike
        small = sum(mask.numel() for mask in masks.values()) * self.dtype.itemsize <= KEPT
        biases = {key: _float_mask(mask, self.dtype) if small else mask for key, mask in masks.items()}
        tiles = (self._tile(tile, masks[id(tile.mask)], biases[id(tile.mask)]) for tile in tasks.tiles)
        return (*large, *self._gathered(rows[tiny]), *tiles)

    def _tile(self, tile: Tile, visible: Tensor, mask: Tensor) -> KernelLaunch:
        _, queries, keys = tile.mask.shape
        empty = ~visible.any(-1)
        rows = Rows.of(tile.q_start, tile.q_start + queries), Rows.of(tile.k_start, tile.k_start + keys)
        return DenseLaunch(*rows, mask=mask, empty=empty if empty.any() else None)

    def _large(self, task: Task) -> Iterator[KernelLaunch]:
        if task.full:
            yield self._launch(task)
        elif task.lowest is not None and task.highest is None:
            # Only a lower limit: the rows before the first one that sees the last key form a triangle at the right
            # edge. Everything below and to the left of it is visible.
            columns = (task.k_start, task.k_stop)
            last = task.k_stop + task.lowest
            square = task.k_stop - (last - task.q_start)
            below = task.cut((last, task.q_stop), columns)
            left = task.cut((task.q_start, last), (task.k_start, square))
            triangle = task.cut((task.q_start, last), (square, task.k_stop))
            assert triangle is not None and triangle.rows == triangle.columns
            yield from self._triangle(triangle)
            for rectangle in (left, below):
                if rectangle is not None:
                    yield self._launch(rectangle)
        else:
            for start in range(task.q_start, task.q_stop, CHUNK):
                yield from self._chunk(task, (start, start + CHUNK))

    def _triangle(self, task: Task) -> Iterator[KernelLaunch]:
        """Split a causal square into triangles on its diagonal, one launch, and squares below, one launch per size.

        1 . . .     2^depth triangles (1), half as many squares of the same size (2), a quarter of twice the size (3)
        2 1 . .
        3 3 1 .
        3 3 2 1
        """
        depth = 0 if self.leaf is None else max(0, (task.rows // self.leaf).bit_length() - 1)
        size = task.rows >> depth
        core = size << depth
        yield DenseLaunch(
            Rows(size, task.q_start, 1 << depth, size), Rows(size, task.k_start, 1 << depth, size), causal=True
        )
        while size < core:
            count = core // (2 * size)
            yield DenseLaunch(
                Rows(size, task.q_start + size, count, 2 * size), Rows(size, task.k_start, count, 2 * size)
            )
            size *= 2
        rest = task.cut((task.q_start + core, task.q_stop), (task.k_start, task.k_stop))
        if rest is not None:
            yield from self._large(rest)

    def _chunk(self, task: Task, rows: tuple[int, int]) -> Iterator[KernelLaunch]:
        """Split some rows of a band into ragged left, full middle and ragged right, unless one launch is as good."""
        chunk = task.cut(rows, (task.k_start, task.k_stop))
        assert chunk is not None
        left, right = chunk.k_start, chunk.k_stop
        if chunk.highest is not None:
            left = max(left, chunk.q_stop - 1 - chunk.highest)
        if chunk.lowest is not None:
            right = min(right, chunk.q_start - chunk.lowest + 1)
        if right - left < 2 * CHUNK:
            yield self._launch(chunk)
            return
        for columns in ((chunk.k_start, left), (left, right), (right, chunk.k_stop)):
            part = chunk.cut(rows, columns)
            if part is not None:
                yield self._launch(part)

    def _launch(self, task: Task) -> KernelLaunch:
        mask = None if task.full else self._mask(task)
        return DenseLaunch(Rows.of(task.q_start, task.q_stop), Rows.of(task.k_start, task.k_stop), mask=mask)

    def _mask(self, task: Task) -> Tensor:
        key = (task.rows, task.columns, *task.relative_band)
        if key not in self.masks:
            self.masks[key] = _float_mask(band_mask(*key), self.dtype).to(self.device)
        return self.masks[key]

    def _gathered(self, rows: Array) -> Iterator[KernelLaunch]:
        """Batch tiny tasks of similar size with padding; no query row occurs twice in a launch. rows: of `Tasks`."""
        order, layer = layers(rows)
        rows = rows[order]
        heights, widths = _padded(rows[:, 1] - rows[:, 0]), _padded(rows[:, 3] - rows[:, 2])
        for number, height, width in sorted({*zip(layer.tolist(), heights.tolist(), widths.tolist(), strict=True)}):
            bucket = rows[(layer == number) & (heights == height) & (widths == width)]
            q_start, q_stop, k_start, k_stop, lowest, highest = torch.tensor(bucket).view(-1, 6, 1).unbind(1)
            i, j = q_start + torch.arange(height), k_start + torch.arange(width)
            difference = i.unsqueeze(2) - j.unsqueeze(1)
            visible = (difference >= lowest.unsqueeze(2)) & (difference <= highest.unsqueeze(2))
            visible &= (i < q_stop).unsqueeze(2) & (j < k_stop).unsqueeze(1)
            mask = _float_mask(visible.unsqueeze(1), self.dtype).to(self.device)
            yield DenseLaunch(self._padded_rows(i, q_stop), self._padded_rows(j, k_stop), mask=mask)

    def _padded_rows(self, index: Tensor, stop: Tensor) -> Rows:
        valid = (index < stop).flatten().nonzero().squeeze(1)
        index = torch.minimum(index, stop - 1)
        return Rows(index.shape[1], index=index.to(self.device), valid=valid.to(self.device))


def _padded(lengths: Array) -> Array:
    """Return the sides of masks of tiny tasks."""
    return np.where(lengths <= SMALLEST_PAD, SMALLEST_PAD, TINY)


def _float_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def band_mask(rows: int, columns: int, lowest: int | None, highest: int | None) -> Tensor:
    """Return a bool mask (rows, columns), True where lowest <= row - column <= highest."""
    difference = torch.arange(rows).unsqueeze(1) - torch.arange(columns)
    visible = torch.ones(rows, columns, dtype=torch.bool)
    if lowest is not None:
        visible &= difference >= lowest
    if highest is not None:
        visible &= difference <= highest
    return visible
