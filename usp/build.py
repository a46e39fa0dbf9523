"""From a prepared run to an engine with the stages that this rank trains.

    on the meta device   empty model -> its stage's layers -> unified SP -> experts -> tensor parallel -> recomputation
    then                 stage with the loss -> FSDP2 -> memory -> weights, each rank its own part
"""

from __future__ import annotations

from pathlib import Path

import torch

from parallel import ParallelMesh, apply_fsdp
from usp.activations import apply_activation_checkpointing, apply_tiled_mlp
from usp.engines.base import Engine
from usp.engines.fsdp2 import Fsdp2Engine
from usp.hf.experts import apply_ep, expert_modules
from usp.hf.integrate import apply_unified_sp, decoder_layers
from usp.hf.models import empty_model
from usp.hf.stage import CausalLMStage
from usp.hf.tensor import apply_tp
from usp.hf.weights import initialise, load_weights
from usp.prepare import Prepared
from usp.presets import PRESETS


def build_engine(prepared: Prepared, mesh: ParallelMesh) -> Engine:
    """The engine that `prepared` asks for, over this rank's stages with their first weights. Collective.

    Raises ValueError for a model that cannot be divided as asked.
    """
    config = prepared.config
    stages = [build_stage(prepared, mesh)]
    for stage in stages:
        shard_stage(stage, prepared, mesh)
        fill_stage(stage, prepared)
    return Fsdp2Engine(
        stages, mesh, zero=config.zero, learning_rate=config.learning_rate, weight_decay=config.weight_decay
    )


def build_stage(prepared: Prepared, mesh: ParallelMesh) -> CausalLMStage:
    """A stage on the meta device, everything applied but the sharding over data-parallel ranks."""
    config = prepared.config
    model = empty_model(prepared.model_config)
    apply_unified_sp(model, mesh, layout=config.sp_layout, kernel=config.attention_kernel)
    apply_ep(model, mesh)
    apply_tp(model, mesh, config.tp_sequence_parallel)
    layers = decoder_layers(model)
    if config.mlp_tile:
        apply_tiled_mlp(layers, config.mlp_tile)
    apply_activation_checkpointing(layers, config.ac, model.unified_sp, config.ac_offload)
    return CausalLMStage(model, mesh, loss_chunk=config.loss_chunk)
