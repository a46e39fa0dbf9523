"""The copies of a step: filling them sends each byte that a rank or host lacks once, in bounded memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.reallocation.layouts import KINDS, Grid
from tests.usp.rlhf.toy import ppo
from usp.parallel import ParallelDims, ParamLayout
from usp.rlhf.graph import DataflowGraph, Inference, ModelCall
from usp.rlhf.plan.named_plans import NAMED_PLANS, Facts, named_plan
from usp.rlhf.plan.operations import StepWeights, WeightCopy, plan_weights, schedule, trained_copy, weight_copies
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

FACTS = Facts(world_size=8, ranks_per_host=4, heads=4, layers=4)
OPTIONS: dict[str, Any] = {"bucket_bytes": 1 << 20, "ranks_per_host": 4}


def layout_of(copy: WeightCopy) -> ParamLayout:
    """Return the boxes of a copy: sharded over pp, tp and, with ZeRO, dp_shard x sp."""
    dims, ranks = copy.layout.dims, copy.layout.ranks
    ranks_of_shard = dims.dp_shard * dims.sp
    shard = ranks_of_shard if copy.layout.zero else 1
    return Grid(ranks, dims.pp, dims.dp_replicate * ranks_of_shard // shard, shard, dims.tp).layout()


def layouts_of(graph: DataflowGraph, plan: ExecutionPlan) -> dict[WeightCopy, ParamLayout]:
    return {copy: layout_of(copy) for copy in weight_copies(graph, plan) if copy.role in graph.trained_roles}


def held_bytes(layouts: list[ParamLayout], ranks: range) -> Tensor:
    """Return a mask of the model's bytes that some ranks hold in some layouts."""
    masks = []
    for name, (shape, dtype) in KINDS.items():
        mask = torch.zeros(shape, dtype=torch.bool)
        for box in (layout.boxes[name].get(rank) for layout in layouts for rank in ranks):
            if box:
                mask[box.slices()] = True
        masks.append(mask.flatten().repeat_interleave(dtype.itemsize))
    return torch.cat(masks)


