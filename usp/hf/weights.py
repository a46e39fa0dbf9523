"""Import of weights from a transformers safetensors directory; each rank reads only its boxes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from parallel.reallocation.boxes import local_box, local_part

from .disk import base_parameters, choose_tensors, persistent_buffers, read_headers, stored_names
from .initialise import fill_buffers, initialise
from .models import empty_model, load_generation_config
from .prune import head_name
from .structure.conversion import DiskTensor

_ROWS_AT_A_TIME = 4096


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path, head_seed: int | None = None) -> None:
    """Load a model or a pipeline stage from a directory written by `save_pretrained`, after `materialise`.

    Parameters may be plain tensors or DTensors, of any dtype. A rank reads the parts it holds, without communication.
    Buffers that no file holds are computed, and the model gets the directory's generation configuration, if any.
    Adapters are left alone.

    head_seed: if given, the directory holds a causal LM, and the model's scalar head is drawn from this seed.

    Raises:
        ValueError: on every rank and before reading weights, naming unreadable files, and every tensor that is missing,
            unexpected, or of the wrong shape.
    """
    whole = empty_model(model.config, causal=head_seed is not None)
    stored = stored_names(whole)
    found = read_headers(folder)
    chosen, copies = choose_tensors(whole, found, folder)
    for first, copy in copies:
        _check_equal(found, first, copy)
    for name, parameter in chain(base_parameters(model), persistent_buffers(model)):
        if head_seed is not None and name.startswith(f"{head_name(model)}."):
            continue
        held, values = local_box(parameter), local_part(parameter)
        for tensor in chosen[stored[name]]:
            part = held.overlap(tensor.box)
            if part is not None:
                loaded = _read(found, tensor, part.slices(tensor.box))
                values[part.slices(held)] = loaded.view(part.sizes).to(values.dtype)
    if head_seed is None:
        fill_buffers(model)
    else:
        initialise(model, head_seed, only=head_name(model))
    if model.can_generate():
        model.generation_config = load_generation_config(folder) or model.generation_config


def _read(found: Mapping[str, Any], tensor: DiskTensor, slices: tuple[slice, ...]) -> Tensor:
    return found[tensor.name][slices[len(slices) - len(tensor.shape) :]]


def _check_equal(found: Mapping[str, Any], first: DiskTensor, copy: DiskTensor) -> None:
    for start in range(0, first.shape[0], _ROWS_AT_A_TIME):
        rows = (slice(start, start + _ROWS_AT_A_TIME),)
        if not torch.equal(_read(found, first, rows), _read(found, copy, rows)):
            raise ValueError(
                f"{first.name} and {copy.name} differ, but config.json ties them (tie_word_embeddings=True): set it "
                f"to false, or remove one of the two"
            )
