"""Export of sharded weights to a transformers safetensors directory, without gathering the model.

Every rank computes the same plan: the tensors of each file, the rank that writes it, and the boxes that other ranks
send it. Files are written in rounds of at most one file per rank. In each step of a round, a single all-to-all sends
every writer the boxes of one tensor of its file.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from usp.parallel.groups import gather_objects
from usp.parallel.reallocation.boxes import Box, local_box, local_part
from usp.parallel.reallocation.param_layout import holdings
from usp.run.failures import WriteFailed

from .disk import (
    INDEX,
    DiskTensor,
    disk_layout,
    draft_tensors,
    file_names,
    has_draft_layers,
    in_whole,
    layer_names,
    plan_files,
    read_headers,
    stored_names,
    stored_tensors,
    uncast_names,
)
from .models import empty_model

SHARD_BYTES = 5 * 10**9
CONFIG = "config.json"
PARTIAL, REPLACED = ".partial", ".replaced"  # suffixes of the directory being written, and of the one it replaces


@dataclass(frozen=True)
class Held:
    """Part of a parameter held by a rank."""

    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype
    carried: bool = False  # from the files of another model, not a parameter


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


def plan_tensors(
    tensors: Sequence[DiskTensor],
    holders: Sequence[Mapping[str, Held]],
    max_shard_bytes: float,
    names_of: Callable[[int], Sequence[str]],
) -> list[list[FilePlan]]:
    """Return the rounds, lists of files with different writers. names_of: the names of a number of files. Neighboring
    files have neighboring writers, so that pipeline stages write most of their own layers."""
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
        assemblies = []
        for tensor in file:
            overlaps = [(part.ranks, tensor.box.overlap(part.box)) for part in parts[tensor.parameter]]
            # Of ranks that hold the same box, the writer sends it if possible, else the first.
            sources = {writer if writer in ranks else ranks[0]: box for ranks, box in overlaps if box}
            assemblies.append(Assembly(tensor, dtypes[tensor.parameter], writer, sources))
        by_writer[writer].append(FilePlan(name, writer, assemblies))
    return [[file for file in files_of_round if file] for files_of_round in zip_longest(*by_writer)]


@torch.no_grad()
def save_weights(
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    config: PretrainedConfig,
    generation_config: GenerationConfig | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    group: dist.ProcessGroup | None = None,
    beside: Callable[[Path], None] = lambda folder: None,
    source: Path | None = None,
) -> str:
    """Write a directory that `from_pretrained` loads as the model of `config`; return, on every rank, what is carried
    over from `source`, empty for nothing.

    Collective. In addition to its weights, a rank holds one file, one tensor, and copies of the parts that it sends.
    The directory is written under a temporary name and renamed when complete, replacing an existing model and the
    remains of a failed export. It exists when any rank returns. Without torch.distributed, one process holds all.

    Args:
        weights: of this rank's pipeline stages, by their names in the transformers model, with persistent buffers;
            plain tensors (whole) or DTensors. Of tied parameters, the first in the model is saved.
        folder: on a file system shared by all ranks.
        generation_config: default: derived from `config` by transformers.
        dtype: of the written weights, which are cast before they are sent, except `uncast_names`; None for the dtypes
            of `weights`.
        max_shard_bytes: maximum size of a file, unless a single tensor is larger.
        group: the ranks that together hold the model; None for all.
        beside: writes further files to the directory before it is complete, on rank 0.
        source: the directory that the weights came from, whose layers for predicting further tokens, which transformers
            does not build, are written too, unchanged; see `draft_tensors`. None for no such directory.

    Raises on every rank: ValueError, naming all parameters that are missing, unknown, or do not match `config`, a
    directory with other content than a model, and a `source` that cannot be read and may have such layers;
    WriteFailed if a rank cannot write.
    """
    whole = _exported_model(config, generation_config)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(whole).items()}
    model = f"the configured {config.model_type} model"
    tensors, names = [*chain.from_iterable(disk_layout(whole, shapes).values())], stored_names(whole)
    carried, refusal = dict[str, Any](), ""
    if source is not None and (not dist.is_initialized() or dist.get_rank(group) == 0):
        try:
            found = in_whole(whole, read_headers(source))
            drafts = draft_tensors(whole, {*(tensor.name for tensor in tensors), *names}, found)
            carried = {name: found[name] for name in drafts}
        except ValueError as error:
            if has_draft_layers(whole):
                instead = "put the folder back and resume, and the model is written again"
                refusal = (
                    f"layers for predicting further tokens are exported as they were in {source}: {error}: {instead}"
                )

    def of_first(holders: Sequence[Mapping[str, Held]]) -> dict[str, tuple[int, ...]]:
        return {name: part.shape for name, part in holders[0].items() if part.carried}

    def plan(holders: Sequence[Mapping[str, Held]]) -> list[list[FilePlan]]:
        more = [DiskTensor(name, name, Box.whole(shape), shape) for name, shape in of_first(holders).items()]
        return plan_tensors([*tensors, *more], holders, max_shard_bytes, file_names)

    holders = write_folder(
        weights,
        folder,
        check=lambda holders: part_violations(shapes, holders, {*names, *of_first(holders)}, model),
        plan=plan,
        describe=lambda rounds, partial: _describe(whole, rounds, partial),
        dtype=dtype,
        uncast=uncast_names(whole),
        group=group,
        beside=beside,
        carried=carried,
        refusal=refusal,
    )
    names_of_layers = ", ".join(layer_names(of_first(holders)))
    return names_of_layers and f"{len(of_first(holders))} tensors of {names_of_layers}, unchanged from {source}"


@torch.no_grad()
def write_folder(
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    check: Callable[[Sequence[Mapping[str, Held]]], list[str]],
    plan: Callable[[Sequence[Mapping[str, Held]]], list[list[FilePlan]]],
    describe: Callable[[Sequence[Sequence[FilePlan]], Path], None],
    marker: str = CONFIG,
    dtype: torch.dtype | None = None,
    uncast: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
    beside: Callable[[Path], None] = lambda folder: None,
    carried: Mapping[str, Any] | None = None,
    refusal: str = "",
) -> Sequence[Mapping[str, Held]]:
    """Write a directory of safetensors files, whole or not at all; return what all ranks hold. See `save_weights`, also
    for what is raised.

    check: what is wrong with what all ranks hold; plan: the rounds, from the same.
    describe: write the other files to this directory, on rank 0.
    marker: the file by which an existing directory is known to be one that may be replaced.
    uncast: names of weights that are not cast to `dtype`.
    carried: on one rank, safetensors' slices of tensors of other files, which are written unchanged.
    refusal: why this rank has not what it should write.
    """
    carried, rank = carried or {}, dist.get_rank(group) if dist.is_initialized() else 0
    partial = folder.with_name(folder.name + PARTIAL)
    refusal = refusal or (_prepare(folder, partial, marker) if rank == 0 else "")
    held, unknown = _held(weights, dtype, uncast)
    for name, tensor in carried.items():
        shape = tuple(tensor.get_shape())
        held[name] = Held(Box.whole(shape), shape, tensor[slice(0, 0) if shape else ...].dtype, carried=True)
    refusals, holders = zip(*gather_objects((refusal or unknown, held), group), strict=True)
    violations = [*dict.fromkeys(filter(None, refusals)), *check(holders)]
    if violations:
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError("; ".join(violations))
    rounds, failure = plan(holders), ""
    for files in rounds:  # a rank that cannot write keeps sending, because other ranks wait for it
        content: dict[str, Tensor] = {}
        for step in zip_longest(*(file.tensors for file in files)):
            content.update(_exchange([assembly for assembly in step if assembly], weights, carried, rank, group))
        for file in files:
            if file.writer == rank and not failure:
                try:
                    save_file(content, partial / file.name, metadata={"format": "pt"})
                except (OSError, SafetensorError) as error:
                    failure = f"{partial / file.name}: {error}"
    _raise_failures(failure, group)
    if rank == 0:
        try:
            describe(rounds, partial)
            beside(partial)
            _replace(folder, partial)
        except Exception as error:  # of any kind: it is the code of packages that runs, and other ranks wait
            failure = f"{partial}: {error}"
    _raise_failures(failure, group)
    return holders


def _held(
    weights: Mapping[str, Tensor], dtype: torch.dtype | None, uncast: Collection[str]
) -> tuple[dict[str, Held], str]:
    """Describe this rank's weights as `dtype`; also return an error message, as raising here would hang other ranks."""
    held, unknown = {}, []
    for name, weight in weights.items():
        try:
            stored = weight.dtype if dtype is None or name in uncast else dtype
            held[name] = Held(local_box(weight), tuple(weight.shape), stored)
        except ValueError as error:
            unknown.append(f"{name}: {error}")
    return held, "; ".join(unknown)


