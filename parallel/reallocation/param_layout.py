"""Layout of a model's parameters over ranks: the box of every parameter that each rank holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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
