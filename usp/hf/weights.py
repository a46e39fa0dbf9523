"""The weights of a model: random values that do not depend on the layout, and each rank's boxes from a model folder."""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from usp.parallel.reallocation.boxes import Box, local_box, local_part

from . import disk
from .models import empty_model, load_generation_config, read_config
from .prune import model_parts

_UNSET = -12345  # of integers, which have no nan
_ROWS_AT_A_TIME = 4096


@torch.no_grad()
def initialise(model: PreTrainedModel, seed: int, only: str = "") -> None:
    """Initialize parameters and buffers of a model or a pipeline stage, after `materialise`.

    Parameters may be plain tensors or DTensors. Tied parameters get the values of the first of them. Global random
    states are not changed. A rank draws every module of which it holds a part, so time does not decrease with the
    number of ranks that share one.

    only: name of the only module to initialize; "" for all.

    Raises ValueError, naming a module that transformers does not initialize.
    """
    whole = empty_model(model.config)
    first_names = disk.kept_names(whole)
    held: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in disk.base_parameters(model):
        held[first_names[name]].append(parameter)
    for prefix, module in whole.named_modules():
        names = [(name, f"{prefix}.{name}") for name, _ in module.named_parameters(recurse=False)]
        targets = {name: held[full] for name, full in names if first_names[full] == full and full in held}
        if not targets or only not in ("", prefix):
            continue
        values = _drawn(whole, prefix, seed)
        for name, tied in targets.items():
            for target in tied:
                local_part(target).copy_(values[name][local_box(target).slices()])
        del values
        module.to_empty(device="meta", recurse=False)
    fill_buffers(model, whole, persistent=True)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, whole: PreTrainedModel | None = None, persistent: bool = False) -> None:
    """Compute buffers that no checkpoint contains, such as rotary frequencies.

    whole: `empty_model` of the model's configuration, if the caller has one.
    persistent: also give those that checkpoints contain their first values.

    Raises ValueError, naming a module whose buffers transformers does not initialize.
    """
    whole = empty_model(model.config) if whole is None else whole
    persistent_ids = {id(buffer) for _, buffer in disk.persistent_buffers(model)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if persistent or id(buffer) not in persistent_ids}
    modules = {name.rpartition(".")[0] for name in buffers}
    values = {f"{prefix}.{name}": value for prefix in modules for name, value in _drawn(whole, prefix, 0).items()}
    for name, buffer in buffers.items():
        buffer.copy_(values[name])


def _drawn(whole: PreTrainedModel, prefix: str, seed: int) -> dict[str, Tensor]:
    module = whole.get_submodule(prefix)
    module.to_empty(device="cpu", recurse=False)
    values = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    for value in values.values():
        value.fill_(torch.nan if value.is_floating_point() else _UNSET)
    digest = hashlib.blake2b(f"{seed} {prefix}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed accelerators, whose state is not restored here.
        torch.default_generator.manual_seed(int.from_bytes(digest, "big", signed=True))
        parts = prefix.split(".") if prefix else []
        owners = [whole.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
        model: Any = next(
            owner for owner in owners if isinstance(owner, PreTrainedModel)
        )  # an encoder has its own rules
        for owner in owners:  # modules that contain it fill the buffers of some (Falcon-H1)
            model._init_weights(owner)
            uninitialized = [
                name
                for name, value in values.items()
                if bool(value.sum().isnan() if value.is_floating_point() else (value == _UNSET).any())
            ]
            if not uninitialized:
                return values
    raise ValueError(
        f"transformers does not initialize {', '.join(uninitialized)} of {prefix} ({type(module).__name__}): load "
        f"weights from a directory, or use another model type"
    )


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path, head_seed: int | None = None) -> None:
    """Load a model or a pipeline stage from a directory written by `save_pretrained`, after `materialise`.

    Parameters may be plain tensors or DTensors, of any dtype. A rank reads the parts it holds, without communication.
    Buffers that no file holds are computed, and the model gets the directory's generation configuration, if any.
    Adapters keep their values. Where the model's vocabulary is larger than the directory's, rows beyond it are the mean
    of its rows, around which transformers' `resize_token_embeddings` draws them with 3e-5 of their deviation.

    head_seed: if given, the directory holds a causal LM, and the model's scalar head is drawn from this seed.

    Raises ValueError on every rank and before reading weights, naming unreadable files, and every tensor that is
    missing, unexpected, or of the wrong shape.
    """
    whole, head = empty_model(model.config, causal=head_seed is not None), model_parts(model).head
    stored, in_folder, added = disk.stored_names(whole), whole, dict[str, list[Box]]()
    slices_of = disk.in_whole(whole, disk.read_headers(folder))
    if (rows := read_config(str(folder)).get_text_config().vocab_size) < model.config.get_text_config().vocab_size:
        config = copy.deepcopy(model.config)
        config.vocab_size = rows
        in_folder = empty_model(config, causal=head_seed is not None)
        before, after = (
            {n: Box.whole(tuple(x.shape)) for n, x in disk.stored_tensors(m).items()} for m in (in_folder, whole)
        )
        added = {name: box.minus(before[name]) for name, box in after.items()}
    chosen, copies = disk.choose_tensors(in_folder, slices_of, folder)
    for first, other in copies:
        for start in range(0, first.shape[0], _ROWS_AT_A_TIME):
            rows_here = (slice(start, start + _ROWS_AT_A_TIME),)
            if not torch.equal(_read(slices_of, first, rows_here), _read(slices_of, other, rows_here)):
                raise ValueError(
                    f"{first.name} and {other.name} differ, but config.json ties them (tie_word_embeddings=True): set "
                    f"it to false, or remove one of the two"
                )
    for name, parameter in chain(disk.base_parameters(model), disk.persistent_buffers(model)):
        if head_seed is not None and name.startswith(f"{head}."):
            continue
        held, values = local_box(parameter), local_part(parameter)
        for tensor in chosen[stored[name]]:
            part = held.overlap(tensor.box)
            if part is not None:
                loaded = _read(slices_of, tensor, part.slices(tensor.box))
                values[part.slices(held)] = loaded.view(part.sizes).to(values.dtype)
        for part in filter(None, (box.overlap(held) for box in added.get(stored[name], ()))):
            (tensor,) = chosen[stored[name]]
            values[part.slices(held)] = _mean_row(slices_of, tensor)[part.slices()[1:]].to(values.dtype)
    if head_seed is None:
        fill_buffers(model)
    else:
        initialise(model, head_seed, only=head)
    if model.can_generate():
        model.generation_config = load_generation_config(folder) or model.generation_config


def _read(slices_of: Mapping[str, Any], tensor: disk.DiskTensor, slices: tuple[slice, ...]) -> Tensor:
    return slices_of[tensor.name][slices[len(slices) - len(tensor.shape) :]]


def _mean_row(slices_of: Mapping[str, Any], tensor: disk.DiskTensor) -> Tensor:
    rows, total = tensor.shape[0], torch.zeros(tensor.shape[1:], dtype=torch.float64)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        total += _read(slices_of, tensor, (slice(start, start + _ROWS_AT_A_TIME),)).double().sum(0)
    return total / rows
