"""Weights into a transformers safetensors folder, from ranks that hold boxes of them, without gathering the model.

Every rank computes the same plan: which file has which tensors, which rank writes it, and which ranks send it which
boxes. Files are then written in rounds, one per rank at most. In each step of a round every writer receives the boxes
of one tensor of its file, all of them in a single all-to-all.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from parallel.boxes import Box, local_box, local_part
from usp.hf.disk import INDEX, DiskTensor, disk_tensors, file_names, plan_files
from usp.hf.models import empty_model, kept_names

T = TypeVar("T")

SHARD_BYTES = 5 * 10**9
PARTIAL, REPLACED = ".partial", ".replaced"  # endings of a folder being written, and of the one it takes the place of


@dataclass(frozen=True)
class Held:
    """What a rank holds of a parameter."""

    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Assembly:
    """A tensor on disk, the rank that writes it, and the parts that make it up: rank -> box of the parameter."""

    tensor: DiskTensor
    dtype: torch.dtype
    writer: int
    sources: dict[int, Box]


@dataclass(frozen=True)
class FilePlan:
    name: str
    writer: int
    tensors: list[Assembly]


@torch.no_grad()
def save_weights(
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    config: PretrainedConfig,
    generation_config: GenerationConfig | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a model that `AutoModelForCausalLM.from_pretrained(folder)` loads, in the dtypes of `weights`. Collective.

    Beside its own weights, a rank holds one file and one tensor at most. The folder is written under another name and
    renamed when it is whole; a model that lay there is replaced. It exists when any rank returns. Without a process
    group, one process holds all.

    Args:
        weights: by their names in the transformers model; those of this rank's pipeline stages, plain (all of it) or
            DTensors. Of tied parameters, the one that comes first in the model counts.
        folder: on a file system that all ranks share.
        generation_config: for a model that came with one; else what transformers derives from `config`.
        max_shard_bytes: size of a file, unless a single tensor is larger.
        group: the ranks that together hold the model; None: all.

    Raises:
        ValueError: on every rank alike, naming all parameters that are missing, unknown, or not those of `config`, and
            a folder that holds something else than a model.
        RuntimeError: on every rank alike, when a rank cannot write.
    """
    grouped = dist.is_initialized()
    rank = dist.get_rank(group) if grouped else 0
    partial = folder.with_name(folder.name + PARTIAL)
    whole = _exported_model(config, generation_config)
    refusal = _prepare(folder, partial) if rank == 0 else ""
    held = {name: Held(local_box(weight), tuple(weight.shape), weight.dtype) for name, weight in weights.items()}
    refusals, holders = zip(*_all_gather((refusal, held), group), strict=True)
    violations = [*filter(None, refusals), *holder_violations(whole, holders)]
    if violations:
        raise ValueError("; ".join(violations))
    rounds = plan_export(whole, holders, max_shard_bytes)
    failure = _write_files(rounds, weights, partial, rank, group)
    _raise_failures(failure, group)
    if rank == 0:
        failure = _finish(whole, rounds, partial, folder)
    _raise_failures(failure, group)


def holder_violations(whole: PreTrainedModel, holders: Sequence[Mapping[str, Held]]) -> list[str]:
    """What keeps the ranks from saving the `whole` model; empty where nothing does. Pure."""
    kept = kept_names(whole)
    shapes = {name: tuple(whole.get_parameter(name).shape) for name in dict.fromkeys(kept.values())}
    covered: dict[str, set[Box]] = {name: set() for name in shapes}
    kinds: dict[str, set[tuple[tuple[int, ...], torch.dtype]]] = {name: set() for name in shapes}
    unknown: dict[str, None] = {}
    for held in holders:
        for name, part in held.items():
            if name not in kept:
                unknown[name] = None
            elif name in shapes:
                covered[name].add(part.box)
                kinds[name].add((part.shape, part.dtype))
    model = f"the {whole.config.model_type} of the configuration"
    violations = [f"rank {rank} holds no weight" for rank, held in enumerate(holders) if not held]
    violations += [f"{name} is no parameter of {model}" for name in unknown]
    for name, shape in shapes.items():
        if len(kinds[name]) > 1 or any(held_shape != shape for held_shape, _ in kinds[name]):
            there = " and ".join(sorted(f"{held_shape} {dtype}" for held_shape, dtype in kinds[name]))
            violations.append(f"{name} is {there}, and must be {shape} of one dtype in {model}")
        elif (elements := sum(box.numel for box in covered[name])) != Box.whole(shape).numel:
            violations.append(f"ranks hold {elements} of the {Box.whole(shape).numel} elements of {name}")
    return violations


def plan_export(
    whole: PreTrainedModel, holders: Sequence[Mapping[str, Held]], max_shard_bytes: int
) -> list[list[FilePlan]]:
    """The rounds: in each, files with a writer of their own. Pure.

    Neighbouring files have neighbouring writers, so that pipeline stages write most of their layers themselves.
    """
    dtypes = {name: part.dtype for held in holders for name, part in held.items()}
    ranks_of: dict[str, dict[Box, list[int]]] = {}
    for rank, held in enumerate(holders):
        for name, part in held.items():
            ranks_of.setdefault(name, {}).setdefault(part.box, []).append(rank)
    tensors = [
        tensor
        for name in dict.fromkeys(kept_names(whole).values())
        for tensor in disk_tensors(whole.config.model_type, name, whole.get_parameter(name).shape)
    ]
    files = plan_files(tensors, {name: dtype.itemsize for name, dtype in dtypes.items()}, max_shard_bytes)
    by_writer: list[list[FilePlan]] = [[] for _ in holders]
    for number, (name, file) in enumerate(zip(file_names(len(files)), files, strict=True)):
        writer = number * len(holders) // len(files)
        assemblies = [
            Assembly(tensor, dtypes[tensor.parameter], writer, _sources(tensor, ranks_of[tensor.parameter], writer))
            for tensor in file
        ]
        by_writer[writer].append(FilePlan(name, writer, assemblies))
    return [[file for file in files_of_round if file] for files_of_round in zip_longest(*by_writer)]


