"""Simulated steps against clocks and memory that are written down by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.usp.planning.estimates import Simple, problem_of
from tests.usp.rlhf.toy import ppo
from usp.planning.rlhf_search import OptionSpace
from usp.planning.simulator import Simulation, Simulator
from usp.rlhf.plan.named_plans import Facts, named_plan
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.runtime.timeline import activities, critical_path

GRAPH = ppo()
FACTS = Facts(world_size=8, ranks_per_host=8, heads=8, layers=4)
SECONDS = {
    "actor_generate": 8.0,
    "actor_inference": 1.0,
    "critic_inference": 2.0,
    "ref_inference": 3.0,
    "reward_inference": 4.0,
    "advantages": 0.5,
    "actor_train": 5.0,
    "critic_train": 6.0,
}


def written(seconds: Mapping[str, float] = SECONDS) -> Any:
    """Estimates without layouts: a model has 10 bytes, an optimizer 100, a call 1; weights move in 0.25 s."""
    numbers = {"call_bytes": 1.0, "weight_bytes": 10.0, "state_bytes": 100.0}
    numbers |= dict.fromkeys(("fill_seconds", "load_seconds", "state_load_seconds"), 0.25)
    functions = {name: lambda *args, value=value: value for name, value in numbers.items()}
    return SimpleNamespace(call_seconds=lambda call, layout: seconds[call], **functions)


def simulated(plan: ExecutionPlan, depth: int = 0, seconds: Mapping[str, float] = SECONDS) -> Simulation:
    return Simulator(replace(GRAPH, depth=depth), written(seconds), 8).run(plan)


def test_calls_on_common_ranks_run_one_after_another() -> None:
    found = simulated(named_plan("flattening", GRAPH, FACTS))
    assert found.seconds == pytest.approx(sum(SECONDS.values()))
    # Weights of four roles, two optimizers, and one call; all calls share the trained copies.
    assert found.peak_bytes == 4 * 10 + 2 * 100 + 1


def test_calls_on_other_ranks_run_at_once() -> None:
    found = simulated(named_plan("interleaving", GRAPH, FACTS))
    assert found.seconds == pytest.approx(8 + 4 + 0.5 + 5 + 6)
    times = {event.name: (event.start, event.end) for event in found.events if event.end > event.start}
    assert times["reward_inference"] == (8, 12)
    assert times["ref_inference"] == (8, 11)
    parts = critical_path(activities(found.events))
    assert sum(part.end - part.start for part in parts) == pytest.approx(found.seconds)


def test_weights_move_between_disjoint_ranks() -> None:
    plan = named_plan("separation", GRAPH, replace(FACTS, zero=1))
    found = simulated(plan)
    assert found.seconds == pytest.approx(0.25 + 8 + 2 * 0.25 + 3 + 4 + 2 + 1 + 0.5 + 5 + 6)
    moves: dict[tuple[str, float], list[int]] = {}
    for event in found.events:
        if event.kind == "reallocate":
            moves.setdefault((event.name, event.start), []).append(event.rank)
    assert all(ranks == list(range(8)) for ranks in moves.values())
    # Ranks that train hold both trained copies, their optimizers and a call; the others fewer.
    assert found.peak_bytes == 2 * 10 + 2 * 100 + 1


def test_what_is_offloaded_takes_memory_while_it_is_loaded() -> None:
    plan = named_plan("flattening", GRAPH, FACTS)
    found = simulated(replace(plan, offload=frozenset({"ref", "reward", "actor.optimizer"})))
    assert found.seconds == pytest.approx(sum(SECONDS.values()) + 4 * 0.25 + 2 * 0.25)
    assert found.peak_bytes == 2 * 10 + 100 + 100 + 1  # while the actor trains


def test_stale_rollouts_run_beside_training() -> None:
    plan = named_plan("separation", GRAPH, replace(FACTS, zero=1))
    synchronous = simulated(plan).seconds
    found = simulated(plan, depth=1)
    assert found.seconds == pytest.approx(synchronous - (5 + 6))
    assert 30 <= simulated(plan, 1, SECONDS | {"actor_train": 30.0}).seconds < 8 + 4 + 0.5 + 30


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("world_size", "smallest"), [(16, 2), (3, 1)])
@pytest.mark.slow(but=1)
def test_a_schedule_made_for_another_plan_gives_the_same(world_size: int, smallest: int, depth: int) -> None:
    space = OptionSpace(world_size, 8, 64, smallest, max_sequence=2, zero=(0, 3))
    chance, graph = random.Random(0), replace(GRAPH, depth=depth)
    problem = problem_of(graph, space, {}, 1e9)
    one, choices = problem.simulator, problem.options
    for _ in range(40):
        calls = {name: chance.choice(layouts) for name, layouts in choices.items()}
        plan = ExecutionPlan("any", calls, frozenset({"ref"}) if chance.random() < 0.5 else frozenset())
        alone = Simulator(graph, Simple(), world_size).run(plan)  # type: ignore[arg-type]
        again = one.run(plan)
        assert (again.seconds, again.peak_bytes, again.events) == (alone.seconds, alone.peak_bytes, alone.events)
        slower = [*problem.alternatives(plan, "actor_train", lambda _: math.inf)]
        assert len(slower) == len(choices["actor_train"])
        assert plan in problem.alternatives(plan, "actor_train", lambda _, most=alone.seconds: most * (1 + 1e-12))
