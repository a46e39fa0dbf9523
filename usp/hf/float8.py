"""FP8 training through the package torchao: which linears multiply in float8, and the scales of their weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from parallel import ParallelMesh, local_tensor
from usp.model.facts import ModelShape

from .models import ModelConfig, empty_model, model_facts
from .probe import structure
from .tensor_parallel import model_shape

RECIPES = {"tensor": "tensorwise", "row": "rowwise"}  # torchao's names of --fp8's values


def float8_weights(shape: ModelShape, tp: int) -> set[str]:
    """Return the names of the weights that multiply in float8: those of the layers' linears, without routers, whose
    parts on a rank have dims that are multiples of 16, as float8 products need. Experts are one parameter for all of a
    layer, which torchao does not convert."""
    stack = shape.names[1]
    layers = ((f"{stack}.{index}", layer) for index, layer in enumerate(shape.layers))
    return {f"{name}.{p.name}" for name, layer in layers for p in layer.parameters if p.float8(tp)}


def float8_problems(shape: ModelShape, config: ModelConfig, tp: int, shards: int) -> list[str]:
    """Return why a model cannot be trained in float8. shards: into which its weights are cut after their cast."""
    name = shape.facts.name
    if mixers := structure(type(empty_model(config)), config).mixers:
        return [
            f"--fp8 does not support the recurrent layers of {name} ({', '.join(mixers)}), which read weights of their "
            f"linears without calling them: remove it"
        ]
    if not float8_weights(shape, tp):
        return [f"--fp8 needs dims that are multiples of 16 on a rank, and no linear of {name} with tp={tp} has them"]
    if uneven := shape.uneven_float8(tp, shards):
        return [
            f"--fp8 tensor gathers weights in float8, whose rows the {shards} ranks of dp_shard x sp must divide, "
            f"which they do not for {', '.join(uneven)} of {name}: use --fp8 row, or other degrees"
        ]
    return []


def float8_line(shape: ModelShape, fp8: str, tp: int, emulated: bool) -> str:
    """Return the line of a run's summary that says what multiplies in float8, and what does not."""
    inside = float8_weights(shape, tp)
    left = {
        p.name.removesuffix(".weight"): None
        for index, layer in enumerate(shape.layers)
        for p in (*layer.parameters, *layer.experts)
        if len(p.shape) > 1 and f"{shape.names[1]}.{index}.{p.name}" not in inside
    }
    others = f"; not in float8: {', '.join([*left, 'output head'])}"
    how = "emulated: casts are exact, products in float32" if emulated else "on the device"
    return f"fp8: torchao's {RECIPES[fp8]} recipe for {len(inside)} linears, {how}{others}"


def apply_float8(model: PreTrainedModel, fp8: str, emulate: bool, tp: int) -> None:
    """Let the linears of a model or a stage multiply in float8, forwards and backwards, in place.

    torchao casts inputs, weights and gradients of outputs with scales of their largest values: of a whole tensor
    ("tensor"), or of each row ("row", powers of 2). With "tensor", FSDP2 gathers the weights in float8, with scales
    from `update_scales`. Call it before `apply_tp`, whose hooks stay on the new modules.

    emulate: multiply in float32 what was cast, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    weights = float8_weights(model_shape(model_facts("", model.config), model.config), tp)
    config = Float8LinearConfig.from_recipe_name(RECIPES[fp8])
    config = replace(config, emulate=emulate, enable_fsdp_float8_all_gather=fp8 == "tensor")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: f"{name}.weight" in weights)


@torch.no_grad()
def update_scales(stages: Iterable[nn.Module], mesh: ParallelMesh, sharded: bool) -> None:
    """Compute the scales of the weights that FSDP2 gathers in float8, from their largest values on all ranks that share
    them, as torchao's `precompute_float8_dynamic_scale_for_fsdp`. Collective over these, after every change of weights.

    sharded: over fsdp, not only over tp.
    """
    axes = [axis for axis in ("fsdp", "tp") if mesh.size(axis) > 1 and (sharded or axis == "tp")]
    for stage in stages:
        from torchao.float8.float8_utils import amax_to_scale  # which a run without float8 does not need

        # Not by to_local(), which returns another object than the one that FSDP2 gathers.
        parts = (parameter._local_tensor for parameter in stage.parameters() if isinstance(parameter, DTensor))
        weights: list[Any] = [part for part in parts if hasattr(part, "_precomputed_scale")]
        largest = torch.stack([local_tensor(weight).abs().amax().float() for weight in weights])
        for axis in axes:  # torchao's function does it inside of DTensor, where `parallel.wire` would not count it
            dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.group(axis))
        for weight, scale in zip(weights, amax_to_scale(largest, torch.float8_e4m3fn), strict=True):
            weight._precomputed_scale = scale
