"""FP8 training through the package torchao: which linears multiply in float8, and the scales of their weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from usp.model.facts import FLOAT8_DIMS, ModelShape
from usp.parallel import ParallelMesh, local_tensor

from .experts import expert_modules
from .models import ModelConfig, empty_model, model_facts
from .probe import structure
from .tensor_parallel import model_shape

RECIPES = {"tensor": "tensorwise", "row": "rowwise", "mx": "mxfp8_rceil"}  # torchao's names of --fp8's values


def float8_weights(shape: ModelShape, fp8: str, tp: int) -> set[str]:
    """Return the names of the weights that multiply in float8: those of the layers' linears, without routers, whose
    parts on a rank have dims that are multiples of what its products need, and with "mx" those of experts. Experts are
    one parameter for all of a layer, which torchao's other recipes multiply by kernels of some GPUs only."""
    stack = shape.names[1]
    layers = [(f"{stack}.{index}", layer) for index, layer in enumerate(shape.layers)]
    mixed = [(name, p) for name, layer in layers if layer.float8_experts(fp8) for p in layer.experts]
    experts = {f"{name}.{p.name}" for name, p in mixed if len(p.shape) == 3}
    return experts | {f"{name}.{p.name}" for name, layer in layers for p in layer.parameters if p.float8(fp8, tp)}


def float8_problems(shape: ModelShape, config: ModelConfig, fp8: str, tp: int, shards: int) -> list[str]:
    """Return why a model cannot be trained in float8. shards: into which its weights are cut after their cast."""
    name = shape.facts.name
    if mixers := structure(type(empty_model(config)), config).mixers:
        return [
            f"--fp8 does not support the recurrent layers of {name} ({', '.join(mixers)}), which read weights of their "
            f"linears without calling them: remove it"
        ]
    if not float8_weights(shape, fp8, tp):
        needed = f"--fp8 {fp8} needs dims that are multiples of {FLOAT8_DIMS[fp8]} on a rank"
        return [f"{needed}, and no linear of {name} with --tp {tp} has them"]
    if fp8 == "tensor" and (uneven := shape.uneven_float8(tp, shards)):
        return [
            f"--fp8 tensor gathers weights in float8, whose rows the {shards} ranks of dp_shard x sp must divide, "
            f"which they do not for {', '.join(uneven)} of {name}: use --fp8 row, or other degrees"
        ]
    return []


def float8_line(shape: ModelShape, fp8: str, tp: int, emulated: bool) -> str:
    """Return the line of a run's summary that says what multiplies in float8, and what does not."""
    inside = float8_weights(shape, fp8, tp)
    left = {
        p.name.removesuffix(".weight"): None
        for index, layer in enumerate(shape.layers)
        for p in (*layer.parameters, *layer.experts)
        if len(p.shape) > 1 and f"{shape.names[1]}.{index}.{p.name}" not in inside
    }
    others = f"; not in float8: {', '.join([*left, 'output head'])}"
    kind = "weights" if fp8 == "mx" else "linears"
    how = "emulated: casts are exact, products in float32" if emulated else "on the device"
    return f"fp8: torchao's {RECIPES[fp8]} recipe for {len(inside)} {kind}, {how}{others}"


def apply_float8(model: PreTrainedModel, fp8: str, emulate: bool, tp: int) -> None:
    """Let the linears of a model or a stage multiply in float8, forwards and backwards, in place.

    torchao casts inputs, weights and gradients of outputs with scales of their largest values: of a whole tensor
    ("tensor"), or of each row ("row", powers of 2), or of each 32 numbers that a product sums ("mx", likewise). With
    "tensor", FSDP2 gathers the weights in float8, with scales from `update_scales`. Call it before `apply_tp`, whose
    hooks stay on the new modules.

    emulate: multiply in float32 what was cast, on any device; experts in bfloat16.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    weights = float8_weights(model_shape(model_facts("", model.config), model.config), fp8, tp)
    if fp8 == "mx":
        modules: list[tuple[str, Any]] = [*model.named_modules()]
        experts = {*expert_modules(model)}
        for name, module in modules:
            if f"{name}.weight" in weights:
                module.__class__, module.emulate = MxLinear, emulate
            elif module in experts and f"{name}.down_proj" in weights:
                module.grouped_product = partial(_mx_grouped_product, emulate)
        return
    config = Float8LinearConfig.from_recipe_name(RECIPES[fp8])
    config = replace(config, emulate=emulate, enable_fsdp_float8_all_gather=fp8 == "tensor")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: f"{name}.weight" in weights)


class MxLinear(nn.Linear):
    """A linear that multiplies in MXFP8 as torchao's parameters of `MXFP8TrainingOpConfig` do, whose type FSDP2 and
    DTensor need not know."""

    emulate: bool

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm

        out = _to_mxfp8_then_scaled_mm(x.contiguous(), self.weight, *_mx_options(self.emulate))
        return out if self.bias is None else out + self.bias


def _mx_grouped_product(emulate: bool, rows_GI: Tensor, weight_EIO: Tensor, ends: Tensor) -> Tensor:
    """Multiply experts in MXFP8; torchao has results in bfloat16, and pads the rows of each to whole blocks."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

    kernels, rounding = _mx_options(emulate)
    options = {"kernel_preference": kernels, "scale_calculation_mode": rounding, "out_dtype": torch.bfloat16}
    padded = {"pad_token_groups_for_grouped_mm": True}
    return _to_mxfp8_then_scaled_grouped_mm(rows_GI, weight_EIO, ends, **options, **padded).to(rows_GI.dtype)


def _mx_options(emulate: bool) -> tuple[Any, Any]:
    """Return torchao's kernels, and how scales are rounded: up, as NVIDIA does."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    return KernelPreference.EMULATED if emulate else KernelPreference.AUTO, ScaleCalculationMode.RCEIL


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
        for axis in axes:  # torchao's function does it inside of DTensor, where `usp.parallel.wire` would not count it
            dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.group(axis))
        for weight, scale in zip(weights, amax_to_scale(largest, torch.float8_e4m3fn), strict=True):
            weight._precomputed_scale = scale
