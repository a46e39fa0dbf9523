"""Runs whose plan changes between steps, compared with one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.usp.rlhf.test_ahead import AHEAD, STEPS, executor_of, run_alone, shown_of
from tests.usp.rlhf.test_numerics import (
    ALGORITHMS,
    Result,
    Steps,
    builder,
    check,
    facts,
    given,
    plan_of,
    run,
    weights_of,
)
from tests.usp.tiny import VOCAB
from usp.parallel import ParallelDims, ProcessGroups
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.graph import DataflowGraph
from usp.rlhf.plan.named_plans import separation
from usp.rlhf.plan.plan import ExecutionPlan, optimizer_of
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor, StepInput
from usp.rlhf.runtime.rollouts import RolloutOptions
from usp.rlhf.samples import Samples

PROMPTS = [prompt for step in range(1, 5) for prompt in given("grpo", step)["prompt_ids"]]
OFFLOADED = "separation, offloaded"
# From ZeRO 3 over ulysses and ring, to ZeRO 1 on half of the ranks, offloaded, and to pipelines with tp on all of them.
SEQUENCE = ("generate tp4, train u2 r2", OFFLOADED, "tp2 pp2")
MORE = {
    "ppo": [SEQUENCE, ("flattening", "separation", "interleaving"), ("heuristic", OFFLOADED, "u2 r2 tp2")],
    "grpo": [("interleaving", "tp2 pp2", "flattening")],
    "dpo": [("flattening", "heuristic", "u2 r2 tp2")],
    "remax": [("u2 r2 tp2", "separation", "flattening")],
}


def plan_named(name: str, graph: DataflowGraph) -> ExecutionPlan:
    if name != OFFLOADED:
        return plan_of(name, graph)
    plan = separation(graph, facts(dims=ParallelDims(ring=2), zero=1))
    untrained = set(graph.roles) - set(graph.trained_roles)
    return replace(plan, name=name, offload=frozenset({*untrained, *map(optimizer_of, graph.trained_roles)}))


def run_switching(algorithm: str, plans: tuple[str, ...]) -> Result:
    """Like `run`, each step under another plan."""
    graph = build_graph(algorithm, ALGORITHMS[algorithm])
    executor = executor_of(graph, plan_named(plans[0], graph), {})
    told: Steps = []
    for number, plan in enumerate(plans, start=1):
        if number > 1:
            executor.change_plan(plan_named(plan, graph))
        result = executor.run_step(given(algorithm, number), number, seed=number)
        if result.samples is not None:
            told.append((result.metrics, {key: list(result.samples[key]) for key in shown_of(graph)}))
    return told, trained_weights(executor)


def trained_weights(executor: Executor) -> dict[str, torch.Tensor]:
    return weights_of({role: model for role, model in executor.copies.trained.items() if isinstance(model, RoleModel)})


def run_ahead_switching(name: str) -> Result:
    """Like `run_ahead`, with samples in flight when the plan changes."""
    graph = build_graph(*AHEAD[name])
    executor = executor_of(graph, plan_of("separation", graph), {})

    def asked(number: int) -> StepInput:
        return StepInput(given(name, number), number, seed=number)

    assert executor.run(asked(1)) is None
    told: Steps = []
    for number in range(1, STEPS + 1):
        changed = facts(dims=ParallelDims(tp=2), rollout_dims=ParallelDims(ulysses=2), zero=1)
        executor.change_plan(separation(graph, changed) if number % 2 else plan_of("separation", graph))
        result = executor.run(asked(number + 1) if number < STEPS else None)
        assert result is not None
        if result.samples is not None:
            told.append((result.metrics, {key: list(result.samples[key]) for key in shown_of(graph)}))
    return told, trained_weights(executor)


def run_begun(switches: bool) -> Result:
    """Steps that take the prompts that are complete first, while the others go on: under one plan, or in turn under two
    in which as many data-parallel ranks generate."""
    name, options = AHEAD["corrected"]
    generate = replace(options.generate, partial=True, max_new_tokens=12, stop_ids=tuple(range(0, VOCAB, 9)))
    graph = build_graph(name, replace(options, generate=generate))
    plans = [plan_of("separation", graph)]
    plans.append(separation(graph, facts(dims=ParallelDims(tp=2), rollout_dims=ParallelDims(ulysses=2), zero=1)))

    def draw(tickets: Sequence[int]) -> Samples:
        indices = [torch.tensor(ticket) for ticket in tickets]
        prompts = [PROMPTS[ticket] for ticket in tickets]
        return Samples(tuple(tickets), {"prompt_ids": prompts, "prompt_index": indices})

    rollouts = RolloutOptions(4, 1.5, 2, STEPS + 2, draw, seed=3)
    copies = CopyOptions(ProcessGroups(), builder({}), torch.device("cpu"), 4)
    executor = Executor(graph, plans[0], copies, collect=shown_of(graph), rollouts=rollouts)
    told: Steps = []
    left = []
    for number in range(1, STEPS + 4):
        assert executor.rollouts is not None
        left.append(
            sum(tokens for of in executor.rollouts.states.values() for tokens, complete, *_ in of if not complete)
        )
        if switches and number > 1:
            executor.change_plan(plans[number % 2])
        new = StepInput(draw(()), number, seed=number) if number <= STEPS + 2 else None
        result = executor.run(new)
        if result is not None and result.samples is not None:
            told.append((result.metrics, {key: list(result.samples[key]) for key in shown_of(graph)}))
    assert any(left)  # responses were begun, and not complete, when the plan changed
    return told, trained_weights(executor)


def run_both(sequences: dict[str, list[tuple[str, ...]]], ahead: tuple[str, ...]) -> dict[str, Result]:
    found = {f"{name} ahead": run_ahead_switching(name) for name in ahead}
    found |= {f"{name} ahead, alone": run_alone(name) for name in ahead}
    found |= {"begun": run_begun(switches=True), "begun alone": run_begun(switches=False)}
    for algorithm, of in sequences.items():
        found[f"{algorithm} alone"] = run(algorithm, "alone", len(of[0]), ProcessGroups())
        found |= {f"{algorithm}, {plans}": run_switching(algorithm, plans) for plans in of}
    return found


@pytest.mark.slow
def test_switching_changes_nothing(ranks: RankPool, exhaustive: bool) -> None:
    sequences = MORE if exhaustive else {}
    sequences = {**sequences, "grpo": [SEQUENCE, *sequences.get("grpo", ())]}
    ahead = ("ppo", "corrected", "dapo") if exhaustive else ("corrected",)
    results = ranks.run(run_both, 8 if exhaustive else 4, sequences, ahead, timeout=1200)
    for name in ahead:
        check(results, f"{name} ahead", f"{name} ahead, alone")
    steps, _ = results[0]["begun alone"]  # whose ranks that train are others
    weights = {name: weight for of_rank in results for name, weight in of_rank["begun alone"][1].items()}
    results[0]["begun alone"] = steps, weights
    check(results, "begun", "begun alone")
    for algorithm, of in sequences.items():
        for plans in of:
            check(results, f"{algorithm}, {plans}", f"{algorithm} alone")
