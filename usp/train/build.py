"""From a prepared run to an engine with the stages that this rank trains.

on the meta device   empty model -> its stage's layers -> unified SP -> experts -> tensor parallel -> recomputation
then                 stage with the loss -> FSDP2 -> memory -> weights, each rank its own part
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from parallel import ParallelMesh, apply_fsdp, rank_stages, stage_layers, stages_per_rank
from usp.config import TrainConfig
from usp.hf.balance import RouterBalance, aux_loss_coefficient
from usp.hf.expert_parallel import apply_ep, expert_modules
from usp.hf.initialise import fill_buffers, initialise
from usp.hf.integrate import apply_unified_sp, decoder_layers
from usp.hf.models import ModelConfig, empty_model, load_generation_config, materialise
from usp.hf.prune import prune_to_stage
from usp.hf.stage import CausalLMStage
from usp.hf.tensor_parallel import apply_tp
from usp.hf.weights import load_weights
from usp.model.recompute import apply_activation_checkpointing, apply_tiled_mlp
from usp.presets import PRESETS
from usp.sp.sp_attention import UnifiedSPAttention
from usp.train.engines.base import AdamW, Engine
from usp.train.engines.deepspeed import DeepSpeedEngine
from usp.train.engines.fsdp2 import Fsdp2Engine

from .prepare import Prepared


def build_engine(prepared: Prepared, mesh: ParallelMesh) -> Engine:
    """The engine that `prepared` asks for, over this rank's stages with their first weights. Collective.

    Raises ValueError for a model that cannot be divided as asked.
    """
    config, dtype = prepared.config, getattr(torch, prepared.config.dtype)
    optimizer = AdamW(config.weight_decay, (config.adam_beta1, config.adam_beta2), config.adam_eps)
    recipe = StageRecipe.of(config, prepared.model_config)
    stages = build_stages(recipe, mesh)
    for stage in stages:
        if config.engine == "fsdp2":
            shard_stage(stage, mesh, dtype, config.zero)
        materialise(stage, prepared.device)
        if prepared.saved is not None:  # the weights come from the checkpoint
            fill_buffers(stage.model)
            if config.model not in PRESETS:
                folder = Path(config.model).expanduser()
                stage.model.generation_config = load_generation_config(folder) or stage.model.generation_config
        else:
            first_weights(stage, config.model, config.seed)
    if config.engine == "deepspeed":
        return DeepSpeedEngine(stages, mesh, zero=config.zero, optimizer=optimizer, param_dtype=dtype)
    return build_fsdp2_engine(stages, mesh, recipe, optimizer, dtype, config.zero)


def build_fsdp2_engine(
    stages: list[CausalLMStage],
    mesh: ParallelMesh,
    recipe: StageRecipe,
    optimizer: AdamW,
    dtype: torch.dtype,
    zero: int,
) -> Fsdp2Engine:
    """Trains stages of `recipe` that `shard_stage` sharded with the same dtype and ZeRO stage."""
    pipeline = None
    if mesh.size("pp") > 1:
        from usp.train.engines.pipeline_runner import HandedOver, PipelineRunner

        handed = HandedOver(
            recipe.model.hidden_size,
            dtype,
            token_parts=mesh.size("tp") if recipe.tp_sequence_parallel else 1,
            num_experts=recipe.model.num_experts if recipe.balance else 0,
        )
        pipeline = PipelineRunner(stages, mesh, schedule=recipe.schedule, zero=zero, handed=handed)
    return Fsdp2Engine(stages, mesh, zero=zero, optimizer=optimizer, pipeline=pipeline)


@dataclass(frozen=True, eq=False)
class StageRecipe:
    """How the stages of a model are built, beside the degrees of the mesh.

    Attributes:
        ac, ac_offload, mlp_tile, loss_chunk: as train.py's flags of these names.
        balance: the weight of the routers' auxiliary loss, over `micro_batches`.
        weights_dtype: of the parameters; what they are computed in is FSDP2's matter.
    """

    model: ModelConfig
    schedule: str = "1f1b"
    sp_layout: str = "zigzag"
    kernel: str = "auto"
    tp_sequence_parallel: bool = False
    ac: str = "none"
    ac_offload: bool = False
    mlp_tile: int = 0
    loss_chunk: int = 2048
    balance: float = 0.0
    micro_batches: int = 1
    weights_dtype: torch.dtype = torch.float32

    @staticmethod
    def of(config: TrainConfig, model: ModelConfig) -> StageRecipe:
        """That of a training run."""
        return StageRecipe(
            model=model,
            schedule=config.pp_schedule,
            sp_layout=config.sp_layout,
            kernel=config.attention_kernel,
            tp_sequence_parallel=config.tp_sequence_parallel,
            ac=config.ac,
            ac_offload=config.ac_offload,
            mlp_tile=config.mlp_tile,
            loss_chunk=config.loss_chunk,
            balance=aux_loss_coefficient(model, config.router_aux_loss_coef),
            micro_batches=config.micro_batches,
        )


def build_stages(recipe: StageRecipe, mesh: ParallelMesh) -> list[CausalLMStage]:
    """This rank's stages on the meta device, everything applied but the sharding over data-parallel ranks."""
    indices = rank_stages(recipe.schedule, mesh.size("pp"), mesh.rank("pp"))
    return [_build_stage(index, recipe, mesh) for index in indices]


def _build_stage(index: int, recipe: StageRecipe, mesh: ParallelMesh) -> CausalLMStage:
    model = empty_model(recipe.model)
    layers = stage_layers(len(decoder_layers(model)), mesh.size("pp") * stages_per_rank(recipe.schedule))
    first, last = index == 0, index == len(layers) - 1
    prune_to_stage(model, layers[index], first, last)
    for parameter in model.parameters():  # not buffers: rotary frequencies stay float32
        parameter.data = parameter.data.to(recipe.weights_dtype)
    apply_unified_sp(model, mesh, layout=recipe.sp_layout, kernel=recipe.kernel)
    apply_ep(model, mesh)
    apply_tp(model, mesh, recipe.tp_sequence_parallel)
    if recipe.mlp_tile:
        apply_tiled_mlp(decoder_layers(model), recipe.mlp_tile)
    attention = cast(UnifiedSPAttention, model.unified_sp)
    apply_activation_checkpointing(decoder_layers(model), recipe.ac, attention, recipe.ac_offload)
    balance = None
    if recipe.balance:
        balance = RouterBalance(
            model,
            mesh,
            recipe.balance,
            tp_sequence_parallel=recipe.tp_sequence_parallel,
            micro_batches=recipe.micro_batches,
        )
    return CausalLMStage(model, mesh, first=first, last=last, loss_chunk=recipe.loss_chunk, balance=balance)


def shard_stage(stage: CausalLMStage, mesh: ParallelMesh, dtype: torch.dtype, zero: int) -> None:
    """Shard a stage over data-parallel ranks with FSDP2."""
    layers, experts = decoder_layers(stage.model), expert_modules(stage.model)
    apply_fsdp(stage, mesh, layers, param_dtype=dtype, zero=zero, experts=experts)


def first_weights(stage: CausalLMStage, source: str, seed: int, new_head: bool = False) -> None:
    """Fill a stage that has memory: from a model folder, or for a preset with random weights that the seed fixes.

    new_head: draw the scalar head of a folder's causal LM from the seed; see `load_weights`.
    """
    if source in PRESETS:
        initialise(stage.model, seed)
    else:
        load_weights(stage.model, Path(source).expanduser(), seed if new_head else None)