def _exchange(
    step: Sequence[Assembly],
    weights: Mapping[str, Tensor],
    carried: Mapping[str, Any],
    rank: int,
    group: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    """Exchange one tensor per writer; return the one this rank writes, on the CPU, by its name on disk."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    device = local_part(next(iter(weights.values()))).device
    if ranks > 1 and "nccl" in dist.get_backend(group):
        device = torch.device("cuda")  # of weights in host memory too
    send = [torch.empty(0, dtype=torch.uint8, device=device)] * ranks
    receive = [0] * ranks
    for assembly in step:
        if rank in assembly.sources:
            name = assembly.tensor.parameter
            weight = carried[name][...] if name in carried else weights[name]
            part = local_part(weight)[assembly.sources[rank].slices(local_box(weight))]
            send[assembly.writer] = part.to(device, assembly.dtype).contiguous().view(-1).view(torch.uint8)
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
    config = copy.deepcopy(config)
    config.use_cache = True  # disabled while sequences are sharded
    whole = empty_model(config)
    whole.config.architectures = [type(whole).__name__]
    if whole.can_generate():  # not with a scalar head
        if generation_config is not None:
            whole.generation_config = copy.deepcopy(generation_config)
        assert whole.generation_config is not None
        whole.generation_config.use_cache = True
    return whole


def _prepare(folder: Path, partial: Path, marker: str) -> str:
    """Create an empty directory `partial`; return the error if that failed."""
    is_model = (folder / marker).is_file()
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_model and not is_empty:
        return f"{folder} contains files other than a model: use a directory that does not exist"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        return f"{partial} cannot be created: {error}"
    return ""


def _describe(whole: PreTrainedModel, rounds: Sequence[Sequence[FilePlan]], partial: Path) -> None:
    files = [file for files in rounds for file in files]
    assemblies = [assembly for file in files for assembly in file.tensors]
    whole.config.dtype = str(assemblies[0].dtype).removeprefix("torch.")
    whole.config.save_pretrained(partial)
    if whole.can_generate():
        assert whole.generation_config is not None
        # save_pretrained rejects published configurations that only warn on loading, once `use_cache` is set.
        whole.generation_config.to_json_file(partial / "generation_config.json", keys_to_pop=["compile_config"])
    if len(files) > 1:
        metadata = {
            "total_parameters": sum(assembly.tensor.box.numel for assembly in assemblies),
            "total_size": sum(assembly.tensor.box.numel * assembly.dtype.itemsize for assembly in assemblies),
        }
        weight_map = {assembly.tensor.name: file.name for file in files for assembly in file.tensors}
        index = {"metadata": metadata, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _replace(folder: Path, new: Path) -> None:
    """Rename `new` to `folder`, of which nothing remains."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    new.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _raise_failures(failure: str, group: dist.ProcessGroup | None) -> None:
    failures = {rank: text for rank, text in enumerate(gather_objects(failure, group)) if text}
    if failures:
        shown = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        raise WriteFailed(f"the weights could not be written, the directory is unchanged: {shown}")
