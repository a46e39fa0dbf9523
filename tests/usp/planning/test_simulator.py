"""Simulated steps against clocks and memory that are written down by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from tests.usp.planning.estimates import Simple
from tests.usp.rlhf.toy import ppo
from usp.planning.rlhf_search import OptionSpace, Problem, options
from usp.planning.simulator import Simulation, Simulator
from usp.rlhf.plan.named_plans import Facts, named_plan
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
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


@dataclass(frozen=True)
class Written:
    """Estimates without layouts: a model has 10 bytes, an optimizer 100, a call 1; weights move in 0.25 s."""

    seconds: Mapping[str, float] = field(default_factory=lambda: SECONDS, hash=False)

    def call_seconds(self, call: str, layout: CallLayout) -> float:
        return self.seconds[call]

    def call_bytes(self, call: str, layout: CallLayout) -> float:
        return 1.0

    def weight_bytes(self, copy: WeightCopy) -> float:
        return 10.0

    def state_bytes(self, copy: WeightCopy) -> float:
        return 100.0

    def fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        return 0.25

    def load_seconds(self, copy: WeightCopy) -> float:
        return 0.25

    def state_load_seconds(self, copy: WeightCopy) -> float:
        return 0.25


def simulated(plan: ExecutionPlan, depth: int = 0) -> Simulation:
    return Simulator(replace(GRAPH, depth=depth), Written(), 8).run(plan)


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
    longer = Written(SECONDS | {"actor_train": 30.0})
    simulator = Simulator(replace(GRAPH, depth=1), longer, 8)  # type: ignore[arg-type]
    assert 30 <= simulator.run(plan).seconds < 8 + 4 + 0.5 + 30


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("world_size", "smallest"), [(16, 2), (3, 1)])
@pytest.mark.slow(but=1)
def test_a_schedule_made_for_another_plan_gives_the_same(world_size: int, smallest: int, depth: int) -> None:
    space = OptionSpace(world_size, 8, 64, smallest, max_sequence=2, zero=(0, 3))
    choices = {call.name: list(options(call, space)) for call in GRAPH.calls}
    chance, graph = random.Random(0), replace(GRAPH, depth=depth)
    one = Simulator(graph, Simple(), world_size)  # type: ignore[arg-type]
    problem = Problem(one, choices, 1e9)
    for _ in range(40):
        calls = {name: chance.choice(layouts) for name, layouts in choices.items()}
        plan = ExecutionPlan("any", calls, frozenset({"ref"}) if chance.random() < 0.5 else frozenset())
        alone = Simulator(graph, Simple(), world_size).run(plan)  # type: ignore[arg-type]
        again = one.run(plan)
        assert (again.seconds, again.peak_bytes, again.events) == (alone.seconds, alone.peak_bytes, alone.events)
        slower = [*problem.alternatives(plan, "actor_train", lambda _: math.inf)]
        assert len(slower) == len(choices["actor_train"])
        assert plan in problem.alternatives(plan, "actor_train", lambda _, most=alone.seconds: most * (1 + 1e-12))
