"""The layout of a model that exists nowhere yet, from shapes and degrees, as `gather_layout` would find it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from usp.parallel.dims import ParallelDims

from .boxes import Box
from .param_layout import Kind, ParamLayout


class Described(NamedTuple):
    """A parameter, and how parallelism divides it.

    Attributes:
        places: the pipeline ranks that hold it.
        tp_dim: the dim that tensor parallelism shards; None if every tp rank holds all of it.
        experts: dim 0 counts experts, which are sharded over ep, and FSDP2 shards over efsdp.
    """

    kind: Kind
    places: tuple[int, ...]
    tp_dim: int | None = None
    experts: bool = False


def described_layout(
    parameters: Mapping[str, Described], dims: ParallelDims, ranks: Sequence[int], *, sharded: bool
) -> ParamLayout:
    """Return the boxes that `apply_ep`, `apply_tensor_parallel` and `apply_fsdp` give each rank.

    Args:
        dims: resolved.
        ranks: global ranks, in the order of the mesh.
        sharded: over the fsdp axis: ZeRO 1 to 3.

    Raises ValueError if tp or ep does not divide a dim that it shards, naming all such parameters.
    """
    size = len(ranks) // dims.pp
    inner = dims.dp_shard * dims.sp * dims.tp  # ranks of one replica of a stage

    @cache  # parameters of equal layers have equal boxes
    def boxes(shape: tuple[int, ...], places: tuple[int, ...], tp_dim: int | None, experts: bool) -> dict[int, Box]:
        by_number = [_box(shape, number, tp_dim, experts, dims, sharded) for number in range(inner)]
        stage = [by_number[number % inner] for number in range(size)]
        return {ranks[place * size + number]: stage[number] for place in places for number in range(size)}

    problems = [
        f"{name} of shape {kind.shape} cannot be divided by {'ep' if experts else 'tp'}={degree} in dim {dim}"
        for name, (kind, _, tp_dim, experts) in parameters.items()
        for dim, degree in ([(0, dims.ep)] if experts else [] if tp_dim is None else [(tp_dim, dims.tp)])
        if kind.shape[dim] % degree
    ]
    if problems:
        raise ValueError("; ".join(problems))
    found = {name: boxes(kind.shape, *how) for name, (kind, *how) in parameters.items()}
    return ParamLayout({name: described.kind for name, described in parameters.items()}, found)


def _box(
    shape: tuple[int, ...], number: int, tp_dim: int | None, experts: bool, dims: ParallelDims, sharded: bool
) -> Box:
    """Return the box of rank `number` of a replica of a stage."""
    box = Box.whole(shape)
    if experts:
        efsdp, ep = divmod(number, dims.ep)
        box = _part(box, 0, dims.ep, ep)
        # As in parallel.fsdp: if there are fewer experts than ranks, their rows are sharded where they divide evenly.
        rows = 1 if box.sizes[0] < dims.efsdp and box.sizes[1] % dims.efsdp == 0 else 0
        return _part(box, rows, dims.efsdp, efsdp) if sharded else box
    fsdp, tp = divmod(number, dims.tp)
    if tp_dim is not None:
        box = _part(box, tp_dim, dims.tp, tp)
    return _part(box, 0, dims.dp_shard * dims.sp, fsdp) if sharded and shape else box


def _part(box: Box, dim: int, parts: int, part: int) -> Box:
    """Divide a box as torch does: into equal parts, of which the last ones are smaller or empty."""
    each = -(-box.sizes[dim] // parts)
    begin = min(part * each, box.sizes[dim])
    offset = (*box.offset[:dim], box.offset[dim] + begin, *box.offset[dim + 1 :])
    return Box(offset, (*box.sizes[:dim], min(each, box.sizes[dim] - begin), *box.sizes[dim + 1 :]))
