"""Build the engine that trains a model on a mesh.

on the meta device   empty model -> its stage's layers -> unified SP -> experts -> float8 -> tensor parallel
                     -> adapters -> compilation -> recomputation
then                 stage with the loss -> FSDP2 -> memory -> weights, each rank its own part
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.fsdp import FSDPModule

from usp.attention import layout_name
from usp.config import CommonConfig, TrainConfig
from usp.fields import shared_values
from usp.hf import models
from usp.hf.compressors import compressors
from usp.hf.expert_parallel import RouterBalance, apply_ep
from usp.hf.experts import expert_modules
from usp.hf.float8 import apply_float8
from usp.hf.images import encoder_blocks, encoder_parts
from usp.hf.indexers import indexers, train_indexers
from usp.hf.integrate import apply_unified_sp, decoder_layers
from usp.hf.lora import Lora, apply_lora, initialise_adapters
from usp.hf.mixers import sharded_mixers
from usp.hf.probe import structure
from usp.hf.prune import prune_to_stage
from usp.hf.routers import RouterBias, replay_choices
from usp.hf.stage import CausalLMStage, logit_transform
from usp.hf.tensor_parallel import apply_tp
from usp.hf.weights import fill_buffers, initialise, load_weights
from usp.losses import UNCHANGED
from usp.model.recompute import apply_activation_checkpointing, apply_tiled_mlp, compile_layers
from usp.optimizers import OPTIMIZERS, AdamW
from usp.parallel import (
    ParallelMesh,
    PipelineSchedule,
    ProcessGroups,
    Reallocation,
    apply_fsdp,
    gather_layout,
    local_tensor,
    plan_realloc,
    rank_stages,
    stage_layers,
)
from usp.parallel.groups import gather_objects
from usp.parallel.reallocation.realloc_plan import BUCKET_BYTES
from usp.parallel.stages import ONE_STAGE
from usp.presets import PRESETS
from usp.sp.in_order import SequenceOrder
from usp.sp.sp_attention import UnifiedSPAttention

from .engine import Engine
from .passes import PipelineRunner
from .resolve import lora_of


@dataclass(frozen=True, eq=False)
class EngineRecipe:
    """How the stages of a model and their engine are built, apart from the degrees of the mesh.

    dtype: of forward and backward.
    sp_layout: from `usp.attention.layout_name`.
    zero: ZeRO stage; None leaves the stages unsharded.
    optimizer: None for a model that is not trained.
    balance: weight of the routers' load-balancing loss: of the step, or the mean over `micro_batches`.
    weights_dtype: of the parameters. Adapters that are trained are float32.
    lora: the adapters that are trained instead of these parameters.
    compile: torch.compile's backend for the layers; empty for eager layers.
    fp8_emulate: multiply in float32 what was cast to float8.

    router_replay: layers take the experts that tokens choose.

    The others are TrainConfig's fields of these names (kernel: attention_kernel).
    """

    model: models.ModelConfig
    dtype: torch.dtype
    zero: int | None
    optimizer: AdamW | None
    pipeline: PipelineSchedule = ONE_STAGE
    sp_layout: str = "zigzag"
    kernel: str = "auto"
    tp_sequence_parallel: bool = False
    ep_chunks: int = 0
    ac: str = "none"
    ac_offload: bool = False
    optim_offload: bool = False
    mlp_tile: int = 0
    loss_chunk: int = 2048
    balance: float = 0.0
    router_balance: str = "step"
    micro_batches: int = 1
    weights_dtype: torch.dtype = torch.float32
    lora: Lora | None = None
    compile: str = ""
    async_tp: bool = False
    fp8: str = "none"
    fp8_emulate: bool = False
    indexer_loss_coef: float = 0.0
    indexer_warmup: bool = False
    router_bias_update_rate: float = 0.0
    router_replay: bool = False
    freeze_encoder: bool = False

    @staticmethod
    def of(config: TrainConfig, model: models.ModelConfig) -> EngineRecipe:
        """Return the recipe of a training run; `config` is resolved, and has no `auto` left."""
        lora, dtype, facts = lora_of(config, model), getattr(torch, config.dtype), models.model_facts("", model)
        different: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "sp_layout": layout_name(config.sp_layout, facts.windows),
            "optimizer": OPTIMIZERS[config.optimizer].rule(config),
            "kernel": config.attention_kernel,
            "balance": facts.balance(config.router_aux_loss_coef),
            "weights_dtype": dtype if lora else torch.float32,  # frozen weights need no float32 copy
            "lora": lora,
            "compile": "inductor" if config.compile else "",
            "fp8_emulate": config.emulates_float8,
        }
        return EngineRecipe(**shared_values(config, EngineRecipe) | different)


def build_engine(
    recipe: EngineRecipe, mesh: ParallelMesh, device: torch.device, fill: Callable[[CausalLMStage], None]
) -> Engine:
    """Build this rank's stages, give them memory on `device` and values with `fill`, and the engine over them.

    Collective. See `first_weights` and `resumed_weights` for `fill`. Raises ValueError for a model that cannot be
    divided as asked.
    """
    stages = build_stages(recipe, mesh)
    for stage in stages:
        models.materialise(stage, device, parameters=torch.device("cpu") if recipe.optim_offload else device)
        fill(stage)
    return engine_over(stages, recipe, mesh)


def build_stages(recipe: EngineRecipe, mesh: ParallelMesh) -> list[CausalLMStage]:
    """Build this rank's stages on the meta device, sharded. Raises as `build_engine`."""
    stages = [_build_stage(i, recipe, mesh) for i in rank_stages(recipe.pipeline, mesh.size("pp"), mesh.rank("pp"))]
    if recipe.zero is not None:
        for stage in stages:
            layers = [*encoder_blocks(stage.model), *decoder_layers(stage.model)]
            experts = expert_modules(stage.model)
            apply_fsdp(
                stage,
                mesh,
                layers,
                param_dtype=recipe.dtype,
                zero=recipe.zero,
                experts=experts,
                offload=recipe.optim_offload,
            )
    return stages


