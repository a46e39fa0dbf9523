"""From a prepared run to an engine with the stages that this rank trains.

on the meta device   empty model -> its stage's layers -> unified SP -> experts -> tensor parallel -> recomputation
then                 stage with the loss -> FSDP2 -> memory -> weights, each rank its own part
"""

from __future__ import annotations

from pathlib import Path

import torch

from parallel import ParallelMesh, apply_fsdp
from usp.engines.base import Engine
from usp.engines.deepspeed import DeepSpeedEngine
from usp.engines.fsdp2 import Fsdp2Engine
from usp.hf.balance import RouterBalance, aux_loss_coefficient
from usp.hf.experts import apply_ep, expert_modules
from usp.hf.initialise import initialise
from usp.hf.integrate import apply_unified_sp, decoder_layers
from usp.hf.models import empty_model, materialise
from usp.hf.stage import CausalLMStage
from usp.hf.tensor import apply_tp
from usp.hf.weights import load_weights
from usp.prepare import Prepared
from usp.presets import PRESETS


def build_engine(prepared: Prepared, mesh: ParallelMesh) -> Engine:
    """The engine that `prepared` asks for, over this rank's stages with their first weights. Collective.

    Raises ValueError for a model that cannot be divided as asked.
    """
    config, dtype = prepared.config, getattr(torch, prepared.config.dtype)
    stages = [build_stage(prepared, mesh)]
    for stage in stages:
        if config.engine == "fsdp2":
            apply_fsdp(
                stage,
                mesh,
                decoder_layers(stage.model),
                param_dtype=dtype,
                zero=config.zero,
                experts=expert_modules(stage.model),
            )
        fill_stage(stage, prepared)
    kind = Fsdp2Engine if config.engine == "fsdp2" else DeepSpeedEngine
    return kind(
        stages,
        mesh,
        zero=config.zero,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        param_dtype=dtype,
    )


def build_stage(prepared: Prepared, mesh: ParallelMesh) -> CausalLMStage:
    """A stage on the meta device, everything applied but the sharding over data-parallel ranks."""
    config = prepared.config
    model = empty_model(prepared.model_config)
    apply_unified_sp(model, mesh, layout=config.sp_layout, kernel=config.attention_kernel)
    apply_ep(model, mesh)
    apply_tp(model, mesh, config.tp_sequence_parallel)
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
    return CausalLMStage(model, mesh, loss_chunk=config.loss_chunk, balance=balance)


def fill_stage(stage: CausalLMStage, prepared: Prepared) -> None:
    """Give the stage memory and its first weights: a checkpoint folder's, or random ones that the seed fixes."""
    materialise(stage, prepared.device)
    if prepared.config.model in PRESETS:
        initialise(stage.model, prepared.config.seed)
    else:
        load_weights(stage.model, Path(prepared.config.model).expanduser())
