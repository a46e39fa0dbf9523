"""A training step without devices: one rank of any world, in one process, by running the step itself.

The real stages, FSDP2, attention, schedules and optimiser run on tensors that have shapes and no memory
(`FakeTensorMode`), in a process group that moves nothing, and everything that passes torch's dispatcher is counted.
Nothing is modelled: what the step would do differently tomorrow, the dry run does too.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import AttentionSpec
from parallel import ParallelMesh, local_tensor
from parallel.wire import SentBytes
from usp.config import TrainConfig
from usp.hf.models import ModelConfig, load_model_config, materialise, model_facts
from usp.hf.stage import CausalLMStage
from usp.losses.cross_entropy import global_token_count
from usp.losses.output_heads import NextTokenLoss
from usp.run.failures import ConfigurationError, listed
from usp.sp.batch import shard_batch, split_rows
from usp.train.build import StageRecipe, build_fsdp2_engine, build_stages, shard_stage
from usp.train.engines.base import AdamW
from usp.train.engines.fsdp2 import Fsdp2Engine
from usp.train.validate import parallel_dims, settle_batch, violations

from .fake_world import HostMemory, fake_world, kernel_for, stand_ins
from .live_memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, LiveMemory
from .step_meter import StepMeter


@dataclass(frozen=True)
class GroupSent:
    """What one collective sent over one process group in the step.

    Attributes:
        axes: of the mesh, all that this group is along.
        ranks: of the group, global.
        collective: as c10d calls it; see `parallel.wire`.
        nbytes: payload bytes that left the rank.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    collective: str
    nbytes: int
    calls: int


@dataclass(frozen=True)
class DryRun:
    """One optimiser step of one rank, not its first.

    Attributes:
        config: without any `auto` or -1.
        peak_bytes: of all tensor storage on the device; start_bytes: before the step, parameters and optimiser.
        by_category: what the peak consists of.
        host_bytes: the most that `--ac-offload` kept in the host's memory.
        flops: of matrix products and attention, as called; attention_flops: the part of attention.
        kernel: the attention kernel's choice, in words.
        seconds, process_bytes: what the dry run itself took; the most memory this process has ever had.
    """

    config: TrainConfig
    world_size: int
    rank: int
    sent: tuple[GroupSent, ...]
    peak_bytes: int
    start_bytes: int
    by_category: Mapping[str, int]
    host_bytes: int
    flops: int
    attention_flops: int
    kernel: str
    seconds: float
    process_bytes: int

    @property
    def collectives(self) -> int:
        """How many collectives and messages the rank took part in, those in groups of one rank left out."""
        return sum(sent.calls for sent in self.sent)


def dry_run(config: TrainConfig, world_size: int, rank: int = 0) -> DryRun:
    """One step of `config` on rank `rank` of `world_size`, as in the middle of a run.

    Sequences are one document each, routers choose experts evenly, and gradients are clipped. `--device auto` is a
    GPU's step: attention's kernel, the optimiser's way and what is offloaded are those of CUDA, the rest of the code is
    the same on both. What operators take while they run, streams hold back and allocators add is not seen.

    Raises:
        ConfigurationError: for everything that train.py would refuse before it looks at data or machine, for DeepSpeed,
            and for a rank that the world does not have.
        RuntimeError: in a process that has a default process group.
    """
    started = time.perf_counter()
    config, model_config, kernel = _checked(config, world_size, rank)
    device, host, meter = torch.device(config.device), HostMemory(), StepMeter()
    with fake_world(world_size, rank), stand_ins(device, host, pipeline=config.pp > 1):
        mesh = ParallelMesh.create(parallel_dims(config, config.ep))
        recipe = StageRecipe.of(config, model_config)
        stages = _stages(recipe, mesh, config)  # on the meta device, and quicker so
        with FakeTensorMode(allow_non_fake_inputs=True), meter, meter.memory.following_resizes():
            engine = _engine(stages, mesh, recipe, config)
            _label_state(engine, meter.memory)
            start_bytes = meter.memory.current_bytes
            meter.memory.restart()
            _step(engine, mesh, config, meter.memory)
            del engine, stages
        sent = _by_axis(meter.wire, mesh)
    return DryRun(
        config=config,
        world_size=world_size,
        rank=rank,
        sent=sent,
        peak_bytes=meter.memory.peak_bytes,
        start_bytes=start_bytes,
        by_category=meter.memory.at_peak,
        host_bytes=host.peak_bytes,
        flops=meter.matmul_flops + meter.attention_flops,
        attention_flops=meter.attention_flops,
        kernel=kernel,
        seconds=time.perf_counter() - started,
        process_bytes=_process_bytes(),
    )


