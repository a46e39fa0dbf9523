"""Random initialization that depends only on the seed, not on the layout or the number of ranks.

Each module of the whole model is initialized on the CPU by transformers' `_init_weights`, with a generator seeded by
the seed and the module's name; a rank keeps its box. Only one module is in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from parallel.reallocation.boxes import local_box, local_part

from .disk import base_parameters, persistent_buffers
from .models import empty_model, kept_names

_UNSET = -12345  # of integers, which have no nan


@torch.no_grad()
def initialise(model: PreTrainedModel, seed: int, only: str = "") -> None:
    """Initialize parameters and buffers of a model or a pipeline stage, after `materialise`.

    Parameters may be plain tensors or DTensors. Tied parameters get the values of the first of them. Global random
    states are not changed. A rank draws every module of which it holds a part, so time does not decrease with the
    number of ranks that share one.

    only: name of the only module to initialize; "" for all.

    Raises:
        ValueError: naming a module that transformers does not initialize.
    """
    whole = empty_model(model.config)
    kept = kept_names(whole)
    held: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in base_parameters(model):
        held[kept[name]].append(parameter)
    for prefix, module in whole.named_modules():
        names = [(name, f"{prefix}.{name}") for name, _ in module.named_parameters(recurse=False)]
        targets = {name: held[full] for name, full in names if kept[full] == full and full in held}
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

    Raises:
        ValueError: naming a module whose buffers transformers does not initialize.
    """
    whole = empty_model(model.config) if whole is None else whole
    kept = {id(buffer) for _, buffer in persistent_buffers(model)}
    buffers = {name: buffer for name, buffer in model.named_buffers() if persistent or id(buffer) not in kept}
    modules = {name.rpartition(".")[0] for name in buffers}
    values = {f"{prefix}.{name}": value for prefix in modules for name, value in _drawn(whole, prefix, 0).items()}
    for name, buffer in buffers.items():
        buffer.copy_(values[name])


def _has_unset(value: Tensor) -> bool:
    return bool(value.sum().isnan() if value.is_floating_point() else (value == _UNSET).any())


def _drawn(whole: PreTrainedModel, prefix: str, seed: int) -> dict[str, Tensor]:
    """Return initialized parameters and buffers of one module of the whole model, on the CPU."""
    module = whole.get_submodule(prefix)
    module.to_empty(device="cpu", recurse=False)
    values = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    for value in values.values():
        value.fill_(torch.nan if value.is_floating_point() else _UNSET)
    digest = hashlib.blake2b(f"{seed} {prefix}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed accelerators, whose state is not restored here.
        torch.default_generator.manual_seed(int.from_bytes(digest, "big", signed=True))
        for owner in _with_ancestors(prefix):
            whole._init_weights(whole.get_submodule(owner))
            uninitialized = [name for name, value in values.items() if _has_unset(value)]
            if not uninitialized:
                return values
    raise ValueError(
        f"transformers does not initialize {', '.join(uninitialized)} of {prefix} ({type(module).__name__}): load "
        f"weights from a directory, or use another model type"
    )


def _with_ancestors(name: str) -> Iterator[str]:
    """Yield a module's name and those of the modules that contain it, of which some fill its buffers (Falcon-H1)."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name
