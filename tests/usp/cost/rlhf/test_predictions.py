"""Estimates for searches beside those that they stand for."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest

from parallel import ParallelDims, load_hardware
from tests.usp.rlhf.toy import ppo
from usp.cost.calls.plan_estimates import PlanEstimates
from usp.cost.calls.workload import Workload
from usp.cost.rlhf.options import ModelLimits, OptionSpace, options
from usp.cost.rlhf.predictions import Predictions
from usp.hf.models import load_model_config, model_facts
from usp.hf.shapes import model_shape
from usp.rlhf.graph.calls import TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph
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
LIMITS = {role: ModelLimits(heads=32, kv_heads=8, layers=32) for role in GRAPH.roles}
SPACE = OptionSpace(32, 8, 64, 4, max_sequence=4, zero=(0, 1, 3), limits=LIMITS)
OPTIONS = {call.name: list(options(call, SPACE)) for call in GRAPH.calls}


@pytest.fixture(scope="module")
def exact() -> PlanEstimates:
    config = load_model_config("llama3-8b")
    models = dict.fromkeys(GRAPH.roles, model_shape(model_facts("", config), config))
    return PlanEstimates(GRAPH, models, Workload.of(64, 1, 256, (64, 256)), A100)


def test_calls_take_as_long_wherever_their_hosts_are(exact: PlanEstimates) -> None:
    chance, quick = random.Random(0), Predictions(exact, 8)
    for name, layouts in OPTIONS.items():
        for layout in chance.sample(layouts, 3):
            assert quick.call_seconds(name, layout) == pytest.approx(exact.call_seconds(name, layout))
            assert quick.call_bytes(name, layout) == exact.call_bytes(name, layout)
            if role := GRAPH[name].role:
                copy = WeightCopy(role, layout.of_weights)
                assert quick.weight_bytes(copy) == exact.weight_bytes(copy)
                assert quick.state_bytes(copy) == exact.state_bytes(copy)
                assert quick.load_seconds(copy) == exact.load_seconds(copy)
                assert quick.state_load_seconds(copy) == exact.state_load_seconds(copy)
    crossing = CallLayout(tuple(range(4, 12)), next(o.dims for o in OPTIONS["ref_inference"] if o.dims.tp == 8))
    assert quick.call_seconds("ref_inference", crossing) > quick.call_seconds(
        "ref_inference", replace(crossing, ranks=tuple(range(8)))
    )


def test_calls_alone_are_faster_where_ranks_share_processors(exact: PlanEstimates) -> None:
    shared = replace(exact, hardware=replace(A100, crowding=4.0))
    alone, busy = Predictions(shared, 8, 16), Predictions(shared, 8)
    for ranks, share in ((2, 1 / 4), (4, 1 / 4), (8, 1 / 2), (16, 1)):
        layout = CallLayout(tuple(range(ranks)), ParallelDims(dp_shard=ranks))
        taken = share * busy.call_seconds("ref_inference", layout)
        assert alone.call_seconds("ref_inference", layout) == pytest.approx(taken)


def test_reallocations_take_about_as_long_as_their_plans(exact: PlanEstimates) -> None:
    chance, quick = random.Random(3), Predictions(exact, 8)
    ratios = []
    for _ in range(12):
        source, copy = (
            WeightCopy("actor", chance.choice(OPTIONS[name]).of_weights) for name in ("actor_train", "actor_generate")
        )
        ratios.append(quick.fill_seconds(source, copy) / exact.fill_seconds(source, copy))
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
