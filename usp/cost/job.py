"""A training step as numbers: the model's shapes, the degrees, and every switch that changes bytes.

`job_of` reads it from a configuration; all predictions are pure functions of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from attention import SequenceLayout
from parallel import ParallelDims, rank_stages, stage_layers, stages_per_rank
from parallel.dims import DERIVED_AXES
from usp.config import TrainConfig
from usp.hf.balance import aux_loss_coefficient
from usp.hf.models import ModelConfig
from usp.model.facts import LayerShape, ModelShape, ParameterShape
from usp.train.resolve import resolve

__all__ = ["Job", "LayerShape", "ModelShape", "ParameterShape", "job_of"]


@dataclass(frozen=True, eq=False)  # hashed by identity, so that results for a job can be cached
class Job:
    """One optimizer step of `Fsdp2Engine`. Sequences are one document each.

    Attributes:
        config: with the batch size of a rank.
        dims: resolved.
        balance: whether routers have a load-balancing loss.
    """

    config: TrainConfig
    model: ModelShape
    dims: ParallelDims
    balance: bool = False

    @cached_property
    def world_size(self) -> int:
        return math.prod(self.dims.degrees().values())

    @cached_property
    def dtype(self) -> torch.dtype:
        """The compute dtype; master weights and reductions are float32. `auto` is a GPU's, except with device=cpu."""
        auto = torch.float32 if self.config.device == "cpu" else torch.bfloat16
        return auto if self.config.dtype == "auto" else getattr(torch, self.config.dtype)

    @property
    def counts_choices(self) -> bool:
        """Whether forwards without gradients count the routers' choices before the step (`usp.train.engines`)."""
        return self.balance and self.config.router_balance == "step" and self.config.micro_batches > 1

    @cached_property
    def layout(self) -> SequenceLayout:
        """The layout of a sequence on ring x ulysses."""
        return SequenceLayout(self.config.sp_layout, self.config.seq_len, self.dims.ring, self.dims.ulysses)

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch on one data-parallel rank."""
        return self.config.batch_size // self.config.micro_batches

    @cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank of ring x ulysses."""
        return self.rows * self.layout.local_len

    @cached_property
    def outer_tokens(self) -> int:
        """Tokens of one micro-batch on one rank outside of attention and MLP, which tp ranks may share."""
        return self.tokens // self.dims.tp if self.config.tp_sequence_parallel else self.tokens

    @property
    def splits_backwards(self) -> bool:
        """Whether backwards are split into one for the inputs and a later one for the weights."""
        return self.config.pp_schedule == "zero-bubble" and self.dims.pp > 1

    @cached_property
    def stage_layers(self) -> tuple[range, ...]:
        """The layers of each pipeline stage."""
        return stage_layers(len(self.model.layers), self.dims.pp * stages_per_rank(self.config.pp_schedule))

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the pipeline stages of a rank."""
        return rank_stages(self.config.pp_schedule, self.dims.pp, self.place("pp", rank))

    def kinds(self, stage: int) -> Counter[int]:
        """Count the layers of a stage by the layer that they equal (`ModelShape.alike`)."""
        return Counter(self.model.alike[index] for index in self.stage_layers[stage])

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis: derived ones, efsdp, ep and the two `ends` of pp included."""
        return self._extents[axis][0]

    def ranks(self, axis: str, rank: int) -> range:
        """Return the global ranks of the group of `rank` along an axis, ascending."""
        degree, stride = self._extents[axis]
        first = rank - self.place(axis, rank) * stride
        return range(first, first + degree * stride, stride)

    def place(self, axis: str, rank: int) -> int:
        """Return the coordinate of `rank` along an axis."""
        degree, stride = self._extents[axis]
        return rank // stride % degree

    @cached_property
    def _extents(self) -> Mapping[str, tuple[int, int]]:
        """The degree of each axis, and the distance between neighbours along it."""
        found, stride = {"efsdp": (self.dims.efsdp, self.dims.ep), "ep": (self.dims.ep, 1)}, 1
        for axis, degree in reversed(self.dims.degrees().items()):
            found[axis] = degree, stride
            stride *= degree
        for axis, parts in DERIVED_AXES.items():  # the parts of a derived axis are adjacent
            degrees, strides = zip(*(found[part] for part in parts), strict=True)
            found[axis] = math.prod(degrees), min(strides)
        pp, stride = found["pp"]
        found["ends"] = (2, stride * (pp - 1)) if pp > 1 else (1, stride)
        return found


def job_of(config: TrainConfig, model_config: ModelConfig, world_size: int, model: ModelShape | None = None) -> Job:
    """Return the step that `config` asks for; of a curriculum, that of the stage with most tokens on a rank.

    model: the shapes of `model_config`, if the caller has them.

    Raises:
        ConfigurationError: for configurations that train.py refuses, for DeepSpeed, Muon and LoRA.
    """
    refused = []
    if config.engine == "deepspeed":
        refused.append(f"--engine = {config.engine} is not modelled: use --engine fsdp2")
    if config.optimizer != "adamw":
        refused.append(
            f"--optimizer = {config.optimizer} is not modelled, only AdamW: measure a layout with python -m usp "
            f"dry-run, which knows Muon, or plan without it"
        )
    if config.lora_rank:
        refused.append(
            f"--lora-rank = {config.lora_rank} is not modelled, only the training of all weights: measure a layout "
            f"with python -m usp dry-run, which knows LoRA, or plan without --lora-rank for an upper bound"
        )
    resolved = resolve(config, world_size, model_config)
    _, model_config, facts, _ = resolved.valid(refused)
    config, dims = resolved.largest.config, resolved.largest.dims
    balance = bool(facts.num_experts and aux_loss_coefficient(model_config, config.router_aux_loss_coef))
    return Job(config, model or resolved.shape, dims, balance)
