"""A training step as numbers: the model's shapes, the degrees, and every switch that changes bytes.

`job_of` reads it from a configuration; all predictions are pure functions of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

# The grids whose axes have process groups, as in `parallel.mesh`.
_GRIDS = (
    ("pp", "dp_replicate", "fsdp", "tp"),
    ("pp", "loss", "tp"),
    ("pp", "batch", "sp", "tp"),
    ("pp", "dp_replicate", "efsdp", "ep"),
)


@dataclass(frozen=True)
class Job:
    """One optimizer step of `Fsdp2Engine`. Sequences are one document each.

    Attributes:
        dims: resolved.
        rows: sequences per data-parallel rank and step (train.py's batch_size).
        dtype: of parameters and activations in forward and backward; master weights and reductions are float32.
        balance: whether routers have a load-balancing loss.

    The other attributes are train.py's flags of these names.
    """

    model: ModelShape
    dims: ParallelDims
    seq_len: int
    rows: int = 1
    micro_batches: int = 1
    sp_layout: str = "zigzag"
    zero: int = 3
    ac: str = "none"
    ac_offload: bool = False
    mlp_tile: int = 0
    loss_chunk: int = 2048
    tp_sequence_parallel: bool = False
    pp_schedule: str = "1f1b"
    dtype: torch.dtype = torch.bfloat16
    balance: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(self.dims.degrees().values())

    @property
    def layout(self) -> SequenceLayout:
        """The layout of a sequence on ring x ulysses."""
        return SequenceLayout(self.sp_layout, self.seq_len, self.dims.ring, self.dims.ulysses)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank of ring x ulysses."""
        return self.rows // self.micro_batches * self.layout.local_len

    @property
    def outer_tokens(self) -> int:
        """Tokens of one micro-batch on one rank outside of attention and MLP, which tp ranks may share."""
        return self.tokens // self.dims.tp if self.tp_sequence_parallel else self.tokens

    @property
    def splits_backwards(self) -> bool:
        """Whether backwards are split into one for the inputs and a later one for the weights."""
        return self.pp_schedule == "zero-bubble" and self.dims.pp > 1

    @property
    def stage_layers(self) -> tuple[range, ...]:
        """The layers of each pipeline stage."""
        return stage_layers(len(self.model.layers), self.dims.pp * stages_per_rank(self.pp_schedule))

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the pipeline stages of a rank."""
        return rank_stages(self.pp_schedule, self.dims.pp, self.dims.coordinates(rank)["pp"])

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis, derived axes, efsdp and ep included."""
        if axis in ("efsdp", "ep"):
            return self.dims.efsdp if axis == "efsdp" else self.dims.ep
        degrees = self.dims.degrees()
        return math.prod(degrees[part] for part in DERIVED_AXES.get(axis, (axis,)))

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the group of `rank` along an axis, ascending."""
        axes = next(grid for grid in (tuple(self.dims.degrees()), *_GRIDS) if axis in grid)
        stride = math.prod(self.degree(inner) for inner in axes[axes.index(axis) + 1 :])
        first = rank - self.place(axis, rank) * stride
        return tuple(first + stride * number for number in range(self.degree(axis)))

    def place(self, axis: str, rank: int) -> int:
        """Return the coordinate of `rank` along an axis."""
        axes = next(grid for grid in (tuple(self.dims.degrees()), *_GRIDS) if axis in grid)
        stride = math.prod(self.degree(inner) for inner in axes[axes.index(axis) + 1 :])
        return rank // stride % self.degree(axis)


def job_of(config: TrainConfig, model_config: ModelConfig, world_size: int, model: ModelShape | None = None) -> Job:
    """Return the step that `config` asks for. A dtype `auto` is a GPU's, except with device=cpu.

    model: the shapes of `model_config`, if the caller has them.

    Raises:
        ConfigurationError: for configurations that train.py refuses, and for DeepSpeed.
    """
    refused = f"--engine = {config.engine} is not modelled: use --engine fsdp2"
    resolved = resolve(config, world_size, model_config)
    config, model_config, facts, dims = resolved.valid([refused] if config.engine == "deepspeed" else [])
    dtype = config.dtype if config.dtype != "auto" else "float32" if config.device == "cpu" else "bfloat16"
    return Job(
        model=model or resolved.shape,
        dims=dims,
        seq_len=config.seq_len,
        rows=config.batch_size,
        micro_batches=config.micro_batches,
        sp_layout=config.sp_layout,
        zero=config.zero,
        ac=config.ac,
        ac_offload=config.ac_offload,
        mlp_tile=config.mlp_tile,
        loss_chunk=config.loss_chunk,
        tp_sequence_parallel=config.tp_sequence_parallel,
        pp_schedule=config.pp_schedule,
        dtype=getattr(torch, dtype),
        balance=bool(facts.num_experts and aux_loss_coefficient(model_config, config.router_aux_loss_coef)),
    )
