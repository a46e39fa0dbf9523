"""Predictions that a run or a profile corrects, and the plans that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.usp.planning.estimates import graph_of_ppo, shape
from usp.parallel import Hardware, ParallelDims, load_hardware
from usp.planning.corrections import VERSION, Corrections, Measured, Profile
from usp.planning.estimates import layout_key
from usp.planning.rlhf_question import RlhfQuestion
from usp.planning.run_plan import SearchingPlanner, moves
from usp.planning.workload import Workload
from usp.rlhf.plan.named_plans import Facts, flattening, separation
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.replanning import Factors, MeasuredStep, ReplanOptions
from usp.rlhf.runtime.measure import StepLengths
from usp.train.tuning import Decision

GRAPH, A100 = graph_of_ppo(), load_hardware("a100")
MODELS = dict.fromkeys(GRAPH.roles, shape("tiny"))
FACTS = Facts(4, 8, 4, 2)
SHORT, LONG = (StepLengths((64,) * 32, (length,) * 32, 1) for length in (8, 256))


def question(lengths: StepLengths, hardware: Hardware = A100) -> RlhfQuestion:
    workload = Workload(lengths.prompts, lengths.responses, 1, 256)
    return RlhfQuestion(graph=GRAPH, models=MODELS, workload=workload, hardware=hardware, world_size=4)


ALONE = CallLayout((0,), ParallelDims(dp_shard=1))


def sharded(first: int, size: int, **options: Any) -> CallLayout:
    return CallLayout(tuple(range(first, first + size)), ParallelDims(dp_shard=size), **options)


def took(call: str, *seconds: float) -> list[Measured]:
    """A call on one rank, which is predicted to take half a second."""
    return [Measured(call, "one rank", each, 0.5) for each in seconds]


def test_factors_follow_the_median_of_the_steps_halfway() -> None:
    first = Corrections().after(took("train", 1.0, 4.0, 1.0))
    assert first.factors == {"train": {"one rank": pytest.approx(2.0)}}
    then = first.after([*took("train", 4.0), *took("reward", 0.25, 0.125)])
    assert then.factors == {"train": {"one rank": pytest.approx(4.0)}, "reward": {"one rank": pytest.approx(0.375)}}
    assert first.factors == {"train": {"one rank": pytest.approx(2.0)}}


def test_factors_change_only_the_seconds_of_calls() -> None:
    layout = flattening(GRAPH, FACTS)["actor_train"]
    key = layout_key(layout)
    factors = {"actor_train": {key: 3.0}, "advantages": {"one rank": 0.25}}
    exact = question(SHORT).estimates
    corrected = replace(exact, corrections=Corrections(factors))
    assert corrected.call_seconds("actor_train", layout) == 3 * exact.call_seconds("actor_train", layout) > 0
    assert corrected.call_seconds("advantages", layout) == 0.25 and exact.call_seconds("advantages", layout) == 0
    for name in ("critic_train", "actor_inference"):
        assert corrected.call_seconds(name, layout) == pytest.approx(exact.call_seconds(name, layout))
    assert corrected.call_bytes("actor_train", layout) == exact.call_bytes("actor_train", layout)


def test_a_layout_that_was_not_measured_has_the_factor_of_the_most_similar_one() -> None:
    two, zero = sharded(0, 2), sharded(0, 2, zero=1)
    found = Corrections({"train": {"one rank": 2.0, layout_key(two): 3.0}})
    assert found.of("train", layout_key(two)) == found.of("train", layout_key(zero)) == 3.0
    assert found.of("train", layout_key(replace(ALONE, ranks=(3,)))) == 2.0
    assert found.of("other", layout_key(two)) is None


def test_a_profile_is_read(tmp_path: Path) -> None:
    made, factors = {"version": VERSION, "hardware": "A100"}, {"actor_train": {"dp=2": 1.5, "tp=2": 2}}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**made, "factors": factors}))
    assert Profile.load(path, "A100") == Profile(made, Corrections(factors))
    with pytest.raises(ValueError, match="it corrects predictions for --hardware A100, not H100"):
        Profile.load(path, "H100")
    for text in ("{}", "no JSON", '{"version": 7, "factors": {}}', '{"version": 3, "factors": {"train": 1.5}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"profile\.json is not a profile of python -m examples\.rlhf_profile"):
            Profile.load(path, "A100")


def test_keys_tell_what_runs_differently() -> None:
    assert layout_key(sharded(0, 2)) == layout_key(sharded(6, 2)) == layout_key(sharded(0, 2, micro_batch_tokens=7))
    replicas = CallLayout((0, 1), ParallelDims(dp_replicate=2, dp_shard=1))
    assert layout_key(replicas) == layout_key(sharded(0, 2))
    keys = {layout_key(sharded(0, 2, **one)) for one in ({}, {"zero": 1}, {"zero": 3}, {"ac": "full"}, {"mlp_tile": 8})}
    assert len(keys) == 5
    four = CallLayout((0, 1, 2, 3), ParallelDims(dp_replicate=2, dp_shard=2))
    assert layout_key(four) == layout_key(sharded(0, 4))
    assert layout_key(replace(four, zero=1)) != layout_key(sharded(0, 4, zero=1))


def test_a_change_moves_what_trains_three_times_and_what_stays_not_at_all() -> None:
    flat, apart = flattening(GRAPH, FACTS), separation(GRAPH, FACTS)
    assert not list(moves(question(SHORT), flat, flat))
    numel, found = MODELS["actor"].numel, list(moves(question(SHORT), apart, flat))
    # Ranks 2 and 3 trained: 0 and 1 get weights and moments of actor and critic, 2 and 3 the weights of ref and reward.
    assert sum(times * plan.total_bytes for plan, times in found) == 2 * (2 * 3 * 4 * numel + 2 * 2 * numel)
    recomputed = replace(flat, calls={**flat.calls, "actor_train": replace(flat["actor_train"], ac="full")})
    ((plan, times),) = moves(question(SHORT), flat, recomputed)  # a model is built anew where its values are
    assert times == 3 and not plan.total_bytes


def decided(
    planner: SearchingPlanner,
    lengths: StepLengths,
    running: ExecutionPlan,
    slower: dict[str, float],
    factors: Factors = MappingProxyType({}),
) -> tuple[Decision[ExecutionPlan], Factors]:
    predicted = question(lengths).estimates
    seconds = {c.name: slower.get(c.name, 1.0) * predicted.call_seconds(c.name, running[c.name]) for c in GRAPH.calls}
    decision, factors = planner(running, [MeasuredStep(5, lengths, seconds)], factors)
    return replace(decision, remaining=10**6), factors


@pytest.mark.slow
def test_a_search_corrects_the_running_plan_and_decides() -> None:
    alone = ExecutionPlan("alone", {call.name: ALONE for call in GRAPH.calls})
    planner = SearchingPlanner(question(SHORT), ReplanOptions(5, 0.01, 1e3), 0, lambda plan: plan)
    decision, factors = decided(planner, LONG, alone, {"actor_train": 4.0})
    assert factors["actor_train"]["one rank"] == pytest.approx(4.0)
    assert factors["critic_train"]["one rank"] == pytest.approx(1.0)
    assert not decision.verdict and decision.best_seconds < 0.99 * decision.running_seconds
    assert decision.switch_seconds > 0 and decision.nbytes > 0
    again, then = decided(planner, LONG, decision.best, {"actor_train": 4.0}, factors)
    assert again.verdict and then["actor_train"]["one rank"] == pytest.approx(4.0)  # of a layout that ran no more
