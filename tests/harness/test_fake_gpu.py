"""Steps on a device without memory: nothing in a layer stops the host, streams wait for one another, and planted faults
are found."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.usp.tiny import tiny_model, train_step
from usp import UnifiedSPAttention, apply_unified_sp
from usp.attention import comm
from usp.config import TrainConfig
from usp.hf.expert_parallel import apply_ep
from usp.hf.models import empty_model, load_model_config, materialise
from usp.model.recompute import PinnedCopier
from usp.parallel import ParallelDims, ParallelMesh, expert
from usp.predict.fake_world import HostMemory, fake_world, stand_ins
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate
from usp.train.build import EngineRecipe, build_stages, engine_over
from usp.train.dry_run import blank_batch
from usp.train.resolve import resolve
from usp.train.validate import parallel_dims

from .fake_gpu import BACKEND, DEVICE, Finding, fake_gpu, register

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def process() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), register) as executor:
        yield executor


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return folders of models of two and of four layers."""
    kinds = ("llama", "llama-deep", "mixtral", "mixtral-deep")
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in kinds}
    for kind, path in paths.items():
        tiny_model(kind).save_pretrained(path)
    return {kind: str(path) for kind, path in paths.items()}


# Faults


def item_in_a_layer(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, q: Tensor, *args: Any, **options: Any) -> Tensor:
        assert q.sum().item() is not None
        return original(self, q, *args, **options)

    return forward


FAULTS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "item in a layer": lambda: patch.object(UnifiedSPAttention, "forward", item_in_a_layer(UnifiedSPAttention.forward)),
    "no wait for messages": lambda: patch.object(comm.Pending, "wait", lambda pending: None),
    "no wait for rows": lambda: patch.object(expert._Messages, "_wait", lambda self, at: self._pending.pop(at)[2]),
    "no wait for offloaded tensors": lambda: patch.object(PinnedCopier, "wait", lambda copier, event: None),
}


# Steps, in the process of the device


def trained(model: str, world_size: int, fault: str = "", **flags: Any) -> list[Finding]:
    """Return the findings of a step of rank 0, after another."""
    defaults = {"seq_len": 64, "dtype": "bfloat16", "device": "cpu", "loss_chunk": 24, "ac": "full"}
    config = TrainConfig(model=model, **defaults | flags)
    resolved = resolve(config, world_size, weights=False)
    _, model_config, _, _ = resolved.valid([])
    config = resolved.largest.config
    with fake_world(world_size, 0), stand_ins(CUDA, HostMemory()), FAULTS[fault]():
        mesh = ParallelMesh.create(parallel_dims(config), DEVICE)
        recipe = EngineRecipe.of(config, model_config)
        stages = build_stages(recipe, mesh)
        with fake_gpu() as gpu:
            for stage in stages:
                materialise(stage, torch.device(DEVICE))
            engine = engine_over(stages, recipe, mesh)
            for _ in range(2):
                batch = blank_batch(config, mesh)
                local = {key: x if key == "cu_seqlens" else x.to(DEVICE) for key, x in batch.items()}
                gpu.findings.clear()
                gpu.gathers = 0
                train_step(engine, mesh, local, config, 1e-3)
            return list(gpu.findings)


def generated(model: str, dims: ParallelDims, steps: int = 3) -> list[Finding]:
    """Return the findings of a prefill and decode steps of two sequences, on two ranks."""
    with fake_world(2, 0), stand_ins(CUDA, HostMemory()):
        mesh = ParallelMesh.create(dims, DEVICE)
        causal = empty_model(load_model_config(Path(model)))
        apply_unified_sp(causal, mesh)
        apply_ep(causal, mesh)
        with fake_gpu() as gpu:
            materialise(causal, torch.device(DEVICE))
            generator = Generator(causal, mesh, slots=2)
            prompts = [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])]
            generator.generate(prompts, Generate(max_new_tokens=steps), [0, 1])
            return list(gpu.findings)


def small(name: str) -> list[Finding]:
    """Return the findings of a few operators."""
    with fake_gpu() as gpu:
        x, side = torch.zeros(4, 4, device=DEVICE), BACKEND.Stream()
        SMALL[name](x, side)
        x.add_(1)
        torch.empty(1, device=DEVICE)  # may reuse what is free
        return list(gpu.findings)


def on_side(x: Tensor, side: Any) -> Tensor:
    side.wait_stream(BACKEND.current_stream())
    with BACKEND.stream(side):
        return x.clone()


def freed_early(x: Tensor, side: Any, record: bool) -> None:
    y = x.clone()
    side.wait_stream(BACKEND.current_stream())
    with BACKEND.stream(side):
        y.add_(1)
        if record:
            y.record_stream(side)
    del y


