"""Predictions that a run corrects, and the plans that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.usp.planning.test_predictions import graph
from usp.hf.models import load_model_config, model_facts
from usp.hf.tensor_parallel import model_shape
from usp.parallel import Hardware, ParallelDims, load_hardware
from usp.planning.estimates import Factors, factor_of, layout_key
from usp.planning.rlhf_question import RlhfQuestion
from usp.planning.run_plan import SearchingPlanner, learned, moves
from usp.planning.workload import Workload
from usp.rlhf.plan.named_plans import Facts, flattening, separation
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.replanning import Decision, MeasuredStep, ReplanOptions
from usp.rlhf.runtime.measure import StepLengths

GRAPH, A100 = graph(), load_hardware("a100")
CONFIG = load_model_config("tiny")
MODELS = dict.fromkeys(GRAPH.roles, model_shape(model_facts("tiny", CONFIG), CONFIG))
FACTS = Facts(4, 8, 4, 2)
SHORT, LONG = (StepLengths((64,) * 32, (length,) * 32, 1) for length in (8, 256))


def question(lengths: StepLengths, hardware: Hardware = A100) -> RlhfQuestion:
    workload = Workload(lengths.prompts, lengths.responses, 1, 256)
    return RlhfQuestion(graph=GRAPH, models=MODELS, workload=workload, hardware=hardware, world_size=4)


ONE = ExecutionPlan("one", dict.fromkeys(("train", "reward"), CallLayout((0,), ParallelDims(dp_shard=1))))


class Said:
    """Estimates that predict a second for every call."""

    def formula(self, call: str, layout: CallLayout) -> float:
        return 1.0


def after(factors: Factors, *measured: dict[str, float]) -> Factors:
    return learned(factors, ONE, [(seconds, Said()) for seconds in measured])  # type: ignore[misc]


def test_factors_follow_the_median_of_the_steps_halfway() -> None:
    first = after({}, {"train": 2.0}, {"train": 8.0}, {"train": 2.0})
    assert first == {"train": {"one rank": pytest.approx(2.0)}}
    then = after(first, {"train": 8.0, "reward": 0.5}, {"reward": 0.25})
    assert then == {"train": {"one rank": pytest.approx(4.0)}, "reward": {"one rank": pytest.approx(0.375)}}


def test_factors_change_only_the_seconds_of_calls() -> None:
    layout = flattening(GRAPH, FACTS)["actor_train"]
    key = layout_key(layout)
    factors = {"actor_train": {key: 3.0}, "advantages": {"one rank": 0.25}}
    exact = question(SHORT).estimates
    corrected = exact.with_factors(factors)
    assert corrected.call_seconds("actor_train", layout) == 3 * exact.call_seconds("actor_train", layout) > 0
    assert corrected.call_seconds("advantages", layout) == 0.25 and exact.call_seconds("advantages", layout) == 0
    for name in ("critic_train", "actor_inference"):
        assert corrected.call_seconds(name, layout) == pytest.approx(exact.call_seconds(name, layout))
    assert corrected.call_bytes("actor_train", layout) == exact.call_bytes("actor_train", layout)


def test_a_layout_that_was_not_measured_has_the_factor_of_the_most_similar_one() -> None:
    two, zero = CallLayout((0, 1), ParallelDims(dp_shard=2)), CallLayout((0, 1), ParallelDims(dp_shard=2), zero=1)
    factors = {"train": {"one rank": 2.0, layout_key(two): 3.0}}
    assert factor_of(factors, "train", two) == factor_of(factors, "train", zero) == 3.0
    assert factor_of(factors, "train", CallLayout((3,), ParallelDims(dp_shard=1))) == 2.0
    assert factor_of(factors, "other", two) is None


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
    planner: SearchingPlanner, lengths: StepLengths, running: ExecutionPlan, slower: dict[str, float]
) -> Decision:
    predicted = question(lengths).estimates
    seconds = {c.name: slower.get(c.name, 1.0) * predicted.call_seconds(c.name, running[c.name]) for c in GRAPH.calls}
    return planner(running, [MeasuredStep(5, lengths, seconds)], 10**6, 0.5)


@pytest.mark.slow
def test_a_search_corrects_the_running_plan_and_decides() -> None:
    layout = CallLayout((0,), ParallelDims(dp_shard=1))
    alone = ExecutionPlan("alone", {call.name: layout for call in GRAPH.calls})
    planner = SearchingPlanner(question, ReplanOptions(5, 0.01, 1e3), 0, lambda plan: plan)
    decision = decided(planner, LONG, alone, {"actor_train": 4.0})
    assert planner.factors["actor_train"]["one rank"] == pytest.approx(4.0)
    assert planner.factors["critic_train"]["one rank"] == pytest.approx(1.0)
    assert decision.switches and decision.best_seconds < 0.99 * decision.running_seconds
    assert decision.build_seconds == 0.5 and decision.nbytes > 0 and not decision.why_not
    assert not decided(planner, LONG, decision.best, {"actor_train": 4.0}).switches
