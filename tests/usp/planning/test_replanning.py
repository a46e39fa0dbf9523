"""Predictions that a run corrects, and the plans that follow from them."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from tests.usp.planning.test_predictions import graph
from usp.hf.models import load_model_config, model_facts
from usp.hf.tensor_parallel import model_shape
from usp.parallel import Hardware, ParallelDims, load_hardware
from usp.planning.corrections import Corrections, Measured
from usp.planning.estimates import layout_key
from usp.planning.rlhf_question import RlhfQuestion
from usp.planning.run_plan import SearchingPlanner, moves
from usp.planning.workload import Workload
from usp.rlhf.plan.named_plans import Facts, flattening, separation
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.replanning import Factors, MeasuredStep, ReplanOptions
from usp.rlhf.runtime.measure import StepLengths
from usp.train.tuning import Decision

GRAPH, A100 = graph(), load_hardware("a100")
CONFIG = load_model_config("tiny")
MODELS = dict.fromkeys(GRAPH.roles, model_shape(model_facts("tiny", CONFIG), CONFIG))
FACTS = Facts(4, 8, 4, 2)
SHORT, LONG = (StepLengths((64,) * 32, (length,) * 32, 1) for length in (8, 256))


def question(lengths: StepLengths, hardware: Hardware = A100) -> RlhfQuestion:
    workload = Workload(lengths.prompts, lengths.responses, 1, 256)
    return RlhfQuestion(graph=GRAPH, models=MODELS, workload=workload, hardware=hardware, world_size=4)


ALONE = CallLayout((0,), ParallelDims(dp_shard=1))


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
    two, zero = CallLayout((0, 1), ParallelDims(dp_shard=2)), CallLayout((0, 1), ParallelDims(dp_shard=2), zero=1)
    found = Corrections({"train": {"one rank": 2.0, layout_key(two): 3.0}})
    assert found.of("train", layout_key(two)) == found.of("train", layout_key(zero)) == 3.0
    assert found.of("train", layout_key(replace(ALONE, ranks=(3,)))) == 2.0
    assert found.of("other", layout_key(two)) is None


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
