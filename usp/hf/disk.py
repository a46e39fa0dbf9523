"""Layout of a model's parameters in transformers' safetensors files.

Most parameters are one tensor of the same name. Experts are one parameter for all experts of a layer in memory, and one
tensor per expert and projection on disk:

    experts.gate_up_proj (E, 2I, H)    experts.N.gate_proj.weight (I, H), experts.N.up_proj.weight (I, H)
    experts.down_proj    (E, H, I)     experts.N.down_proj.weight (H, I)
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from parallel.reallocation.boxes import Box

from .models import kept_names

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES_IN_ERRORS = 5


@dataclass(frozen=True)
class DiskTensor:
    """Tensor `name` in a file: the part `box` of a parameter, without its leading dims of size 1."""

    name: str
    parameter: str
    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DiskEntry:
    """Location of a tensor in a checkpoint directory."""

    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _MixtureNames:
    """Names that a family uses on disk for the mixture and an expert's projections."""

    mixture: str
    gate: str
    up: str
    down: str


_MIXTURES = {
    "mixtral": _MixtureNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    "qwen3_moe": _MixtureNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
}


def disk_tensors(model_type: str, parameter: str, shape: Sequence[int]) -> list[DiskTensor]:
    """Return the tensors on disk that make up a parameter of a transformers model."""
    names = _MIXTURES.get(model_type)
    name = parameter.replace(".mlp.", f".{names.mixture}.") if names else parameter
    prefix, _, last = name.rpartition(".")
    if names is None or not prefix.endswith(".experts"):
        return [_same(name, parameter, shape)]
    experts, rows, columns = shape
    projections = [names.down] if last == "down_proj" else [names.gate, names.up]
    size = (rows // len(projections), columns)
    return [
        DiskTensor(f"{prefix}.{n}.{projection}.weight", parameter, Box((n, half * size[0], 0), (1, *size)), size)
        for n in range(experts)
        for half, projection in enumerate(projections)
    ]


def read_headers(folder: Path) -> dict[str, DiskEntry]:
    """Locate every tensor of a checkpoint directory, reading only file headers.

    Raises:
        ValueError: naming a file that is missing or cannot be read.
    """
    files = [folder / SINGLE]
    if not files[0].is_file():
        files = [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]
    entries: dict[str, DiskEntry] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118  (not a mapping)
                    entries[name] = DiskEntry(file, tuple(content.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from error
    return entries


@dataclass(frozen=True)
class Choice:
    """Tensors of a directory that make up each parameter, by the name it is stored under.

    `copies` pairs tensors that must be equal: a tied parameter saved under two names.
    """

    tensors: dict[str, list[DiskTensor]]
    copies: list[tuple[DiskTensor, DiskTensor]]


def choose_tensors(whole: nn.Module, model_type: str, found: Mapping[str, DiskEntry], folder: Path) -> Choice:
    """Find the tensors of the `whole` model's parameters. Experts may also be stored in their layout in memory.

    Raises:
        ValueError: naming every missing or unexpected tensor, and every one of the wrong shape.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for name, first in kept_names(whole).items():
        names[first].append(name)
    choice = Choice({}, [])
    for first, aliases in names.items():
        shape = whole.get_parameter(first).shape
        options = [
            [_same(name, name, shape)] if name in found else disk_tensors(model_type, name, shape) for name in aliases
        ]
        present = [tensors for tensors in options if all(tensor.name in found for tensor in tensors)]
        choice.tensors[first] = tensors = (present or options)[0]
        choice.copies.extend((tensors[0], other[0]) for other in present[1:])
    violations = _violations(whole, choice, found)
    if violations:
        raise ValueError(f"{folder} does not contain the weights of the {model_type} in its config.json: {violations}")
    return choice


def plan_files(tensors: Sequence[DiskTensor], itemsizes: Mapping[str, int], max_bytes: int) -> list[list[DiskTensor]]:
    """Split tensors, in order, into files of at most `max_bytes`; a larger tensor gets its own file.

    itemsizes: bytes per element of each parameter.
    """
    files: list[list[DiskTensor]] = []
    size = max_bytes
    for tensor in tensors:
        nbytes = tensor.box.numel * itemsizes[tensor.parameter]
        if size + nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += nbytes
    return files


def file_names(number: int) -> list[str]:
    """Return transformers' names for the `number` files of a model."""
    return [SINGLE] if number == 1 else [f"model-{n:05d}-of-{number:05d}.safetensors" for n in range(1, number + 1)]


def _same(name: str, parameter: str, shape: Sequence[int]) -> DiskTensor:
    return DiskTensor(name, parameter, Box.whole(tuple(shape)), tuple(shape))


def _violations(whole: nn.Module, choice: Choice, found: Mapping[str, DiskEntry]) -> str:
    wanted = [tensor for tensors in choice.tensors.values() for tensor in tensors]
    wanted += [copy for _, copy in choice.copies]
    names = {tensor.name for tensor in wanted}
    buffers = tuple(name.removeprefix("model.") for name, _ in whole.named_buffers())  # in old files, per layer
    others = [name for name in found if name not in names and not name.endswith(buffers)]
    shapes = [
        f"{tensor.name} has shape {found[tensor.name].shape}, expected {tensor.shape}"
        for tensor in wanted
        if tensor.name in found and found[tensor.name].shape != tensor.shape
    ]
    parts = {
        "missing": [tensor.name for tensor in wanted if tensor.name not in found],
        "unexpected": others,
        "wrong shape": shapes,
    }
    return "; ".join(f"{what}: {_shown(items)}" for what, items in parts.items() if items)


def _shown(items: Sequence[str]) -> str:
    more = f" and {len(items) - _NAMES_IN_ERRORS} more" if len(items) > _NAMES_IN_ERRORS else ""
    return ", ".join(items[:_NAMES_IN_ERRORS]) + more


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} cannot be read as the index of a sharded checkpoint: {error!r}") from error
