"""Layout of a model's parameters over ranks: the box of every parameter that each rank holds, gathered from the ranks,
or described by shapes and degrees for a model that exists nowhere yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from usp.parallel.dims import ParallelDims
from usp.parallel.groups import gather_objects

from .boxes import Box, local_box


class Kind(NamedTuple):
    """Global shape and dtype of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Holding(NamedTuple):
    """A box of a parameter and the ranks that hold all of it, ascending."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ParamLayout:
    """Layout of a model's parameters over ranks.

    Attributes:
        parameters: name -> global shape and dtype.
        boxes: name -> global rank -> box held by that rank. Empty boxes are removed.

    Raises ValueError listing every parameter that is not in both mappings, or has a box outside its shape.
    """

    parameters: Mapping[str, Kind]
    boxes: Mapping[str, Mapping[int, Box]]

    def __post_init__(self) -> None:
        names = self.parameters.keys() ^ self.boxes.keys()
        violations = [f"{name} must be both in parameters and in boxes" for name in sorted(names)]
        for name in self.parameters.keys() & self.boxes.keys():
            whole = Box.whole(self.parameters[name].shape)
            for box in set(self.boxes[name].values()):
                if len(box.sizes) != len(whole.sizes) or (box.numel and box.overlap(whole) != box):
                    violations.append(f"{name} of shape {whole.sizes} cannot have {box}")
        if violations:
            raise ValueError("; ".join(sorted(violations)))
        held = {
            name: {rank: box for rank, box in sorted(boxes.items()) if box.numel} for name, boxes in self.boxes.items()
        }
        object.__setattr__(self, "boxes", held)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold any parameter, ascending."""
        return tuple(sorted({rank for boxes in self.boxes.values() for rank in boxes}))

    @cached_property
    def digest(self) -> str:
        """Hash of the layout, independent of the order of names."""
        text = hashlib.blake2b(digest_size=16)
        for name in sorted(self.parameters):
            held = [(rank, box.offset, box.sizes) for rank, box in self.boxes[name].items()]
            text.update(repr((name, *self.parameters[name], held)).encode())
        return text.hexdigest()


def holdings(held: Iterable[tuple[int, Box]]) -> list[Holding]:
    """Split the boxes of a parameter into disjoint boxes, each held completely by the same ranks.

    Args:
        held: (rank, box); a rank may hold several boxes, and these may overlap.
    """
    ranks_of: dict[Box, tuple[int, ...]] = {}
    for rank, box in held:
        ranks_of[box] = _merged(ranks_of.get(box, ()), (rank,))
    parts: list[Holding] = []
    for box, ranks in ranks_of.items():
        cut, rest = [], [box]
        for part in parts:
            common = part.box.overlap(box)
            if common is None:
                cut.append(part)
                continue
            cut.append(Holding(common, _merged(part.ranks, ranks)))
            cut += [Holding(outside, part.ranks) for outside in part.box.minus(common)]
            rest = [outside for piece in rest for outside in piece.minus(common)]
        parts = cut + [Holding(piece, ranks) for piece in rest]
    return parts


def gather_layout(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> ParamLayout:
    """Gather the layout of a model from the tensors of each rank; every rank gets the same layout. Collective.

    Args:
        tensors: DTensors, or plain tensors held completely, by global name; empty on a rank without any. Only shapes,
            dtypes and placements are read, so tensors may be on the meta device, or have their storage freed.
        group: participating ranks; None for all. Ranks in the layout are global.

    Raises ValueError on every rank, listing every parameter whose shape or dtype differs between ranks, or whose local
    part is not a box.
    """
    held, violations = {}, []
    for name, tensor in tensors.items():
        try:
            held[name] = (Kind(tuple(tensor.shape), tensor.dtype), local_box(tensor))
        except ValueError as error:
            violations.append(f"{name}: {error}")
    gathered = gather_objects((held, violations), group)
    kinds: dict[str, dict[Kind, list[int]]] = {}
    boxes: dict[str, dict[int, Box]] = {}
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for rank, (parts, _) in zip(ranks, gathered, strict=True):
        for name, (kind, box) in parts.items():
            kinds.setdefault(name, {}).setdefault(kind, []).append(rank)
            boxes.setdefault(name, {})[rank] = box
    violations = list(dict.fromkeys(text for _, texts in gathered for text in texts))
    for name, found in kinds.items():
        if len(found) > 1:
            words = " and ".join(f"{shape} {dtype} on ranks {ranks}" for (shape, dtype), ranks in found.items())
            violations.append(f"{name} is {words}")
    if violations:
        raise ValueError(f"ranks must hold boxes of the same parameters: {'; '.join(violations)}")
    return ParamLayout({name: next(iter(found)) for name, found in kinds.items()}, boxes)


def _merged(ranks: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*ranks, *others}))


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
