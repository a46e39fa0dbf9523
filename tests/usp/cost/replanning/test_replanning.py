"""Predictions that a run corrects, and the plans that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel import Hardware, Link, ParallelDims, load_hardware
from tests.usp.cost.rlhf.test_predictions import graph
from usp.cost.calls.workload import Workload
from usp.cost.replanning.corrected import CallSeconds, CorrectedEstimates, Corrections, over_fast_links
from usp.cost.replanning.plan_decision import SearchingPlanner
from usp.cost.replanning.switching import move_bytes, move_seconds, moves
from usp.cost.rlhf.question import Question
from usp.hf.models import load_model_config, model_facts
from usp.hf.shapes import model_shape
from usp.rlhf.plan.named_plans import Facts, flattening, separation
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.replan.measured_steps import MeasuredStep
from usp.rlhf.replan.replan_options import ReplanOptions
from usp.rlhf.runtime.step_lengths import StepLengths

GRAPH, A100 = graph(), load_hardware("a100")
CONFIG = load_model_config("tiny")
MODELS = dict.fromkeys(GRAPH.roles, model_shape(model_facts("tiny", CONFIG), CONFIG))
FACTS = Facts(4, 8, 4, 2)
SHORT, LONG = (StepLengths((64,) * 32, (length,) * 32, 1) for length in (8, 256))


def question(lengths: StepLengths, hardware: Hardware = A100) -> Question:
    return Question(GRAPH, MODELS, Workload(lengths.prompts, lengths.responses, 1, 256), hardware, 4)


def test_corrections_follow_the_median_of_the_steps_halfway() -> None:
    measured = [{"train": 2.0, "reward": 0.5}, {"train": 8.0, "reward": 0.7}, {"train": 2.0, "reward": 0.5}]
    predicted = [{"train": CallSeconds(1.0, 0.0)}] * 3
    first = Corrections().after(measured, predicted)
    assert first.factors == {"train": CallSeconds(pytest.approx(2.0), 1.0)} and first.seconds == {"reward": 0.5}
    then = first.after([{"train": 8.0, "reward": 0.5}], predicted[:1])
    assert then.factors["train"].computation == pytest.approx(4.0) and then.seconds["reward"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("predicted", "factors"),
    [
        (CallSeconds(1.0, 0.0), CallSeconds(1.5, 1.0)),
        (CallSeconds(0.0, 1.0), CallSeconds(1.0, 1.5)),
        (CallSeconds(1.0, 1.0), CallSeconds(1.5, 1.5)),
    ],
)
def test_the_larger_part_of_a_call_explains_what_it_takes(predicted: CallSeconds, factors: CallSeconds) -> None:
    found = Corrections().after([{"train": 1.5 * predicted.total}], [{"train": predicted}]).factors["train"]
    assert found == pytest.approx(factors)


def test_plans_in_turn_tell_computation_from_communication() -> None:
    true, found = CallSeconds(1.5, 0.5), Corrections()
    for predicted in (CallSeconds(2.0, 0.0), CallSeconds(1.0, 3.0)) * 20:
        found = found.after([{"train": predicted.times(true).total}], [{"train": predicted}])
    assert found.factors["train"] == pytest.approx(true, rel=0.01)


def test_corrected_estimates_change_the_seconds_of_calls_alone() -> None:
    layout = flattening(GRAPH, FACTS)["actor_train"]
    slow = question(SHORT, replace(A100, tiers=(replace(A100.tiers[0], gather=Link(1e-3, 1e6)), *A100.tiers[1:])))
    exact, computation = slow.estimates, question(SHORT, over_fast_links(A100)).estimates
    learned = Corrections({"actor_train": CallSeconds(3.0, 2.0)}, {"advantages": 0.25})
    corrected = CorrectedEstimates(exact, computation, learned)
    total, alone = exact.call_seconds("actor_train", layout), computation.call_seconds("actor_train", layout)
    assert 0 < alone < 0.5 * total
    assert corrected.call_seconds("actor_train", layout) == pytest.approx(3 * alone + 2 * (total - alone))
    assert corrected.call_seconds("advantages", layout) == 0.25
    for name in ("critic_train", "actor_inference"):
        assert corrected.call_seconds(name, layout) == pytest.approx(exact.call_seconds(name, layout))
    assert corrected.call_bytes("actor_train", layout) == exact.call_bytes("actor_train", layout)


def test_a_change_moves_what_trains_three_times_and_what_stays_not_at_all() -> None:
    flat, apart = flattening(GRAPH, FACTS), separation(GRAPH, FACTS)
    assert not list(moves(GRAPH, flat, flat, MODELS, torch.bfloat16, 8))
    numel, found = MODELS["actor"].numel, list(moves(GRAPH, apart, flat, MODELS, torch.bfloat16, 8))
    # Ranks 2 and 3 trained: 0 and 1 get weights and moments of actor and critic, 2 and 3 the weights of ref and reward.
    assert move_bytes(found) == 2 * (2 * 3 * 4 * numel + 2 * 2 * numel)
    assert move_seconds(found, A100) > 0
    recomputed = replace(flat, calls={**flat.calls, "actor_train": replace(flat["actor_train"], ac="full")})
    (move,) = moves(GRAPH, flat, recomputed, MODELS, torch.bfloat16, 8)  # a model is built anew where its values are
    assert move.times == 3 and not move.plan.total_bytes


def decided(lengths: StepLengths, running: ExecutionPlan, slower: dict[str, float]) -> tuple[SearchingPlanner, object]:
    planner = SearchingPlanner(question, ReplanOptions(5, 0.01, 2.0), 0, lambda plan: plan)
    predicted = question(lengths).estimates
    seconds = {c.name: slower.get(c.name, 1.0) * predicted.call_seconds(c.name, running[c.name]) for c in GRAPH.calls}
    return planner, planner.decide(running, [MeasuredStep(5, lengths, seconds)], 10**6, 0.5)


def test_a_search_corrects_the_running_plan_and_decides() -> None:
    layout = CallLayout((0,), ParallelDims(dp_shard=1))
    alone = ExecutionPlan("alone", {call.name: layout for call in GRAPH.calls})
    planner, decision = decided(LONG, alone, {"actor_train": 4.0})
    assert planner.corrections.factors["actor_train"] == pytest.approx((4.0, 1.0))
    assert planner.corrections.factors["critic_train"] == pytest.approx((1.0, 1.0))
    assert decision.switches and decision.best_seconds < 0.99 * decision.running_seconds
    assert decision.cost.build_seconds == 0.5 and decision.cost.nbytes > 0 and not decision.why_not
    _, again = decided(LONG, decision.best, {"actor_train": 4.0})
    assert not again.switches
