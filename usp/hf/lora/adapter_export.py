"""Export of adapters to a directory that peft loads, and of the model with its adapters merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from parallel.reallocation.boxes import Box, local_box, local_part

from ..disk import base_parameters, persistent_buffers
from ..export import CONFIG, write_folder
from ..export_plan import FilePlan, Held, part_violations, plan_tensors
from ..structure.conversion import DiskTensor
from .adapters import ADAPTER, Lora, adapter_parameters, lora_config

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of peft's names


def save_adapter(
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    lora: Lora,
    base: Path,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a directory that `PeftModel.from_pretrained(base model, folder)` loads.

    Collective; as `usp.hf.export.save_weights`, also in what it raises, but to one file.

    Args:
        weights: of this rank's adapters, by the names in `adapter_parameters`; plain tensors (whole) or DTensors.
        base: directory of the base model, stored as the adapter's base_model_name_or_path.
        config: of the base model, written too where the adapters were trained with another one than the base's own.
    """

    def shapes(holders: Sequence[Mapping[str, Held]]) -> dict[str, tuple[int, ...]]:
        return {name: part.shape for held in holders for name, part in held.items()}

    def plan(holders: Sequence[Mapping[str, Held]]) -> list[list[FilePlan]]:
        tensors = [
            DiskTensor(_PREFIX + name.replace(f".{ADAPTER}.", "."), name, Box.whole(shape), shape)
            for name, shape in shapes(holders).items()
        ]
        return plan_tensors(tensors, holders, math.inf, lambda number: [ADAPTER_FILE] * number)

    def describe(rounds: Sequence[Sequence[FilePlan]], partial: Path) -> None:
        described = lora_config(lora, lora.targets)
        described.base_model_name_or_path, described.inference_mode = str(base), True
        described.save_pretrained(str(partial))
        if config is not None:
            config.to_json_file(partial / CONFIG, use_diff=True)

    write_folder(
        weights,
        folder,
        check=lambda holders: part_violations(shapes(holders), holders, shapes(holders), "the adapters"),
        plan=plan,
        describe=describe,
        marker=ADAPTER_CONFIG,
        dtype=dtype,
        group=group,
    )


class MergedWeights(Mapping[str, Tensor]):
    """The weights of stages without adapters and with their updates, by their names in the transformers model.

    A weight is merged when it is asked for, in float32, and only this rank's part of it. Collective to create: every
    rank gets the adapters of its stages whole.
    """

    @torch.no_grad()
    def __init__(self, models: Sequence[nn.Module], lora: Lora) -> None:
        self._scale = lora.scale
        self._weights: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        for model in models:
            kept = model.named_parameters()  # tied ones once
            ids = {id(parameter) for _, parameter in kept}
            for name, parameter in base_parameters(model):
                if id(parameter) in ids:
                    ids.discard(id(parameter))
                    self._weights[name] = parameter.detach()
            self._weights.update(persistent_buffers(model))
            for name, parameter in adapter_parameters(model):
                self._factors[name] = _whole(parameter.detach())

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        linear = name.removesuffix(".weight")
        down = self._factors.get(f"{linear}.lora_A.{ADAPTER}.weight")
        if down is None:
            return weight
        up = self._factors[f"{linear}.lora_B.{ADAPTER}.weight"]
        rows, columns = local_box(weight).slices()
        merged = weight.clone().float()
        local_part(merged).add_(up[rows] @ down[:, columns], alpha=self._scale)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _whole(x: Tensor) -> Tensor:
    """Gather a DTensor where its mesh is: NCCL does not gather from host memory. The result is where `x` is."""
    if not isinstance(x, DTensor):
        return x
    there = cast(DTensor, x.to(x.device_mesh.device_type))
    return there.full_tensor().to(x.device)
