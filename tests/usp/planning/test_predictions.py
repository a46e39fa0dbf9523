"""Estimates for searches beside the formulas and the reallocations that they stand for."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest
import torch

from tests.usp.rlhf.toy import ppo
from usp.hf.models import load_model_config, model_facts
from usp.hf.tensor_parallel import model_shape
from usp.model.facts import ModelFacts, weight_layout
from usp.parallel import load_hardware, plan_realloc, realloc_seconds
from usp.planning.call_cost import CallOptions, call_cost
from usp.planning.estimates import Estimates
from usp.planning.rlhf_search import OptionSpace, options
from usp.planning.workload import Workload
from usp.rlhf.graph import DataflowGraph, TrainStep
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout


class Objective:
    head, unit = "logprobs", 1


def graph() -> DataflowGraph:
    toy = ppo(group_size=1)
    work = TrainStep(Objective(), mini_batches=2)  # type: ignore[arg-type]
    calls = tuple(replace(call, work=work) if call.kind == "train_step" else call for call in toy.calls)
    return replace(toy, calls=calls)


GRAPH, A100 = graph(), load_hardware("a100")
MODELS = {role: ModelFacts("", 32, 8, 128, 256, (0,) * 32) for role in GRAPH.roles}
SPACE = OptionSpace(32, 8, 64, 4, max_sequence=4, zero=(0, 1, 3), models=MODELS)
OPTIONS = {call.name: list(options(call, SPACE)) for call in GRAPH.calls}


@pytest.fixture(scope="module")
def quick() -> Estimates:
    config = load_model_config("llama3-8b")
    models = dict.fromkeys(GRAPH.roles, model_shape(model_facts("", config), config))
    return Estimates(GRAPH, models, Workload.of(64, 1, 256, (64, 256)), A100, CallOptions())


def test_calls_take_as_long_wherever_their_hosts_are(quick: Estimates) -> None:
    chance = random.Random(0)
    for name, layouts in OPTIONS.items():
        call = GRAPH[name]
        for layout in chance.sample(layouts, 2) if call.role else ():
            exact = call_cost(call, layout, quick.models[call.role], quick.workload, A100, quick.options)
            assert quick.call_seconds(name, layout) == pytest.approx(exact.total)
            assert quick.call_bytes(name, layout) == exact.work_bytes
    crossing = CallLayout(tuple(range(4, 12)), next(o.dims for o in OPTIONS["ref_inference"] if o.dims.tp == 8))
    assert quick.call_seconds("ref_inference", crossing) > quick.call_seconds(
        "ref_inference", replace(crossing, ranks=tuple(range(8)))
    )


def realloc(source: WeightCopy, copy: WeightCopy, quick: Estimates) -> float:
    """Return the seconds of the real messages."""
    layouts = [
        weight_layout(quick.models[c.role], c.layout.dims, c.layout.ranks, zero=c.layout.zero, dtype=torch.bfloat16)
        for c in (source, copy)
    ]
    return realloc_seconds(plan_realloc(*layouts, bucket_bytes=64 << 20, ranks_per_host=8), A100).total


@pytest.mark.slow
def test_reallocations_take_about_as_long_as_their_plans(quick: Estimates) -> None:
    chance, ratios = random.Random(3), []
    for _ in range(12):
        source, copy = (
            WeightCopy("actor", chance.choice(OPTIONS[name]).of_weights) for name in ("actor_train", "actor_generate")
        )
        ratios.append(quick.fill_seconds(source, copy) / realloc(source, copy, quick))
    assert all(0.4 < ratio < 2.0 for ratio in ratios), ratios
    assert 0.75 < prod(ratios) ** (1 / len(ratios)) < 1.33
    same = WeightCopy("actor", OPTIONS["actor_generate"][0])
    assert quick.fill_seconds(same, same) < 0.2 * quick.fill_seconds(*_apart())


def _apart() -> tuple[WeightCopy, WeightCopy]:
    """Return copies on different hosts."""
    first, last = (
        next(layout for layout in OPTIONS["actor_generate"] if layout.ranks == ranks)
        for ranks in (tuple(range(8)), tuple(range(24, 32)))
    )
    return WeightCopy("actor", first), WeightCopy("actor", last)
