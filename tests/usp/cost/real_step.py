"""Real training steps on gloo ranks, counted and measured, to hold a dry run against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import ParallelMesh, ProcessGroups
from parallel.memory import track_memory
from parallel.wire import count_sent_bytes
from usp.config import TrainConfig
from usp.cost.dry_run.dry_run import blank_batch
from usp.hf.expert_parallel import local, router_modules
from usp.hf.models import load_model_config, materialise
from usp.losses import NextTokenLoss, global_token_count
from usp.sp.batch import split_rows
from usp.train.build import StageRecipe, build_fsdp2_engine, build_stages, shard_stage
from usp.train.engines.base import AdamW
from usp.train.validate import parallel_dims

Sent = dict[tuple[tuple[int, ...], str], tuple[int, int]]


def step_of(config: TrainConfig, groups: ProcessGroups) -> Callable[[], None]:
    """A training step in this world, on the CPU, with sequences of one document and routers that choose in turn."""
    config = replace(config, dp_shard=parallel_dims(config, config.ep).resolve(dist.get_world_size()).dp_shard)
    mesh = ParallelMesh.create(parallel_dims(config, config.ep), groups=groups)
    recipe, dtype = StageRecipe.of(config, load_model_config(config.model)), getattr(torch, config.dtype)
    stages = build_stages(recipe, mesh)
    for stage in stages:
        shard_stage(stage, mesh, dtype, config.zero)
        materialise(stage, torch.device("cpu"))
        for x in (*stage.parameters(), *stage.buffers()):
            nn.init.normal_(local(x.detach()), std=0.02)
        for router in router_modules(stage.model):
            router.register_forward_hook(_choose_in_turn)
    engine = build_fsdp2_engine(stages, mesh, recipe, AdamW(config.weight_decay), dtype, config.zero)
    engine.state()  # makes the optimiser's states, as the first step would

    def step() -> None:
        batch = blank_batch(config, mesh)
        tokens = int(global_token_count(batch["shift_labels"], mesh))
        engine.forward_backward(split_rows(batch, config.micro_batches), NextTokenLoss(tokens))
        engine.step(config.learning_rate, config.max_grad_norm)

    return step


def _choose_in_turn(router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    logits, weights, chosen = output
    in_turn = torch.arange(chosen.numel()).remainder(logits.shape[-1]).view(chosen.shape)
    return logits, weights, in_turn


def sent_by_steps(configs: list[TrainConfig]) -> list[Sent]:
    """What this rank sends in the second step of each: {(ranks of the group, collective): (bytes, calls)}."""
    found, groups = [], ProcessGroups()
    for config in configs:
        step = step_of(config, groups)
        step()
        with count_sent_bytes() as sent:
            step()
        found.append({key: (nbytes, sent.calls[key]) for key, nbytes in sent.by_group.items()})
    return found


def peak_of_step(config: TrainConfig, enough: list[float]) -> int:
    """Bytes that a step takes at most beyond parameters and optimiser states: the least of up to ten runs.

    gloo's threads let go of what they have sent some time after it has arrived, at times so late that a run's peak
    holds it. Once no rank is above its entry of `enough`, there are no more runs.
    """
    groups, least = ProcessGroups(), None
    for _ in range(10):
        step = step_of(config, groups)
        with track_memory() as memory:
            step()
        least = memory.peak_bytes if least is None else min(least, memory.peak_bytes)
        above = torch.tensor(float(least > enough[dist.get_rank()]))
        dist.all_reduce(above)
        if not above:
            break
    assert least is not None
    return least
