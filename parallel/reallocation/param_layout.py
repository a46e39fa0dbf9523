"""Which box of every parameter each rank holds: how a model lies on ranks, whatever put it there, as one value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .boxes import Box, local_box


class Kind(NamedTuple):
    """What a parameter is, wherever it lies: its global shape and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Holding(NamedTuple):
    """A box of a parameter, and the ranks that hold all of it, ascending."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ParamLayout:
    """A model on ranks.

    Attributes:
        parameters: name -> global shape and dtype.
        boxes: name -> global rank -> the box that it holds. Ranks that hold nothing are absent.

    Raises:
        ValueError: naming every parameter that has no kind, no entry in `boxes`, or a box outside its shape.
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
                    violations.append(f"{name} of shape {whole.sizes} has no box {box}")
        if violations:
            raise ValueError("; ".join(sorted(violations)))
        held = {
            name: {rank: box for rank, box in sorted(boxes.items()) if box.numel} for name, boxes in self.boxes.items()
        }
        object.__setattr__(self, "boxes", held)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold something, ascending."""
        return tuple(sorted({rank for boxes in self.boxes.values() for rank in boxes}))

    @cached_property
    def digest(self) -> str:
        """The same for equal layouts, in whatever order their names come; different, in practice, for others."""
        text = hashlib.blake2b(digest_size=16)
        for name in sorted(self.parameters):
            held = [(rank, box.offset, box.sizes) for rank, box in self.boxes[name].items()]
            text.update(repr((name, *self.parameters[name], held)).encode())
        return text.hexdigest()

    def nbytes(self, rank: int) -> int:
        """What a rank holds."""
        return sum(
            boxes[rank].numel * self.parameters[name].dtype.itemsize
            for name, boxes in self.boxes.items()
            if rank in boxes
        )


def holdings(boxes: Mapping[int, Box]) -> list[Holding]:
    """Cut what ranks hold of a parameter into boxes that do not overlap, each held by the same ranks all over."""
    ranks_of: dict[Box, tuple[int, ...]] = {}
    for rank, box in sorted(boxes.items()):
        ranks_of[box] = (*ranks_of.get(box, ()), rank)
    parts: list[Holding] = []
    for box, ranks in ranks_of.items():
        cut, rest = [], [box]
        for part in parts:
            common = part.box.overlap(box)
            if common is None:
                cut.append(part)
                continue
            cut.append(Holding(common, tuple(sorted(part.ranks + ranks))))
            cut += [Holding(outside, part.ranks) for outside in part.box.minus(common)]
            rest = [outside for piece in rest for outside in piece.minus(common)]
        parts = cut + [Holding(piece, ranks) for piece in rest]
    return parts


def gather_layout(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> ParamLayout:
    """The layout of a model of which every rank gives what it holds: the same value on every rank. Collective.

    Args:
        tensors: by global name, DTensors or plain (all of it is here); empty on a rank that holds nothing. Only
            shapes, dtypes and placements are read, so they may be on the meta device, or their memory given away.
        group: the ranks that are asked; None: all. The layout names ranks by their global numbers.

    Raises:
        ValueError: on every rank alike, naming every parameter that ranks give in different shapes or dtypes, or
            whose local part is no box.
    """
    held, violations = {}, []
    for name, tensor in tensors.items():
        try:
            held[name] = (Kind(tuple(tensor.shape), tensor.dtype), local_box(tensor))
        except ValueError as error:
            violations.append(f"{name}: {error}")
    gathered: list[tuple[dict[str, tuple[Kind, Box]], list[str]]] = [({}, [])] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (held, violations), group=group)
    kinds: dict[str, dict[Kind, list[int]]] = {}
    boxes: dict[str, dict[int, Box]] = {}
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for rank, (parts, _) in zip(ranks, gathered, strict=True):
        for name, (kind, box) in parts.items():
            kinds.setdefault(name, {}).setdefault(kind, []).append(rank)
            boxes.setdefault(name, {})[rank] = box
    violations = list(dict.fromkeys(text for _, texts in gathered for text in texts))
    violations += [f"{name} is {_shown(found)}" for name, found in kinds.items() if len(found) > 1]
    if violations:
        raise ValueError(f"ranks must hold boxes of the same parameters: {'; '.join(violations)}")
    return ParamLayout({name: next(iter(found)) for name, found in kinds.items()}, boxes)


def _shown(found: Mapping[Kind, Iterable[int]]) -> str:
    return " and ".join(f"{shape} {dtype} on ranks {list(ranks)}" for (shape, dtype), ranks in found.items())
