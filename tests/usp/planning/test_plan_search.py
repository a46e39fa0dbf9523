"""Searched plans against all plans of small spaces, and the layouts of calls: as many as ReaL has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.rlhf.real_search import real_space
from tests.usp.planning.estimates import Simple, every_plan, problem_of
from tests.usp.rlhf.toy import ppo
from usp.model.facts import ModelFacts
from usp.planning.rlhf_question import RlhfChoice, choose_plan
from usp.planning.rlhf_search import OptionSpace, Problem, baselines, options, search
from usp.planning.simulator import Simulator
from usp.rlhf.plan.named_plans import Facts, named_plan
from usp.rlhf.plan.plan import from_mapping, staleness_violations, to_mapping

GRAPH, FOUR = ppo(), ppo(mini_batches=4)
SIZES = {"actor": 4.0, "ref": 4.0, "critic": 1.0, "reward": 1.0}


def problem(memory: float, smallest: int = 2) -> Problem:
    """Every call on two or all of four ranks, without pipelines, five of them with tp alone."""
    given = problem_of(GRAPH, OptionSpace(4, 4, 64, smallest, max_tp=2), SIZES, memory)
    found = {name: [o for o in layouts if o.dims.pp == 1] for name, layouts in given.options.items()}
    found["advantages"] = found["advantages"][-1:]
    for name in ("critic_train", "critic_inference", "reward_inference", "ref_inference", "actor_inference"):
        found[name] = [o for o in found[name] if o.dims.tp == 2]
    return replace(given, options=found)


def optimum(of: Problem) -> float:
    steps = map(of.simulator.run, every_plan(of))
    return min(step.seconds for step in steps if step.peak_bytes <= of.memory_bytes)


@pytest.fixture(scope="module")
def small() -> tuple[Problem, float]:
    return problem(memory=16.0), optimum(problem(memory=16.0))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.slow(full=3)
def test_the_search_finds_the_optimum(small: tuple[Problem, float], seed: int) -> None:
    given, least = small
    assert search(given, seed=seed, budget=60).best[0][0] == pytest.approx(least)


def test_the_search_never_ends_above_a_plan_that_it_starts_from() -> None:
    given = problem(memory=60.0, smallest=4)
    plan = named_plan("interleaving", GRAPH, Facts(4, 4, heads=8, layers=4))
    found = search(given, starts=[plan], budget=0.0)
    assert found.best[0][0] <= given.simulator.run(plan).seconds
    best = search(given, starts=[plan]).best
    assert [energy for energy, _ in best] == sorted(energy for energy, _ in best)
    for energy, one in best:
        assert given.simulator.run(one).seconds == pytest.approx(energy)


@pytest.mark.slow
def test_less_memory_needs_a_slower_plan_or_offloading(small: tuple[Problem, float]) -> None:
    assert small[1] < optimum(problem(15.0))
    too_little = problem(14.0, smallest=4)
    found = search(too_little)
    assert not found.best and found.nearest
    assert found.nearest[0] <= min(too_little.simulator.run(plan).peak_bytes for plan in every_plan(too_little)) * 1.25
    both = ("ref", "critic.optimizer")
    assert search(replace(too_little, offload=both)).best[0][1].offload == set(both)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_search_whose_starts_do_not_fit_begins_where_calls_need_least(depth: int) -> None:
    space, graph = OptionSpace(4, 4, 64, 2, zero=(0, 1), max_tp=2), replace(GRAPH, depth=depth)
    names = ("ref", "reward", "actor.optimizer", "critic.optimizer")
    given = problem_of(graph, space, SIZES, 1e9, offload=names)
    tight = given.tightest()
    assert not any(staleness_violations(graph, tight))
    needed = given.simulator.run(tight).peak_bytes
    assert search(replace(given, memory_bytes=needed), budget=0.0).best[0][1] == tight
    assert not search(replace(given, memory_bytes=0.99 * needed), budget=0.0).best


def test_rollouts_beside_training_have_ranks_of_their_own() -> None:
    given, graph = problem(memory=60.0), replace(GRAPH, depth=1)
    two = [layout for layout in options(GRAPH["advantages"], OptionSpace(4, 4, 64, 2)) if len(layout.ranks) == 2]
    simulator = Simulator(graph, Simple(SIZES), 4)  # type: ignore[arg-type]
    given = replace(given, options={**given.options, "advantages": two}, simulator=simulator)
    found = search(given, budget=2.0)
    assert found.best and not any(any(staleness_violations(graph, plan)) for _, plan in found.best)


@pytest.mark.parametrize(("hosts", "inference", "train"), [(8, 520, 356), (16, 2095, 1147)])
def test_as_many_are_left_after_the_filters_of_real(hosts: int, inference: int, train: int) -> None:
    space = real_space(8 * hosts, samples=512)
    for name in ("actor_generate", "ref_inference"):
        assert len(list(options(FOUR[name], space))) == inference
    assert len(list(options(FOUR["actor_train"], space))) == train


def test_options_are_valid_plans_for_any_number_of_ranks() -> None:
    models = {role: ModelFacts("", 6, 6, 16, 256, (0,) * 3) for role in FOUR.roles}
    space = OptionSpace(12, 6, 64, max_sequence=4, zero=(0, 1, 3), recompute=(("none", False), ("full", True)))
    space = replace(space, models=models)
    found = {call.name: list(options(call, space)) for call in FOUR.calls}
    for name, layouts in found.items():
        assert len(set(layouts)) == len(layouts), name
        for layout in layouts:
            assert layout.dims.resolve(len(layout.ranks)) == layout.dims
            assert 6 % layout.dims.tp == 0
            assert layout.dims.tp * layout.dims.ulysses <= 6
            assert layout.dims.pp <= 3
    trained = found["actor_train"]
    assert {layout.zero for layout in trained} == {0, 1, 3}
    assert {layout.dims.sp for layout in trained} == {1, 2, 3, 4}
    assert {layout.zero for layout in found["actor_generate"]} == {0}
    assert {len(layout.ranks) for layout in trained} == {1, 2, 3, 6, 12}


# Chosen plans beside the named ones

MODELS = {role: ModelFacts("", 8, 8, 16, 256, (0,) * 4) for role in GRAPH.roles}
NAMED_SPACE, NAMED_FACTS = OptionSpace(4, 2, 64, 2, zero=(0, 1), models=MODELS), Facts(4, 2, heads=8, layers=4)


def named_problem(memory: float) -> Problem:
    size = {"actor": 8.0, "ref": 8.0, "critic": 1.0, "reward": 1.0}
    return problem_of(GRAPH, NAMED_SPACE, size, memory, offload=("ref", "reward"))


def fitting(memory: float) -> Problem:
    return named_problem(memory).that_fit()


@pytest.fixture(scope="module")
def choice() -> RlhfChoice:
    return choose_plan(fitting(24.0), NAMED_SPACE, NAMED_FACTS, report=lambda seconds, simulated, best: None)


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
    much, little, tight = (
        {one.name: one for one in baselines(of, NAMED_SPACE, NAMED_FACTS)}
        for of in (fitting(1e9), fitting(20.0), replace(fitting(1e9), memory_bytes=1.0))
    )
    assert list(much) == ["heuristic", "flattening", "interleaving", "separation"]
    assert much["heuristic"] == little["heuristic"]  # it has no choice
    assert much["flattening"].seconds < little["flattening"].seconds
    assert little["flattening"].peak_bytes <= 20.0
    assert tight["flattening"].peak_bytes <= little["flattening"].peak_bytes


def test_layouts_that_are_not_predicted_in_time_are_left_out() -> None:
    whole = named_problem(24.0)
    layouts = whole.options
    told: list[tuple[int, int]] = []
    hurried = whole.that_fit(until=0.0, report=lambda tried, every: told.append((tried, every)))
    assert 0 < told[-1][0] < told[-1][1] == sum(map(len, layouts.values()))
    complete = whole.that_fit()
    assert all(0 < len(hurried.options[name]) < len(complete.options[name]) for name in layouts if name != "advantages")
    assert all(set(hurried.options[name]) <= set(complete.options[name]) <= set(layouts[name]) for name in layouts)
    late = choose_plan(hurried, NAMED_SPACE, NAMED_FACTS, budget=0.0, report=lambda seconds, simulated, best: None)
    assert late.simulation.peak_bytes <= 24.0  # found among the named plans
