"""Stand-in."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM


@torch.no_grad()
def _copy(model, whole):
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    for name, p in model.named_parameters():
        full = theirs[name]
        if isinstance(p, DTensor):
            shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
            full = full[tuple(slice(o, o + s) for o, s in zip(offset, shape))]
            p.to_local().copy_(full)
        else:
            p.copy_(full)
    buffers = dict(whole.named_buffers())
    for name, b in model.named_buffers():
        b.copy_(buffers[name])


def initialise(model, seed):
    torch.manual_seed(seed)
    _copy(
        model,
        AutoModelForCausalLM.from_config(
            __import__("copy").deepcopy(model.config), dtype=torch.float32, attn_implementation="eager"
        ),
    )


def load_weights(model, folder):
    _copy(model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"))


def save_weights(*args, **kwargs):
    pass