def fewest(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[int, int]:
    """Return the bytes that ranks, and hosts, need in any copy of a role and do not hold in the trained one."""
    layouts, total, between = layouts_of(graph, plan), 0, 0
    for role in graph.trained_roles:
        copies = [layout for copy, layout in layouts.items() if copy.role == role]
        trained = [layouts[copy] for copy in layouts if copy == trained_copy(graph, plan, role)]
        for step in (1, 4):
            for first in range(0, 8, step):
                ranks = range(first, first + step)
                lacking = int((held_bytes(copies, ranks) & ~held_bytes(trained, ranks)).sum())
                total, between = (total + lacking, between) if step == 1 else (total, between + lacking)
    return total, between


DEGREES = {
    "zero 3": {"zero": 3},
    "tp 2": {"dims": ParallelDims(tp=2)},
    "ring 2, rollout tp 2": {"dims": ParallelDims(ring=2), "rollout_dims": ParallelDims(tp=2), "zero": 3},
    "pp 2 tp 2, rollout tp 4": {"dims": ParallelDims(pp=2, tp=2), "rollout_dims": ParallelDims(tp=4), "zero": 1},
}


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("name", NAMED_PLANS)
@pytest.mark.slow
def test_a_step_sends_what_its_ranks_lack_once(name: str, degrees: str) -> None:
    graph = ppo()
    plan = named_plan(name, graph, replace(FACTS, **DEGREES[degrees]))
    weights = plan_weights(graph, plan, layouts_of(graph, plan), **OPTIONS)
    tiers = [fill.tier_bytes for fill in weights.fills.values()]
    between, inside = (sum(sizes) for sizes in zip(*tiers, strict=True)) if tiers else (0, 0)
    assert (between + inside, between) == fewest(graph, plan)
    check_lives(graph, plan, weights)


Most = dict[int, int]  # bytes by rank


def check_lives(graph: DataflowGraph, plan: ExecutionPlan, weights: StepWeights) -> tuple[Most, Most]:
    """Check that each fill runs with all ranks of its sources, which are in memory, and all copies are released once.

    Check that memory is bounded: during calls by what they need if no copy stays, and while weights move by twice that.
    Returns the most that copies take during calls, and while weights move.
    """
    in_calls, in_fills = lives(graph, plan, weights)
    needed, _ = lives(graph, plan, replace(weights, kept={}, sources={}))
    assert in_calls == needed
    assert all(size <= 2 * in_calls[rank] for rank, size in in_fills.items())
    return in_calls, in_fills


def lives(graph: DataflowGraph, plan: ExecutionPlan, weights: StepWeights) -> tuple[Most, Most]:
    in_calls, in_fills = (dict.fromkeys(range(8), 0) for _ in range(2))
    alive: list[WeightCopy] = []
    filled: list[WeightCopy] = []
    layouts = layouts_of(graph, plan)
    for operation in schedule(graph, plan, 8, weights=weights):
        copy = operation.copy
        if operation.kind == "reallocate" and copy:
            assert not weights.sources or {one for one in alive if one.role == copy.role} == set(operation.sources)
            assert operation.sources == weights.sources.get(copy, ())
            assert {rank for one in (copy, *operation.sources) for rank in one.layout.ranks} <= {*operation.ranks}
            alive.append(copy)
            filled.append(copy)
            for rank in range(8):
                in_fills[rank] = max(in_fills[rank], sum(bytes_of(layouts[one], rank) for one in alive))
        elif operation.kind == "release" and copy:
            alive.remove(copy)
        elif operation.kind == "call":
            for rank in range(8):
                in_calls[rank] = max(in_calls[rank], sum(bytes_of(layouts[one], rank) for one in alive))
    assert not alive and filled == list(weights.fills)
    return in_calls, in_fills


def bytes_of(layout: ParamLayout, rank: int) -> int:
    return int(held_bytes([layout], range(rank, rank + 1)).sum())


def three_layouts(gap: str) -> tuple[DataflowGraph, ExecutionPlan]:
    """The actor generates and computes on the first ranks, in two layouts, and trains on the others.

    gap: the critic computes in between, beside a copy of the actor that stays; "": at the same time.
    """
    graph = ppo()
    late = ModelCall("actor_inference", "actor", Inference("logprobs"), ("tokens", "values"), ("old_logprobs",))
    calls = tuple(late if call.name == late.name and gap else call for call in graph.calls)
    graph = DataflowGraph(calls, graph.given)
    low, high, all_ = tuple(range(4)), tuple(range(4, 8)), tuple(range(8))
    whole, cut = CallLayout(low, ParallelDims(dp_replicate=4, dp_shard=1)), CallLayout(low, ParallelDims(tp=4))
    layouts = {call.name: CallLayout(all_, ParallelDims(dp_shard=8)) for call in graph.calls}
    layouts |= {name: CallLayout(high, ParallelDims(tp=4)) for name in ("actor_train", "critic_train")}
    layouts |= {"actor_generate": whole, "actor_inference": cut, "critic_inference": cut}
    if gap == "with as much memory":
        layouts["critic_inference"] = whole
    return graph, ExecutionPlan("three", layouts)


@pytest.mark.parametrize("gap", ["", "with less memory", "with as much memory"])
@pytest.mark.slow(but=1)
def test_a_copy_stays_past_other_calls_only_where_these_need_no_more_memory_than_before(gap: str) -> None:
    graph, plan = three_layouts(gap)
    weights = plan_weights(graph, plan, layouts_of(graph, plan), **OPTIONS)
    generation, inference = (
        next(copy for copy in weights.fills if copy.layout == plan[name] and copy.role == "actor")
        for name in ("actor_generate", "actor_inference")
    )
    in_calls, in_fills = check_lives(graph, plan, weights)
    model = bytes_of(layout_of(generation), 0)
    assert in_calls[0] == model
    if gap:  # the critic's copy beside generation's takes more than either
        assert weights.kept == {} and weights.sources[inference] == ()
        assert weights.fills[inference].total_bytes > 0 and in_fills[0] == model
    else:
        assert weights.kept == {generation: inference}
        assert weights.fills[inference].total_bytes == 0 and in_fills[0] > model