def _checked(config: TrainConfig, world_size: int, rank: int) -> tuple[TrainConfig, ModelConfig, str]:
    """The configuration without `auto`, its model's, and the choice of the attention kernel; ConfigurationError."""
    problems: list[str] = []
    if world_size < 1:
        raise ConfigurationError(f"--world-size = {world_size} must be at least 1")
    config = settle_batch(config, world_size)
    if not 0 <= rank < world_size:
        problems.append(f"--rank = {rank} must be one of the {world_size} ranks: 0 to {world_size - 1}")
    if config.engine == "deepspeed":
        problems.append("--engine deepspeed has no dry run: use --engine fsdp2")
    try:
        model_config = load_model_config(config.model)
    except ValueError as error:
        raise ConfigurationError(listed([*problems, str(error), *violations(config, world_size, None)])) from error
    facts = model_facts(config.model, model_config)
    problems += violations(config, world_size, facts)
    if problems:
        raise ConfigurationError(listed(problems))
    device = "cpu" if config.device == "cpu" else "cuda"
    name = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    dtype = getattr(torch, name)
    try:
        _, kernel = kernel_for(torch.device(device), config.attention_kernel, AttentionSpec(), dtype, facts.head_dim)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    dims = parallel_dims(config, config.ep).resolve(world_size)
    return replace(config, device=device, dtype=name, dp_shard=dims.dp_shard), model_config, kernel


def _stages(recipe: StageRecipe, mesh: ParallelMesh, config: TrainConfig) -> list[CausalLMStage]:
    try:
        stages = build_stages(recipe, mesh)
        for stage in stages:
            shard_stage(stage, mesh, getattr(torch, config.dtype), config.zero)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return stages


def _engine(stages: list[CausalLMStage], mesh: ParallelMesh, recipe: StageRecipe, config: TrainConfig) -> Fsdp2Engine:
    """With memory, and with the optimiser's states, which a run has from its first step on."""
    for stage in stages:
        materialise(stage, torch.device("cpu"))
    optimizer = AdamW(config.weight_decay, (config.adam_beta1, config.adam_beta2), config.adam_eps)
    engine = build_fsdp2_engine(stages, mesh, recipe, optimizer, getattr(torch, config.dtype), config.zero)
    for group in engine.optimizer.param_groups:
        group["foreach"] = config.device == "cuda"  # as torch does by default
    engine.state()
    return engine


def _step(engine: Fsdp2Engine, mesh: ParallelMesh, config: TrainConfig, memory: LiveMemory) -> None:
    """What `Trainer.step` does between the data and the record."""
    begin, forwards = memory.now, []
    for stage in engine.stages:
        stage.register_forward_pre_hook(lambda *_: forwards.append(memory.now))
        # What a forward made and did not let go, its backward needs.
        stage.register_forward_hook(lambda *_: memory.label_since(forwards.pop(), ACTIVATIONS))
    local = blank_batch(config, mesh)
    memory.label_since(begin, ACTIVATIONS)
    tokens = int(global_token_count(local["shift_labels"], mesh))
    engine.forward_backward(split_rows(local, config.micro_batches), NextTokenLoss(tokens))
    memory.label((local_tensor(p.grad) for p in engine.parameters.values() if p.grad is not None), GRADIENTS)
    engine.step(config.learning_rate, config.max_grad_norm)


def blank_batch(config: TrainConfig, mesh: ParallelMesh) -> dict[str, Tensor]:
    """This rank's part of sequences of nothing but token 0, one document each."""
    ids = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
    borders = torch.tensor([[0, config.seq_len]] * config.batch_size, dtype=torch.int32)
    return shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": borders}, mesh, layout=config.sp_layout)


def _label_state(engine: Fsdp2Engine, memory: LiveMemory) -> None:
    memory.label((local_tensor(x) for name, x in engine.state().items() if name.startswith("optimizer.")), OPTIMIZER)
    for stage in engine.stages:
        memory.label((local_tensor(x) for x in (*stage.parameters(), *stage.buffers())), PARAMETERS)


def _by_axis(wire: SentBytes, mesh: ParallelMesh) -> tuple[GroupSent, ...]:
    """What was counted, with the axes that each group is along; the most bytes first."""
    axes: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for view in mesh.views for name in view.mesh_dim_names or ()):
        axes.setdefault(tuple(dist.get_process_group_ranks(mesh.group(name))), []).append(name)
    found = [
        GroupSent(tuple(axes[ranks]), ranks, collective, nbytes, wire.calls[ranks, collective])
        for (ranks, collective), nbytes in wire.by_group.items()
    ]
    return tuple(sorted(found, key=lambda sent: (-sent.nbytes, sent.collective, sent.ranks)))


def _process_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
