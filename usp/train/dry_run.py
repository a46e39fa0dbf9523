"""A training step without devices: one rank of any world, in one process, by running the step itself.

The real stages, FSDP2, attention, schedules and optimizer run on tensors with shapes but no memory (`FakeTensorMode`),
in a process group that transfers nothing, and everything that passes torch's dispatcher is counted. Nothing is
modelled: the dry run calls the same training step as the trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Group
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from usp.attention import AttentionSpec
from usp.config import TrainConfig
from usp.hf.experts import expert_tables
from usp.hf.models import ModelConfig, materialise
from usp.hf.stage import CausalLMStage
from usp.parallel import ParallelMesh, local_tensor
from usp.parallel.wire import SentBytes
from usp.predict.fake_world import HostMemory, fake_world, kernel_for, stand_ins
from usp.predict.job import ONE_DOCUMENT, Data
from usp.predict.meter import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, LiveMemory, StepMeter, Work
from usp.run.failures import ConfigurationError
from usp.run.launch import computation_dtype
from usp.run.metrics import count, peak_memory
from usp.run.tables import GIB, Grid
from usp.sp.sequence import shard_batch

from .build import EngineRecipe, build_stages, engine_over
from .engine import Engine
from .resolve import resolve
from .step import backward
from .validate import parallel_dims


@dataclass(frozen=True)
class GroupSent:
    """The bytes that one collective sent over one process group in the step."""

    axes: tuple[str, ...]  # all mesh axes that this group spans
    ranks: tuple[int, ...]  # of the group, global
    collective: str  # the c10d name: see `usp.parallel.wire`
    nbytes: int  # payload bytes that left the rank
    calls: int


@dataclass(frozen=True)
class DryRun:
    """One optimizer step of one rank, after the first."""

    config: TrainConfig  # without any `auto` or -1
    world_size: int
    rank: int
    sent: tuple[GroupSent, ...]
    peak_bytes: int  # of all tensor storage on the device
    start_bytes: int  # before the step: parameters and optimizer state
    by_category: Mapping[str, int]  # the parts of the peak
    host_bytes: int  # peak host memory of `--ac-offload` and `--optim-offload`
    offloaded_bytes: int  # that `--ac-offload` copies
    work: Work  # operators of forward and backward, recomputation included
    update: Work  # operators of the optimizer
    kernel: str  # the attention kernel, and those refused before it
    counted_as: str  # the --ac mode of the layers that were run
    seconds: float  # wall clock of the dry run
    process_bytes: int  # the peak memory of this process

    @property
    def flops(self) -> int:
        """FLOPs of matrix products and attention."""
        return self.work.flops + self.update.flops

    @property
    def attention_flops(self) -> int:
        return self.work.attention_flops

    @property
    def collectives(self) -> int:
        """Collectives and messages that the rank took part in, without those of groups of one rank."""
        return sum(sent.calls for sent in self.sent)


def dry_run(config: TrainConfig, world_size: int, rank: int = 0, data: Data = ONE_DOCUMENT) -> DryRun:
    """Run one step of `config` on rank `rank` of `world_size`, as in the middle of a run.

    Of a curriculum, it is a step of the stage with most tokens on a rank. Sequences have the documents of `data`,
    routers choose experts evenly, and gradients are clipped. `--device auto` is a GPU's step: attention kernel,
    optimizer implementation and offload are those of CUDA; the other code is the same on both. Workspaces of operators,
    memory held by streams and allocator overhead are not seen. Compiled layers run eagerly: dense ones without
    recomputation as with `--ac selective`, which saves as much; the others save no less than compiled ones.

    Raise ConfigurationError for configurations that train.py refuses without looking at data or machine, and
    for a rank outside of the world; RuntimeError in a process that has a default process group.
    """
    started = time.perf_counter()
    config, model_config, kernel, counted_as = _checked(config, world_size, rank)
    device, host = torch.device(config.device), HostMemory()
    meter = StepMeter(host)
    with fake_world(world_size, rank), stand_ins(device, host):
        mesh = ParallelMesh.create(parallel_dims(config))
        recipe = replace(EngineRecipe.of(config, model_config), compile="", ac=counted_as)
        if config.compile and recipe.dtype.itemsize < 4 and mesh.dims.tp == 1:
            # A compiled loss has a chunk's logits and their gradient in bfloat16, an eager one float32 logits as well.
            recipe = replace(recipe, loss_chunk=max(1, config.loss_chunk * 2 // 3))
        try:
            stages = build_stages(recipe, mesh)  # outside of FakeTensorMode, which would only slow it down
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        with counted(meter):
            for stage in stages:
                materialise(stage, torch.device("cpu"))
            engine = engine_over(stages, recipe, mesh)
            label_state(engine.stages, engine, meter.memory)
            if config.optim_offload:
                offload_state(engine, meter.memory)
            start_bytes = meter.memory.current_bytes
            meter.restart()
            begin = meter.memory.now
            follow_step(engine.stages, engine, meter)
            batch = blank_batch(replace(config, sp_layout=recipe.sp_layout), mesh, data)
            meter.memory.label_since(begin, ACTIVATIONS)
            backward(engine, mesh, batch, config)
            engine.step(config.learning_rate, config.max_grad_norm)
            del engine, stages
        sent = sent_by_axis(meter.wire, mesh)
    return DryRun(
        config=config,
        world_size=world_size,
        rank=rank,
        sent=sent,
        peak_bytes=meter.memory.peak_bytes,
        start_bytes=start_bytes,
        by_category=meter.memory.at_peak,
        host_bytes=host.peak_bytes,
        offloaded_bytes=host.copied_bytes,
        work=meter.work,
        update=meter.update,
        kernel=kernel,
        counted_as=counted_as,
        seconds=time.perf_counter() - started,
        process_bytes=peak_memory(torch.device("cpu")),
    )


@contextmanager
def counted(meter: StepMeter) -> Iterator[None]:
    """Run operators on fake tensors, and count them."""
    with FakeTensorMode(allow_non_fake_inputs=True), meter, meter.memory.following_resizes(), meter.abridging_tiles():
        yield


def _checked(config: TrainConfig, world_size: int, rank: int) -> tuple[TrainConfig, ModelConfig, str, str]:
    """Return the configuration without `auto`, its model's, the attention kernel, and the --ac mode by which layers are
    counted; raise as `dry_run`."""
    if world_size < 1:
        raise ConfigurationError(f"--world-size = {world_size} must be at least 1")
    problems = []
    if not 0 <= rank < world_size:
        problems.append(f"--rank = {rank} must be one of the {world_size} ranks: 0 to {world_size - 1}")
    if config.fp8 == "mx" and not config.emulates_float8:
        problems.append("--fp8 mx has no dry run, since torchao's kernels exist only on their GPUs: give --fp8-emulate")
    resolved = resolve(config, world_size, weights=False)
    _, model_config, facts, _ = resolved.valid(problems)
    config, dims = resolved.largest.config, resolved.largest.dims
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    dtype = computation_dtype(config.dtype, device)
    try:
        _, kernel = kernel_for(config.attention_kernel, AttentionSpec(), device, dtype, facts.head_dim, facts.value_dim)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    config = replace(config, device=device.type, dtype=str(dtype).removeprefix("torch."), dp_shard=dims.dp_shard)
    lean = config.compile and (config.ac, config.fp8, config.mlp_tile, facts.num_experts) == ("none", "none", 0, 0)
    return config, model_config, kernel, "selective" if lean and not facts.formula_violation else config.ac


def follow_step(stages: Sequence[CausalLMStage], engine: Engine | None, meter: StepMeter) -> None:
    """Label what the stages' forwards allocate for their backwards, and the gradients before the optimizer's step; know
    the experts that routers look up."""
    memory = meter.memory
    forwards: list[int] = []
    for stage in stages:
        for table, experts in expert_tables(stage):
            meter.known.tables[table] = experts
        stage.register_forward_pre_hook(lambda *_: forwards.append(memory.now))
        # What a forward allocates and does not free, its backward needs.
        stage.register_forward_hook(lambda *_: memory.label_since(forwards.pop(), ACTIVATIONS))
    if engine is None:
        return
    step, parameters = engine.step, engine.parameters.values()

    def labelled(learning_rate: float, max_norm: float) -> float:
        memory.label((local_tensor(p.grad) for p in parameters if p.grad is not None), GRADIENTS)
        meter.counting = meter.update
        return step(learning_rate, max_norm)

    engine.step = labelled  # type: ignore[method-assign]


def blank_batch(config: TrainConfig, mesh: ParallelMesh, data: Data = ONE_DOCUMENT) -> dict[str, Tensor]:
    """Return this rank's part of sequences of token 0."""
    ids = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
    boundaries = torch.tensor([data.boundaries(config.seq_len)] * config.batch_size, dtype=torch.int32)
    return shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": boundaries}, mesh, layout=config.sp_layout)


