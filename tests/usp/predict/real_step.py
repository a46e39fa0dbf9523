"""Real training steps on gloo ranks, counted and measured, to hold predictions and dry runs against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.memory import least_peak
from tests.usp.tiny import train_step
from usp.config import TrainConfig
from usp.hf.experts import router_modules
from usp.hf.models import load_model_config
from usp.hf.stage import CausalLMStage
from usp.parallel import ParallelMesh, ProcessGroups, local_tensor
from usp.parallel.wire import SentBytes
from usp.predict.job import Job
from usp.predict.traffic import Sent
from usp.train.build import EngineRecipe, build_engine
from usp.train.dry_run import blank_batch
from usp.train.validate import parallel_dims

Counts = dict[tuple[tuple[int, ...], str], tuple[int, int]]  # (ranks of a group, collective): (bytes, calls)


def step_of(config: TrainConfig, groups: ProcessGroups) -> Callable[[], object]:
    """A training step in this world, on the CPU, with sequences of one document and routers that choose in turn."""
    mesh = ParallelMesh.create(parallel_dims(config), groups=groups)
    recipe = EngineRecipe.of(config, load_model_config(config.model))
    engine = build_engine(recipe, mesh, torch.device("cpu"), _fill)
    engine.state()  # makes the optimizer's states, as the first step would
    batch = blank_batch(replace(config, sp_layout=recipe.sp_layout), mesh)
    return partial(train_step, engine, mesh, batch, config, config.learning_rate)


def _fill(stage: CausalLMStage) -> None:
    for x in (*stage.parameters(), *stage.buffers()):
        nn.init.normal_(local_tensor(x.detach()), std=0.02)
    for router in router_modules(stage.model):
        router.register_forward_hook(choose_in_turn)


def choose_in_turn(router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    logits, weights, chosen = output
    in_turn = torch.arange(chosen.numel()).remainder(logits.shape[-1]).view(chosen.shape)
    return logits, weights, in_turn


def counts(counter: SentBytes) -> Counts:
    return {key: (counter.by_group[key], calls) for key, calls in counter.calls.items()}


def predicted(job: Job, rank: int, parts: Iterable[Sent]) -> Counts:
    """Add up what formulas say; axes with the same ranks share their groups."""
    nbytes, calls = Counter[Any](), Counter[Any]()
    for sent in parts:
        key = tuple(job.linked(sent.axis, rank)), sent.collective
        nbytes[key] += sent.nbytes
        calls[key] += sent.calls
    return {key: (nbytes[key], calls[key]) for key in calls}


def sent_by_steps(configs: list[TrainConfig]) -> list[Counts]:
    """Return what this rank sends in the second step of each: the first has agreements that others do not repeat."""
    found, groups = [], ProcessGroups()
    for config in configs:
        step = step_of(config, groups)
        step()
        with SentBytes() as sent:
            step()
        found.append(counts(sent))
    return found


def peak_of_step(config: TrainConfig, enough: list[float]) -> int:
    """Bytes that a step takes at most beyond parameters and optimiser states; see `least_peak`."""
    groups = ProcessGroups()
    return least_peak(lambda: step_of(config, groups), enough)