def copied_back(x: Tensor, wait: bool, more: bool = False) -> None:
    host = torch.empty(4, 4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = BACKEND.Event()
    event.record()
    if more:
        x.add_(1)
    if wait:
        event.synchronize()
    host.add_(1)


SMALL: dict[str, Callable[[Tensor, Any], object]] = {
    "item": lambda x, _: x.sum().item(),
    "tolist": lambda x, _: x.tolist(),
    "bool": lambda x, _: bool((torch.arange(4, device=DEVICE) >= 0).all()),
    "nonzero": lambda x, _: torch.arange(4, device=DEVICE).nonzero(),
    "boolean mask": lambda x, _: torch.arange(4, device=DEVICE)[torch.arange(4, device=DEVICE) > 1],
    "to the host": lambda x, _: x.to("cpu"),
    "to the device": lambda x, _: torch.zeros(3).to(DEVICE),
    "new tensor of numbers": lambda x, _: torch.tensor([1, 2], device=DEVICE),
    "not pinned": lambda x, _: torch.zeros(3).to(DEVICE, non_blocking=True),
    "no wait before a read": lambda x, side: on_side(x, side) + 1,
    "no wait before a write": lambda x, side: on_side(x, side),
    "no record_stream": lambda x, side: freed_early(x, side, record=False),
    "an event of the last operator": lambda x, _: copied_back(x, wait=True),
    "no wait for a copy": lambda x, _: copied_back(x, wait=False),
}
RIGHT: dict[str, Callable[[Tensor, Any], object]] = {
    "pinned": lambda x, _: torch.zeros(3, pin_memory=True).to(DEVICE, non_blocking=True),
    "to the host without waiting": lambda x, _: x.to("cpu", non_blocking=True),
    "an event of an earlier operator": lambda x, _: copied_back(x, wait=True, more=True),
    "recorded": lambda x, side: freed_early(x, side, record=True),
    "waited for": lambda x, side: (on_side(x, side), BACKEND.current_stream().wait_stream(side)),
    "in order": lambda x, _: x.clone().add_(x)[1:].sum(),
}


def right(name: str) -> list[Finding]:
    with ExitStack() as stack:
        stack.enter_context(patch.dict(SMALL, RIGHT))
        return small(name)


# Tests


@pytest.mark.parametrize("name", SMALL)
def test_what_stops_the_host_and_what_races_is_found(process: Executor, name: str) -> None:
    findings = process.submit(small, name).result()
    kind = "race" if name.startswith("no ") else "synchronization"
    assert {finding.kind for finding in findings} == {kind}, findings
    assert "test_fake_gpu.py" in findings[0].where


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_reported(process: Executor, name: str) -> None:
    assert not process.submit(right, name).result()


Steps = Callable[..., list[Finding]]


@pytest.fixture(scope="module")
def steps(process: Executor, folders: dict[str, str]) -> Steps:
    """Return a function that runs a step, once for all tests: function, model, and the function's other arguments."""

    @cache
    def run(function: Steps, model: str, *args: Any, **flags: Any) -> list[Finding]:
        return process.submit(function, folders[model], *args, **flags).result()

    return run


def per_layer(run: Callable[[str], list[Finding]], model: str) -> tuple[Counter[str], list[Finding]]:
    """Return the synchronizations of one more layer, by place, and all races."""
    found = run(model), run(f"{model}-deep")
    shallow, deep = (Counter(str(x) for x in findings if x.kind == "synchronization") for findings in found)
    assert not shallow - deep
    more = Counter({place: number // 2 for place, number in (deep - shallow).items()})
    return more, [x for findings in found for x in findings if x.kind == "race"]


LAYOUTS: dict[str, tuple[str, int, dict[str, Any], int]] = {  # and the most synchronizations of a layer and pass
    "dense": ("llama", 8, {"sp_ring": 2, "sp_ulysses": 2}, 0),
    "offloaded": ("llama", 2, {"sp_ring": 2, "ac_offload": True}, 0),
    "experts": ("mixtral", 4, {"sp_ring": 2, "ep": 2}, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow
def test_layers_of_a_training_step_stop_the_host_for_routing_only(steps: Steps, name: str) -> None:
    model, world_size, flags, most = LAYOUTS[name]
    syncs, races = per_layer(lambda kind: steps(trained, kind, world_size, "", **flags), model)
    assert not races, races[0]
    assert syncs.total() <= 2 * most, syncs  # forward and recomputation


@pytest.mark.slow
def test_the_layer_after_experts_is_gathered_before_their_routing_stops_the_host(steps: Steps) -> None:
    _, world_size, flags, _ = LAYOUTS["experts"]
    findings = steps(trained, "mixtral-deep", world_size, "", **flags)
    routing = next(finding for finding in findings if "plan_dispatch" in finding.where)
    assert routing.gathers == 5  # the root, and the attention and experts of this layer and of the next one


@pytest.mark.parametrize(("model", "most"), [("llama", 0), ("mixtral", 1)])
@pytest.mark.slow
def test_layers_of_a_decode_step_stop_the_host_for_routing_only(steps: Steps, model: str, most: int) -> None:
    dims = ParallelDims(ring=2, ep=1 + most)
    syncs, races = per_layer(lambda kind: steps(generated, kind, dims), model)
    assert not races, races[0]
    assert syncs.total() <= 4 * most, syncs


@pytest.mark.slow
def test_decode_steps_do_not_stop_the_host(steps: Steps) -> None:
    few, many = (steps(generated, "llama", ParallelDims(ring=2), number) for number in (3, 6))
    assert Counter(map(str, many)) == Counter(map(str, few))


@pytest.mark.parametrize(
    ("fault", "kind", "layout"),
    [
        ("item in a layer", "synchronization", "offloaded"),
        ("no wait for messages", "race", "offloaded"),
        ("no wait for offloaded tensors", "race", "offloaded"),
        ("no wait for rows", "race", "experts"),
    ],
)
def test_faults_in_a_training_step_are_found(steps: Steps, fault: str, kind: str, layout: str) -> None:
    model, world_size, flags, _ = LAYOUTS[layout]
    right, wrong = (Counter(map(str, steps(trained, model, world_size, each, **flags))) for each in ("", fault))
    assert any(place.startswith(kind) for place in wrong - right), wrong