def label_state(stages: Sequence[CausalLMStage], engine: Engine | None, memory: LiveMemory) -> None:
    """Label the parameters of the stages, and the optimizer's states, which a run has from its first step on."""
    state = {} if engine is None else engine.state()
    memory.label((local_tensor(x) for name, x in state.items() if name.startswith("optimizer.")), OPTIMIZER)
    for stage in stages:
        memory.label((local_tensor(x) for x in (*stage.parameters(), *stage.buffers())), PARAMETERS)


def offload_state(engine: Engine, memory: LiveMemory) -> None:
    """Count weights and optimizer states as host memory, and gradients from when FSDP2 moves them there."""
    memory.offload(local_tensor(x) for name, x in engine.state().items() if name.startswith("optimizer."))
    memory.offload(local_tensor(parameter) for stage in engine.stages for parameter in stage.parameters())
    for parameter in engine.parameters.values():
        parameter.register_post_accumulate_grad_hook(lambda p: memory.offload([local_tensor(p.grad)]))


def sent_by_axis(wire: SentBytes, mesh: ParallelMesh) -> tuple[GroupSent, ...]:
    """Return the counted bytes with the axes of each group, most bytes first."""
    axes: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for view in mesh.views for name in view.mesh_dim_names or ()):
        axes.setdefault(tuple(dist.get_process_group_ranks(mesh.group(name))), []).append(name)
    if mesh.ends is not None:
        axes.setdefault(tuple(dist.get_process_group_ranks(mesh.ends)), ["ends"])
    found = [
        GroupSent(tuple(axes[ranks]), ranks, collective, nbytes, wire.calls[ranks, collective])
        for (ranks, collective), nbytes in wire.by_group.items()
    ]
    return tuple(sorted(found, key=lambda sent: (-sent.nbytes, sent.collective, sent.ranks)))


