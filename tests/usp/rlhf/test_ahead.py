"""Steps with staleness 1 match one process that makes the samples of each step before the step before trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankPool
from tests.usp.rlhf.test_numerics import (
    ALGORITHMS,
    ONCE,
    Result,
    Steps,
    alone,
    builder,
    check,
    given,
    plan_of,
    weights_of,
)
from usp.hf.lora import Lora
from usp.parallel import ProcessGroups
from usp.rlhf.algorithms.critic_free import DAPO
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.graph import DataflowGraph, TrainStep
from usp.rlhf.plan.named_plans import policy_as_reference
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor, StepInput
from usp.rlhf.samples import Samples

STEPS = 2
AHEAD: dict[str, tuple[str, Any]] = {
    "corrected": ("grpo", replace(ONCE, staleness=1, rollout_is="sequence_truncate", rollout_is_threshold=1.001)),
    "masked": ("grpo", replace(ONCE, staleness=1, rollout_is="token_mask", rollout_is_threshold=1.001)),
    "by the ratio": ("grpo", replace(ONCE, staleness=1, rollout_is="none")),
    "dapo": (
        "dapo",
        DAPO(generate=ONCE.generate, reward=ONCE.reward, oversample=2, drop_equal_groups=True, staleness=1),
    ),
    "lora": ("grpo", replace(ONCE, staleness=1, kl=0.2)),
    "ppo": ("ppo", replace(ALGORITHMS["ppo"], staleness=1)),
    "remax": ("remax", replace(ALGORITHMS["remax"], staleness=1)),
}
CHOSEN = ("corrected", "lora")
LORA = Lora(rank=4, alpha=12, targets=("q_proj", "v_proj", "down_proj"))
SHOWN = ("tokens", "greedy_tokens", "old_logprobs", "advantages", "ref_logprobs")


def executor_of(
    graph: DataflowGraph, plan: ExecutionPlan, trained: dict[str, RoleModel], lora: Lora | None = None
) -> Executor:
    copies = CopyOptions(ProcessGroups(), builder(trained, lora=lora), torch.device("cpu"), 4)
    return Executor(graph, plan, copies, collect=shown_of(graph))


def begun(name: str, plan_name: str, depth: int) -> tuple[Executor, DataflowGraph, dict[str, RoleModel]]:
    """Return an executor, its graph and the models that it trains. With adapters, the reference is the policy."""
    graph, trained = replace(build_graph(*AHEAD[name]), depth=depth), dict[str, RoleModel]()
    plan = alone(graph) if plan_name == "alone" else plan_of(plan_name, graph)
    if name == "lora":
        calls = {
            call: replace(of, zero=0) if graph[call].kind == "inference" else of for call, of in plan.calls.items()
        }
        graph, plan = policy_as_reference(graph, replace(plan, calls=calls))
        assert "ref" not in graph.roles
    lora = LORA if name == "lora" else None
    return executor_of(graph, plan, trained, lora), graph, trained


def shown_of(graph: DataflowGraph) -> tuple[str, ...]:
    return tuple(key for key in SHOWN if key in graph.producers)


def run_ahead(name: str) -> Result:
    executor, graph, trained = begun(name, "separation", depth=1)

    def asked(number: int) -> StepInput:
        return StepInput(given(name, number), number, seed=number)

    assert executor.run(asked(1)) is None
    told: Steps = []
    for number in range(1, STEPS + 1):
        result = executor.run(asked(number + 1) if number < STEPS else None)
        assert result is not None
        if result.samples is not None:
            told.append((result.metrics, {key: list(result.samples[key]) for key in shown_of(graph)}))
    return told, weights_of(trained)


def run_alone(name: str) -> Result:
    """The same in one process, from steps of two graphs: one makes samples, the other trains on them."""
    whole, graph, trained = begun(name, "alone", depth=0)
    trains = tuple(call for call in graph.calls if isinstance(call.work, TrainStep))
    read = tuple(sorted({key for call in trains for key in call.inputs}))
    parts = (
        (DataflowGraph(graph.rollouts, graph.given, trains), alone(graph)),
        (trained_only := DataflowGraph(trains, read), alone(trained_only)),
    )
    keys = tuple(dict.fromkeys((*read, *shown_of(graph)))), ()
    making, training = (
        whole.another(*part, collect=of_part, progress=lambda doing: None)
        for part, of_part in zip(parts, keys, strict=True)
    )

    def make(number: int) -> tuple[dict[str, float], Samples]:
        result = making.run_step(given(name, number), number, seed=number)
        samples = [result.samples]
        dist.broadcast_object_list(samples, src=0)
        assert samples[0] is not None
        return result.metrics, samples[0]

    told: Steps = []
    made = [make(1)]
    for number in range(1, STEPS + 1):
        if number < STEPS:
            made.append(make(number + 1))
        metrics, samples = made[number - 1]
        losses = training.run_step(samples.only(read), number, seed=number).metrics
        told.append((metrics | losses, {key: list(samples[key]) for key in shown_of(graph)}))
    return told, weights_of(trained)


def run_both(names: tuple[str, ...]) -> dict[str, Result]:
    found = {name: run_ahead(name) for name in names}
    return found | {f"{name} alone": run_alone(name) for name in names}


@pytest.mark.slow
def test_steps_made_ahead_are_those_of_one_process(ranks: RankPool, exhaustive: bool) -> None:
    names = tuple(AHEAD) if exhaustive else CHOSEN
    results = ranks.run(run_both, 8 if exhaustive else 4, names, timeout=1200)
    for name in names:
        check(results, name, f"{name} alone")
    first, second = (metrics for metrics, _ in results[0]["corrected"][0])
    assert first["actor/rollout_is_max"] == pytest.approx(1, abs=1e-5)  # nothing has trained
    assert second["actor/rollout_is_max"] > 1.001 and 0 < second["actor/rollout_is_truncated_fraction"] < 1
    assert 0.9 < second["actor/rollout_is_eff_sample_size"] < 1
    assert second["actor/importance_ratio"] == pytest.approx(1, abs=1e-6)
    if exhaustive:
        assert results[0]["by the ratio"][0][1][0]["actor/importance_ratio"] != pytest.approx(1, abs=1e-5)
        assert results[0]["masked"][0][1][0]["actor/rollout_is_masked_fraction"] > 0
