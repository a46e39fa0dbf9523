"""Plan for exporting a model that is sharded over ranks: the files, their writers, and the boxes to send.

round     files with different writers
file      tensors on disk, and the rank that writes them
tensor    boxes that make it up, and the rank that sends each
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from transformers import PreTrainedModel

from parallel.reallocation.boxes import Box
from parallel.reallocation.param_layout import Holding, holdings

from .disk import file_names, plan_files, stored_names, stored_tensors
from .structure.conversion import DiskTensor, disk_layout


@dataclass(frozen=True)
class Held:
    """Part of a parameter held by a rank."""

    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Assembly:
    """Tensor on disk, the rank that writes it, and its parts: rank -> box of the parameter."""

    tensor: DiskTensor
    dtype: torch.dtype
    writer: int
    sources: dict[int, Box]


@dataclass(frozen=True)
class FilePlan:
    name: str
    writer: int
    tensors: list[Assembly]


def holder_violations(whole: PreTrainedModel, holders: Sequence[Mapping[str, Held]]) -> list[str]:
    """Return why the ranks' weights are not exactly those of the `whole` model, one message per violation."""
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(whole).items()}
    return part_violations(shapes, holders, stored_names(whole), f"the configured {whole.config.model_type} model")


def part_violations(
    shapes: Mapping[str, tuple[int, ...]], holders: Sequence[Mapping[str, Held]], known: Collection[str], model: str
) -> list[str]:
    """Return why the ranks' parts are not exactly parameters of these shapes, one message per violation.

    known: names that may be there, those of `shapes` included.
    """
    covered: dict[str, set[Box]] = defaultdict(set)
    kinds: dict[str, set[tuple[tuple[int, ...], torch.dtype]]] = defaultdict(set)
    for held in holders:
        for name, part in held.items():
            covered[name].add(part.box)
            kinds[name].add((part.shape, part.dtype))
    violations = [f"rank {rank} has no weights" for rank, held in enumerate(holders) if not held]
    violations += [f"{name} is not a parameter of {model}" for name in covered if name not in known]
    for name, shape in shapes.items():
        if len(kinds[name]) > 1 or any(held_shape != shape for held_shape, _ in kinds[name]):
            there = " and ".join(sorted(f"{held_shape} {dtype}" for held_shape, dtype in kinds[name]))
            violations.append(f"{name} is {there}, but must be {shape} of one dtype in {model}")
        elif (elements := sum(box.numel for box in covered[name])) != Box.whole(shape).numel:
            violations.append(f"ranks hold only {elements} of the {Box.whole(shape).numel} elements of {name}")
    return violations


def plan_export(
    whole: PreTrainedModel, holders: Sequence[Mapping[str, Held]], max_shard_bytes: int
) -> list[list[FilePlan]]:
    """Return the rounds: lists of files with different writers."""
    layout = disk_layout(whole, {name: tensor.shape for name, tensor in stored_tensors(whole).items()})
    return plan_tensors([*chain.from_iterable(layout.values())], holders, max_shard_bytes, file_names)


def plan_tensors(
    tensors: Sequence[DiskTensor],
    holders: Sequence[Mapping[str, Held]],
    max_shard_bytes: float,
    names_of: Callable[[int], Sequence[str]],
) -> list[list[FilePlan]]:
    """Return the rounds for these tensors, as `plan_export`; names_of: the names of a number of files.

    Neighboring files have neighboring writers, so that pipeline stages write most of their own layers.
    """
    dtypes = {name: part.dtype for held in holders for name, part in held.items()}
    boxes: dict[str, dict[int, Box]] = {}
    for rank, held in enumerate(holders):
        for name, part in held.items():
            boxes.setdefault(name, {})[rank] = part.box
    parts = {name: holdings(held.items()) for name, held in boxes.items()}
    files = plan_files(tensors, {name: dtype.itemsize for name, dtype in dtypes.items()}, max_shard_bytes)
    by_writer: list[list[FilePlan]] = [[] for _ in holders]
    for number, (name, file) in enumerate(zip(names_of(len(files)), files, strict=True)):
        writer = number * len(holders) // len(files)
        assemblies = [
            Assembly(tensor, dtypes[tensor.parameter], writer, _sources(tensor, parts[tensor.parameter], writer))
            for tensor in file
        ]
        by_writer[writer].append(FilePlan(name, writer, assemblies))
    return [[file for file in files_of_round if file] for files_of_round in zip_longest(*by_writer)]


def _sources(tensor: DiskTensor, parts: Sequence[Holding], writer: int) -> dict[int, Box]:
    """Choose senders: among ranks that hold the same box, the writer if possible, else the first."""
    return {
        writer if writer in part.ranks else part.ranks[0]: common
        for part in parts
        if (common := tensor.box.overlap(part.box))
    }