def engine_over(stages: Sequence[CausalLMStage], recipe: EngineRecipe, mesh: ParallelMesh) -> Engine:
    """Return the engine that trains stages from `build_stages`, which have memory."""
    assert recipe.optimizer is not None and recipe.zero is not None
    pipeline = None
    if mesh.size("pp") > 1:
        pipeline = PipelineRunner(
            stages,
            mesh,
            recipe.pipeline,
            recipe.zero,
            recipe.model.hidden_size,
            recipe.dtype,
            token_parts=mesh.size("tp") if recipe.tp_sequence_parallel else 1,
            num_experts=models.model_facts("", recipe.model).num_experts if recipe.balance else 0,
        )
    gather = recipe.fp8 == "tensor"
    return Engine(stages, mesh, zero=recipe.zero, optimizer=recipe.optimizer, pipeline=pipeline, float8_gather=gather)


def moved_engine(
    engine: Engine,
    recipe: EngineRecipe,
    mesh: ParallelMesh,
    device: torch.device,
    fill: Callable[[CausalLMStage], None],
    groups: ProcessGroups,
    ranks_per_host: int,
) -> Engine:
    """Build an engine for another layout with the weights and optimizer states of `engine`, which it uses up.

    Where every rank holds the same parts as before, as with other degrees of dp_shard, ring and ulysses of the same
    product, it keeps them, and nothing is sent. Elsewhere it has both engines for a moment, and ranks send each other
    what they lack (`usp.parallel.plan_realloc`).

    fill: as of `build_engine`, for what `Engine.state` does not hold.

    Collective, and raises as `build_engine`; OutOfMemoryError on every rank if one has no memory for the new engine:
    `engine` is as it was then.
    """
    for module in (module for stage in engine.stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves parameters unsharded
    stages, failure = build_stages(recipe, mesh), ""
    before, after = ({n: p for each in of for n, p in each.model.named_parameters()} for of in (engine.stages, stages))
    stays = gather_layout(before) == gather_layout(after)
    held, wanted = dict[str, Tensor](), dict[str, Tensor]()
    try:
        for stage in stages:
            models.materialise(stage, device)
            if not stays:
                fill(stage)
        moved = engine_over(stages, recipe, mesh)
        if not stays:
            held, wanted = engine.state(), moved.state()
    except torch.OutOfMemoryError as error:
        failure = str(error)
    if failures := list(filter(None, gather_objects(failure))):
        raise torch.OutOfMemoryError(failures[0])
    if stays:
        for stage, old in zip(stages, engine.stages, strict=True):
            values = {**dict(old.named_parameters()), **dict(old.named_buffers())}
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
                local_tensor(tensor.detach()).copy_(local_tensor(values[name].detach()))
        moved.take_over(engine)
    else:
        limits: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "ranks_per_host": ranks_per_host}
        plan = plan_realloc(gather_layout(held), gather_layout(wanted), **limits)
        Reallocation(plan, groups, device).run(held, wanted)
    moved.restore()
    for stage in stages:
        stage.model.generation_config = engine.stages[0].model.generation_config
    return moved


def first_weights(stage: CausalLMStage, source: str, seed: int, new_head: bool = False) -> None:
    """Fill a stage from a model folder, or for a preset with random weights; the seed determines these, and adapters.

    new_head: draw the scalar head of a folder's causal LM from the seed; see `load_weights`.
    """
    if source in PRESETS:
        initialise(stage.model, seed)
    else:
        load_weights(stage.model, Path(source).expanduser(), seed if new_head else None)
    initialise_adapters(stage.model, seed)


