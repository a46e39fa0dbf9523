"""Random weights that the seed alone fixes: every layout and number of ranks gives each parameter the same values.

Each module of the whole model is drawn on its own, on the CPU, from a generator seeded with the seed and the module's
name, by transformers' own `_init_weights`. A rank then keeps its box. Of the whole model, one module exists at a time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parallel.reallocation.boxes import local_box, local_part
from usp.hf.models import empty_model, kept_names


@torch.no_grad()
def initialise(model: PreTrainedModel, seed: int, only: str = "") -> None:
    """Fill parameters and buffers of a model, or of a pipeline stage of it, after `materialise`.

    only: the name of the one module to fill; "": all.
    Parameters may be plain or DTensors. Tied parameters get the values that transformers gives the first of them.
    Random states stay as they are. A rank draws every module of which it holds a part, so time does not fall with the
    number of ranks that share one.

    Raises:
        ValueError: naming a module that transformers' initialisation leaves alone.
    """
    whole = empty_model(model.config)
    kept = kept_names(whole)
    held: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        held[kept[name]].append(parameter)
    for prefix, module in whole.named_modules():
        names = [(name, f"{prefix}.{name}") for name, _ in module.named_parameters(recurse=False)]
        targets = {name: held[full] for name, full in names if kept[full] == full and full in held}
        if targets and only in ("", prefix):
            _fill(whole, prefix, seed, targets)
    fill_buffers(model)


def _fill(whole: PreTrainedModel, prefix: str, seed: int, targets: Mapping[str, Sequence[Tensor]]) -> None:
    """Draw a module, hand out its boxes, and forget it."""
    values = _drawn(whole, prefix, seed)
    for name, held in targets.items():
        for target in held:
            local_part(target).copy_(values[name][local_box(target).slices()])
    whole.get_submodule(prefix).to_empty(device="meta", recurse=False)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel) -> None:
    """Compute what is in no checkpoint, such as rotary frequencies, as transformers does.

    Raises:
        ValueError: naming a module whose buffers transformers' initialisation leaves alone.
    """
    whole = empty_model(model.config)
    modules = {name.rpartition(".")[0] for name, _ in model.named_buffers()}
    values = {f"{prefix}.{name}": value for prefix in modules for name, value in _drawn(whole, prefix, 0).items()}
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _drawn(whole: PreTrainedModel, prefix: str, seed: int) -> dict[str, Tensor]:
    """Parameters and buffers of one module of the whole model, on the CPU."""
    module = whole.get_submodule(prefix)
    module.to_empty(device="cpu", recurse=False)
    values = _own_tensors(module)
    for value in values.values():
        value.fill_(torch.nan)
    digest = hashlib.blake2b(f"{seed} {prefix}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the accelerators too, whose state is not put back here.
        torch.default_generator.manual_seed(int.from_bytes(digest, "big", signed=True))
        whole._init_weights(module)
    left = [name for name, value in values.items() if value.sum().isnan()]
    if left:
        raise ValueError(
            f"transformers gives no first values to {', '.join(left)} of {prefix} ({type(module).__name__}): load "
            f"weights from a folder, or use another model type"
        )
    return values


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