def dry_run_json(run: DryRun) -> dict[str, Any]:
    """Return all results as JSON values, sizes in bytes."""
    values = {name: value for name, value in asdict(run).items() if name not in ("offloaded_bytes", "work", "update")}
    return values | {name: getattr(run, name) for name in ("flops", "attention_flops", "collectives")}


def render_dry_run(run: DryRun) -> Group:
    """Return tables of memory and traffic for rich to print."""
    config = run.config
    sizes = {**run.by_category, "total": run.peak_bytes, **({"host memory": run.host_bytes} if run.host_bytes else {})}
    sent = [
        (", ".join(sent.axes), str(len(sent.ranks)), sent.collective.strip("_"), f"{sent.calls:,}", f"{sent.nbytes:,}")
        for sent in run.sent
    ]
    sent.append(("all", "", "", f"{run.collectives:,}", f"{sum(sent.nbytes for sent in run.sent):,}"))
    memory = tuple((category, f"{nbytes / GIB:.3f}") for category, nbytes in sizes.items())
    return Group(
        f"rank {run.rank} of {run.world_size} ({parallel_dims(config)}): {config.model}, "
        f"{config.batch_size} x {config.seq_len} tokens, {config.dtype} on {config.device}, ZeRO-{config.zero}, "
        f"activation checkpointing {config.ac}{f', compiled layers counted as {run.counted_as}' * config.compile}",
        run.kernel,
        Grid("Peak memory of the rank", ("category", "GiB"), memory).table(),
        Grid("Sent by the rank", ("axes", "ranks", "collective", "calls", "bytes"), tuple(sent)).table(),
        f"FLOPs of the rank: {run.flops:.4g}, {run.attention_flops:.4g} of them in attention; "
        f"collectives and messages: {count(run.collectives)}",
        f"the dry run took {run.seconds:.1f} s and {run.process_bytes / GIB:.2f} GiB",
    )