def resumed_weights(stage: CausalLMStage, source: str) -> None:
    """Fill what no checkpoint holds of a stage: buffers, and how a folder's model generates."""
    fill_buffers(stage.model)
    if source not in PRESETS:
        generation_config = models.load_generation_config(Path(source).expanduser())
        stage.model.generation_config = generation_config or stage.model.generation_config


def export_dtype(config: CommonConfig, computed: torch.dtype) -> torch.dtype:
    """Return the dtype of the weights that a run which computes in `computed` exports."""
    return computed if config.export_dtype == "auto" else getattr(torch, config.export_dtype)


def _build_stage(index: int, recipe: EngineRecipe, mesh: ParallelMesh) -> CausalLMStage:
    model = models.empty_model(recipe.model)
    transform = UNCHANGED if models.is_scalar(recipe.model) else logit_transform(model)
    layers = stage_layers(len(decoder_layers(model)), mesh.size("pp") * recipe.pipeline.stages_per_rank)
    first, last = index == 0, index == len(layers) - 1
    prune_to_stage(model, layers[index], first, last, structure(type(model), model.config).layer_outputs)
    saved = recipe.lora.saved if recipe.lora else None
    for name, parameter in model.named_parameters():  # not buffers: rotary frequencies stay float32
        if not (saved and saved.has(name)):
            parameter.data = parameter.data.to(recipe.weights_dtype)
    apply_unified_sp(model, mesh, layout=recipe.sp_layout, kernel=recipe.kernel)
    if recipe.indexer_loss_coef:
        coefficient = recipe.indexer_loss_coef / (recipe.micro_batches * mesh.size("batch"))
        train_indexers(model, coefficient, recipe.indexer_warmup)
    apply_ep(model, mesh, recipe.tp_sequence_parallel, recipe.ep_chunks)
    if recipe.fp8 != "none":
        apply_float8(model, recipe.fp8, recipe.fp8_emulate, mesh.size("tp"))
    apply_tp(model, mesh, recipe.tp_sequence_parallel, trained=recipe.optimizer is not None)
    for encoder in encoder_parts(model) if recipe.freeze_encoder else ():
        encoder.requires_grad_(False)
    if recipe.lora is not None:
        adapters_dtype = recipe.weights_dtype if recipe.optimizer is None else torch.float32
        apply_lora(model, recipe.lora, mesh, recipe.tp_sequence_parallel, adapters_dtype)
    if recipe.mlp_tile:
        apply_tiled_mlp(decoder_layers(model), recipe.mlp_tile, recipe.compile)
    if recipe.compile:
        options: dict[str, Any] | None = None
        if recipe.async_tp:
            # Deprecated, but inductor's pass leaves groups alone that this was not called for.
            enable_symm_mem_for_group(mesh.group("tp").group_name)
            options = {"_micro_pipeline_tp": True}
        eager = _eager_modules(model, recipe)
        compile_layers(decoder_layers(model), recipe.compile, eager, recipe.ac != "none", options)
    if recipe.router_replay:
        replay_choices(model, mesh, recipe.tp_sequence_parallel)
    attention = cast(UnifiedSPAttention, model.unified_sp)
    order = cast("SequenceOrder | None", getattr(model, "unified_sp_order", None))
    apply_activation_checkpointing(decoder_layers(model), recipe.ac, attention, recipe.ac_offload, order)
    balance = None
    if recipe.balance:
        separate = recipe.router_balance == "micro-batch"
        coefficient = recipe.balance / (recipe.micro_batches if separate else 1)
        shared = recipe.tp_sequence_parallel
        balance = RouterBalance(model, mesh, coefficient, tp_sequence_parallel=shared, by_micro_batch=separate)
    bias = None
    if recipe.router_bias_update_rate:
        bias = RouterBias(model, mesh, recipe.router_bias_update_rate, tp_sequence_parallel=recipe.tp_sequence_parallel)
    return CausalLMStage(
        model,
        mesh,
        first=first,
        last=last,
        loss_chunk=recipe.loss_chunk,
        balance=balance,
        router_bias=bias,
        transform=transform,
        compile=recipe.compile,
    )


def _eager_modules(model: nn.Module, recipe: EngineRecipe) -> Iterator[nn.Module]:
    experts, mixers = set(expert_modules(model)), sharded_mixers(model)
    sparse = bool(indexers(model) or compressors(model))
    for name, module in model.named_modules():
        # The block around experts holds their router too, whose hooks collect statistics.
        if (
            name in mixers
            or (sparse and hasattr(module, "unified_sp_mask"))
            or experts.intersection(module.children())
            or (recipe.mlp_tile and name.endswith(".mlp"))
        ):
            yield module