def _sources(tensor: DiskTensor, ranks_of: Mapping[Box, list[int]], writer: int) -> dict[int, Box]:
    """Of ranks that hold the same, the writer where it is one of them, else the first, sends."""
    sources = {}
    for box, ranks in ranks_of.items():
        part = tensor.box.overlap(box)
        if part is not None:
            sources[writer if writer in ranks else ranks[0]] = part
    return sources


def _write_files(
    rounds: Sequence[Sequence[FilePlan]],
    weights: Mapping[str, Tensor],
    partial: Path,
    rank: int,
    group: dist.ProcessGroup | None,
) -> str:
    """Why this rank could not write, empty if it could. It goes on sending then, because others wait for it."""
    failure = ""
    for files in rounds:
        content: dict[str, Tensor] = {}
        for step in zip_longest(*(file.tensors for file in files)):
            content.update(_exchange([assembly for assembly in step if assembly], weights, rank, group))
        for file in files:
            if file.writer == rank and not failure:
                try:
                    save_file(content, partial / file.name, metadata={"format": "pt"})
                except (OSError, SafetensorError) as error:
                    failure = f"{partial / file.name}: {error}"
    return failure


def _exchange(
    step: Sequence[Assembly], weights: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """One tensor for each writer: what this rank writes of them, on the CPU, by its name on disk."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    device = local_part(next(iter(weights.values()))).device
    send = [torch.empty(0, dtype=torch.uint8, device=device)] * ranks
    receive = [0] * ranks
    for assembly in step:
        if rank in assembly.sources:
            weight = weights[assembly.tensor.parameter]
            part = local_part(weight)[assembly.sources[rank].slices(local_box(weight))]
            send[assembly.writer] = part.contiguous().view(-1).view(torch.uint8)
        if assembly.writer == rank:
            receive = [
                box.numel * assembly.dtype.itemsize if (box := assembly.sources.get(other)) else 0
                for other in range(ranks)
            ]
    sent = torch.cat(send)
    if ranks == 1:
        received = sent
    else:
        received = sent.new_empty(sum(receive))
        dist.all_to_all_single(received, sent, receive, [part.numel() for part in send], group=group)
    return {
        assembly.tensor.name: _assembled(assembly, received.split(receive)).view(assembly.tensor.shape)
        for assembly in step
        if assembly.writer == rank
    }


def _assembled(assembly: Assembly, parts: Sequence[Tensor]) -> Tensor:
    tensor = torch.empty(assembly.tensor.box.sizes, dtype=assembly.dtype)
    for rank, box in assembly.sources.items():
        tensor[box.slices(assembly.tensor.box)] = parts[rank].view(assembly.dtype).view(box.sizes).cpu()
    return tensor


def _exported_model(config: PretrainedConfig, generation_config: GenerationConfig | None) -> PreTrainedModel:
    """The whole model, empty, with the configurations that go into the folder."""
    config = copy.deepcopy(config)
    config.use_cache = True  # off while sequences are sharded; whoever loads the model generates with it
    whole = empty_model(config)
    whole.config.architectures = [type(whole).__name__]
    if generation_config is not None:
        whole.generation_config = copy.deepcopy(generation_config)
    assert whole.generation_config is not None
    whole.generation_config.use_cache = True
    return whole


def _prepare(folder: Path, partial: Path) -> str:
    """Make room; why that cannot be done, if it cannot."""
    is_model = (folder / "config.json").is_file()
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_model and not is_empty:
        return f"{folder} holds something else than a model: give a folder that does not exist"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        return f"{partial} cannot be made: {error}"
    return ""


def _finish(whole: PreTrainedModel, rounds: Sequence[Sequence[FilePlan]], partial: Path, folder: Path) -> str:
    """Write what stands beside the weights, and rename; why that failed, if it did."""
    files = [file for files in rounds for file in files]
    assemblies = [assembly for file in files for assembly in file.tensors]
    whole.config.dtype = str(assemblies[0].dtype).removeprefix("torch.")
    try:
        whole.config.save_pretrained(partial)
        whole.generation_config.save_pretrained(partial)
        if len(files) > 1:
            metadata = {
                "total_parameters": sum(assembly.tensor.box.numel for assembly in assemblies),
                "total_size": sum(assembly.tensor.box.numel * assembly.dtype.itemsize for assembly in assemblies),
            }
            weight_map = {assembly.tensor.name: file.name for file in files for assembly in file.tensors}
            index = {"metadata": metadata, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        replaced = folder.with_name(folder.name + REPLACED)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        return f"{partial}: {error}"
    return ""


def _raise_failures(failure: str, group: dist.ProcessGroup | None) -> None:
    failures = {rank: text for rank, text in enumerate(_all_gather(failure, group)) if text}
    if failures:
        shown = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        raise RuntimeError(f"the weights could not be written, and the folder is as it was: {shown}")


def _all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
