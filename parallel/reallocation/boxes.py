"""Boxes: the part of a tensor that a rank holds, however many mesh axes shard it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING

from torch import Tensor

from usp.parallel.mesh import local_tensor

if TYPE_CHECKING:  # takes half a second to import, and is needed where a tensor is at hand
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """The part of a tensor that starts at `offset` and has shape `sizes`."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(map(add, self.offset, self.sizes))

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection with another box of the same tensor, or None if it is empty."""
        offset, sizes = [], []
        for a, a_size, b, b_size in zip(self.offset, self.sizes, other.offset, other.sizes, strict=True):
            begin, end = max(a, b), min(a + a_size, b + b_size)
            if begin >= end:
                return None
            offset.append(begin)
            sizes.append(end - begin)
        return Box(tuple(offset), tuple(sizes))

    def minus(self, other: Box) -> list[Box]:
        """Return the part of this box outside the other one, as disjoint boxes."""
        common = self.overlap(other)
        if common is None:
            return [self]
        parts, begin, end = [], list(self.offset), list(self.end)
        for dim, (inner_begin, inner_end) in enumerate(zip(common.offset, common.end, strict=True)):
            for a, b in ((begin[dim], inner_begin), (inner_end, end[dim])):
                if a < b:
                    low, high = (*begin[:dim], a, *begin[dim + 1 :]), (*end[:dim], b, *end[dim + 1 :])
                    parts.append(Box(low, tuple(map(sub, high, low))))
            begin[dim], end[dim] = inner_begin, inner_end
        return parts

    def run(self, begin: int, end: int, dim: int = 0) -> list[Box]:
        """Return elements begin to end - 1 of this box in row-major order, as boxes in that order.

        Dims before `dim` must have size 1.
        """
        if end - begin == self.numel:
            return [self]
        row = math.prod(self.sizes[dim + 1 :])

        def rows(first: int, last: int) -> Box:
            offset = (*self.offset[:dim], self.offset[dim] + first, *self.offset[dim + 1 :])
            return Box(offset, (*self.sizes[:dim], last - first, *self.sizes[dim + 1 :]))

        first, last = -(-begin // row), end // row  # whole rows
        if first > last:
            return rows(last, first).run(begin - last * row, end - last * row, dim + 1)
        parts = rows(first - 1, first).run(begin - (first - 1) * row, row, dim + 1) if begin < first * row else []
        parts += [rows(first, last)] if first < last else []
        return parts + (rows(last, last + 1).run(0, end - last * row, dim + 1) if last * row < end else [])

    def slices(self, within: Box | None = None) -> tuple[slice, ...]:
        """Return the indices of this box in the whole tensor, or in a tensor that holds only the box `within`."""
        origin = (0,) * len(self.offset) if within is None else within.offset
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.offset, self.end, origin, strict=True))


def local_box(tensor: Tensor) -> Box:
    """Return the box of a tensor that this rank holds: all of a plain tensor; of a DTensor, a part that may be empty.
    Raise ValueError for a DTensor whose local part is not a box: partial sums, or non-contiguous rows."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape))
    _check(tensor)
    sizes, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(sizes) == tuple(tensor.to_local().shape), f"{tensor.placements} hold {sizes}"
    return Box(tuple(offset), tuple(sizes))


def box_at(tensor: DTensor, coordinate: Sequence[int]) -> Box:
    """Return the box of a DTensor that the rank at `coordinate` of its mesh holds. Raise ValueError as `local_box`."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    _check(tensor)
    mesh = tensor.device_mesh
    sizes, offset = _compute_local_shape_and_global_offset(
        tensor.shape, mesh.shape, list(coordinate), tensor.placements
    )
    return Box(tuple(offset), tuple(sizes))


def local_part(tensor: Tensor) -> Tensor:
    """Return the values of `local_box`, sharing memory with the tensor."""
    return local_tensor(tensor).detach()


def _check(tensor: DTensor) -> None:
    """Check that a rank holds one box: strided shards need the axes to their right to split the dim just as before."""
    from torch.distributed.tensor.placement_types import _StridedShard

    placements, sizes = tensor.placements, tensor.device_mesh.shape
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"placements {placements} contain partial sums, which are not a part of the tensor")
        if not isinstance(placement, _StridedShard):
            continue
        right = zip(placements[axis + 1 :], sizes[axis + 1 :], strict=True)
        pieces = math.prod(size for other, size in right if getattr(other, "dim", None) == placement.dim)
        rows = tensor.shape[placement.dim]
        if pieces != placement.split_factor or rows % pieces:
            raise ValueError(
                f"placements {placements} over mesh {tuple(sizes)} give a rank rows from {placement.split_factor} "
                f"places in dim {placement.dim} of {tuple(tensor.shape)}: axes to the right must split its {rows} rows "
                f"evenly into {placement.split_factor}, but split them into {pieces}"
            )
