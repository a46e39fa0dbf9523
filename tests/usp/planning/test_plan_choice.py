"""Chosen plans beside the named ones, and what is said about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.usp.planning.estimates import problem_of
from tests.usp.rlhf.toy import ppo
from usp.model.facts import ModelFacts
from usp.planning.rlhf_question import RlhfChoice, choose_plan
from usp.planning.rlhf_search import OptionSpace, Problem, baselines
from usp.rlhf.plan.named_plans import Facts
from usp.rlhf.plan.plan import from_mapping, to_mapping

GRAPH = ppo()
MODELS = {role: ModelFacts("", 8, 8, 16, 256, (0,) * 4) for role in GRAPH.roles}
SPACE = OptionSpace(4, 2, 64, 2, zero=(0, 1), models=MODELS)
FACTS = Facts(4, 2, heads=8, layers=4)


def problem(memory: float) -> Problem:
    size = {"actor": 8.0, "ref": 8.0, "critic": 1.0, "reward": 1.0}
    return problem_of(GRAPH, SPACE, size, memory, offload=("ref", "reward"))


def fitting(memory: float) -> Problem:
    return problem(memory).that_fit()


@pytest.fixture(scope="module")
def choice() -> RlhfChoice:
    return choose_plan(fitting(24.0), SPACE, FACTS, report=lambda seconds, simulated, best: None)


@pytest.mark.slow
def test_the_chosen_plan_is_as_fast_as_any_other_that_was_looked_at(choice: RlhfChoice) -> None:
    seconds, plan = choice.found.best[0]
    assert choice.simulation.seconds == pytest.approx(seconds)
    plan.check(GRAPH, 4)
    assert from_mapping(to_mapping(plan)).calls == plan.calls
    for one in choice.named:
        assert one.plan
        assert one.peak_bytes > 24.0 or one.seconds >= seconds
    for name in choice.problem.options:
        for other in choice.problem.alternatives(plan, name, lambda _: seconds):
            step = choice.problem.simulator.run(other)
            assert step.seconds >= seconds or step.peak_bytes > 24.0


def test_named_plans_get_the_degrees_that_serve_them_best() -> None:
    much, little = ({one.name: one for one in baselines(fitting(memory), SPACE, FACTS)} for memory in (1e9, 20.0))
    assert list(much) == ["heuristic", "flattening", "interleaving", "separation"]
    assert much["heuristic"] == little["heuristic"]  # it has no choice
    assert much["flattening"].seconds < little["flattening"].seconds
    assert little["flattening"].peak_bytes <= 20.0
    tight = {one.name: one for one in baselines(replace(fitting(1e9), memory_bytes=1.0), SPACE, FACTS)}
    assert tight["flattening"].peak_bytes <= little["flattening"].peak_bytes


def test_layouts_that_are_not_predicted_in_time_are_left_out() -> None:
    whole = problem(24.0)
    layouts = whole.options
    told: list[tuple[int, int]] = []
    hurried = whole.that_fit(until=0.0, report=lambda tried, every: told.append((tried, every)))
    assert 0 < told[-1][0] < told[-1][1] == sum(map(len, layouts.values()))
    complete = whole.that_fit()
    assert all(0 < len(hurried.options[name]) < len(complete.options[name]) for name in layouts if name != "advantages")
    assert all(set(hurried.options[name]) <= set(complete.options[name]) <= set(layouts[name]) for name in layouts)
    late = choose_plan(hurried, SPACE, FACTS, budget=0.0, report=lambda seconds, simulated, best: None)
    assert late.simulation.peak_bytes <= 24.0  # found among the named plans
