"""Estimates for searches beside the formulas and the reallocations that they stand for, and all that a simulation asks
for, of PPO with a 70B actor and a 7B critic on 64 GPUs."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest
import torch

from tests.usp.planning.estimates import graph_of_ppo, shape
from tests.usp.rlhf.toy import ppo
from usp.model.facts import ModelFacts, weight_layout
from usp.parallel import ParallelDims, load_hardware, plan_realloc, realloc_seconds
from usp.planning.call_cost import CallOptions, Calls
from usp.planning.estimates import Estimates
from usp.planning.rlhf_search import OptionSpace, options
from usp.planning.workload import Workload
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

GRAPH, A100, LINK = graph_of_ppo(), load_hardware("a100"), 20e9
MODELS = {role: ModelFacts("", 32, 8, 128, 256, (0,) * 32) for role in GRAPH.roles}
SPACE = OptionSpace(32, 8, 64, 4, max_sequence=4, zero=(0, 1, 3), models=MODELS)
OPTIONS = {call.name: list(options(call, SPACE)) for call in GRAPH.calls}


@pytest.fixture(scope="module")
def quick() -> Estimates:
    return Estimates(
        GRAPH, dict.fromkeys(GRAPH.roles, shape("llama3-8b")), Workload.of(64, 1, 256, (64, 256)), A100, CallOptions()
    )


def test_calls_take_as_long_wherever_their_hosts_are(quick: Estimates) -> None:
    chance = random.Random(0)
    for name, layouts in OPTIONS.items():
        call = GRAPH[name]
        for layout in chance.sample(layouts, 2) if call.role else ():
            exact = Calls(layout, quick.models[call.role], quick.workload, A100, quick.options).cost(call)
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
    first, last = (WeightCopy("actor", layout(at, 8, tp=8)) for at in (0, 24))
    return first, last


def layout(first: int, size: int, zero: int = 0, **degrees: int) -> CallLayout:
    return CallLayout(tuple(range(first, first + size)), ParallelDims(**degrees).resolve(size), zero=zero)


def of_ppo() -> Estimates:
    models = {"actor": shape("llama2-70b"), "ref": shape("llama2-70b")}
    models |= {role: shape("llama2-7b", scalar=True) for role in ("critic", "reward")}
    load = Workload.of(prompts=512, group_size=1, prompt_tokens=128, quantiles=(128,))
    node = replace(A100, host_link_bytes_per_second=LINK)
    return Estimates(ppo(), models, load, node, CallOptions(torch.bfloat16, slots=64))


def test_every_number_of_a_plan_is_predicted() -> None:
    found, everywhere = of_ppo(), layout(0, 64, tp=8, pp=8)
    for call in found.graph.calls:
        if call.role:
            assert 0 < found.call_seconds(call.name, everywhere) < 200
            assert found.call_bytes(call.name, everywhere) > 0
        else:
            assert found.call_seconds(call.name, layout(0, 64)) == 0
    train, generate = WeightCopy("actor", everywhere), WeightCopy("actor", layout(0, 64, tp=8))
    numel = shape("llama2-70b").numel
    assert found.weight_bytes(generate) == pytest.approx(2 * numel / 8, rel=0.01)
    # The first and the last of eight stages have the embedding and the head.
    assert found.weight_bytes(train) == pytest.approx(2 * numel / 64, rel=0.05)
    total = found.weight_bytes(train) + found.state_bytes(train)
    assert total == 6 * found.weight_bytes(train)  # float32 weights and two moments
    assert found.load_seconds(train) == found.weight_bytes(train) / LINK
    assert found.state_load_seconds(train) == 4 * found.load_seconds(train)


def test_moving_takes_time_where_layouts_differ() -> None:
    found = of_ppo()
    train, generate = WeightCopy("critic", layout(0, 16, 1, tp=8)), WeightCopy("critic", layout(0, 16, tp=4))
    apart = WeightCopy("critic", layout(32, 16, tp=4))
    assert found.fill_seconds(train, train) == 0
    assert 0 < found.fill_seconds(train, generate) < found.fill_seconds(train, apart)
