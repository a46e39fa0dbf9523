"""From a prepared run to an engine with the stages that this rank trains.

on the meta device   empty model -> its stage's layers -> unified SP -> experts -> tensor parallel -> recomputation
then                 stage with the loss -> FSDP2 -> memory -> weights, each rank its own part
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from parallel import ParallelMesh, apply_fsdp, rank_stages, stage_layers, stages_per_rank
from usp.activations import apply_activation_checkpointing, apply_tiled_mlp
from usp.engines.base import AdamW, Engine
from usp.engines.deepspeed import DeepSpeedEngine
from usp.engines.fsdp2 import Fsdp2Engine
from usp.engines.pipeline import HandedOver, PipelineRunner
from usp.hf.balance import RouterBalance, aux_loss_coefficient
from usp.hf.experts import apply_ep, expert_modules
from usp.hf.initialise import fill_buffers, initialise
from usp.hf.integrate import apply_unified_sp, decoder_layers
from usp.hf.models import empty_model, materialise
from usp.hf.pipeline import prune_to_stage
from usp.hf.stage import CausalLMStage
from usp.hf.tensor import apply_tp
from usp.hf.weights import load_weights
from usp.prepare import Prepared
from usp.presets import PRESETS
from usp.sp_attention import UnifiedSPAttention


def build_engine(prepared: Prepared, mesh: ParallelMesh) -> Engine:
    """The engine that `prepared` asks for, over this rank's stages with their first weights. Collective.

    Raises ValueError for a model that cannot be divided as asked.
    """
    config, dtype = prepared.config, getattr(torch, prepared.config.dtype)
    optimizer = AdamW(config.weight_decay, (config.adam_beta1, config.adam_beta2), config.adam_eps)
    stages = [
        build_stage(index, prepared, mesh) for index in rank_stages(config.pp_schedule, config.pp, mesh.rank("pp"))
    ]
    for stage in stages:
        if config.engine == "fsdp2":
            layers, experts = decoder_layers(stage.model), expert_modules(stage.model)
            apply_fsdp(stage, mesh, layers, param_dtype=dtype, zero=config.zero, experts=experts)
        fill_stage(stage, prepared)
    if config.engine == "deepspeed":
        return DeepSpeedEngine(stages, mesh, zero=config.zero, optimizer=optimizer, param_dtype=dtype)
    pipeline = None
    if config.pp > 1:
        handed = HandedOver(
            prepared.model_config.hidden_size,
            dtype,
            token_parts=config.tp if config.tp_sequence_parallel else 1,
            num_experts=prepared.facts.num_experts if stages[0].balance else 0,
        )
        pipeline = PipelineRunner(stages, mesh, schedule=config.pp_schedule, zero=config.zero, handed=handed)
    return Fsdp2Engine(stages, mesh, zero=config.zero, optimizer=optimizer, param_dtype=dtype, pipeline=pipeline)


def build_stage(index: int, prepared: Prepared, mesh: ParallelMesh) -> CausalLMStage:
    """Stage `index` on the meta device, everything applied but the sharding over data-parallel ranks."""
    config = prepared.config
    layers = stage_layers(len(prepared.facts.windows), config.pp * stages_per_rank(config.pp_schedule))
    first, last = index == 0, index == len(layers) - 1
    model = empty_model(prepared.model_config)
    prune_to_stage(model, layers[index], first, last)
    apply_unified_sp(model, mesh, layout=config.sp_layout, kernel=config.attention_kernel)
    apply_ep(model, mesh)
    apply_tp(model, mesh, config.tp_sequence_parallel)
    if config.mlp_tile:
        apply_tiled_mlp(decoder_layers(model), config.mlp_tile)
    attention = cast(UnifiedSPAttention, model.unified_sp)
    apply_activation_checkpointing(decoder_layers(model), config.ac, attention, config.ac_offload)
    coefficient = aux_loss_coefficient(prepared.model_config, config.router_aux_loss_coef)
    balance = None
    if coefficient:
        balance = RouterBalance(
            model,
            mesh,
            coefficient,
            tp_sequence_parallel=config.tp_sequence_parallel,
            micro_batches=config.micro_batches,
        )
    return CausalLMStage(model, mesh, first=first, last=last, loss_chunk=config.loss_chunk, balance=balance)


def fill_stage(stage: CausalLMStage, prepared: Prepared) -> None:
    """Give the stage memory and its first weights: a model folder's, or random ones that the seed fixes.

    A run that continues reads its weights later, from its checkpoint.
    """
    materialise(stage, prepared.device)
    if prepared.saved is not None:
        fill_buffers(stage.model)
    elif prepared.config.model in PRESETS:
        initialise(stage.model, prepared.config.seed)
    else:
        load_weights(stage.model, Path(prepared.config.model).expanduser())
