"""Two steps of algorithms that differ in their calls, with real models: in mixed layouts the same as on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parallel import ParallelDims, ParallelMesh, ProcessGroups
from parallel.testing import RankPool
from usp.engines.base import AdamW
from usp.hf.models import scalar_config
from usp.rlhf.algorithms.graphs import build_graph, stateful
from usp.rlhf.algorithms.options import (
    DPO,
    GRPO,
    PPO,
    Options,
    ReMax,
    dapo,
)
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.copies import Moving
from usp.rlhf.dataflow import DataflowGraph
from usp.rlhf.executor import Executor
from usp.rlhf.generate import Generator
from usp.rlhf.graph import Compute, Generate, ModelCall, TrainStep
from usp.rlhf.models import RoleModel
from usp.rlhf.plan import CallLayout, ExecutionPlan
from usp.rlhf.samples import Samples
from usp.rlhf.spec import RoleSpec

from ..tiny import ADAM_EPS, CONFIGS, LEARNING_RATE, MAX_NORM, VOCAB

PROMPTS, STEPS = 6, 2
SCALAR = ("critic", "reward")


def share_of_odd_tokens(prompt: list[int], response: list[int], answer: float) -> float:
    return sum(token % 2 for token in response) / 8 + answer / 10


FUNCTION = ScoreWith(share_of_odd_tokens, list, float)
GROUP = Generate(group_size=2, max_new_tokens=6, temperature=0.8, stop_ids=tuple(range(8)))
ONE = replace(GROUP, group_size=1)
ALGORITHMS: dict[str, tuple[str, Options]] = {
    "dpo": ("dpo", DPO(beta=0.5, epochs=2)),
    "ppo": ("ppo", PPO(generate=GROUP, lam=0.9, kl_target=1.0, kl_horizon=50, mini_batches=3)),
    "grpo": ("grpo", replace(dapo(GRPO(generate=GROUP, reward=FUNCTION, mini_batches=2)), kl=0.1, entropy_bonus=0.01)),
    "remax": ("remax", ReMax(generate=ONE, reward=FUNCTION, mini_batches=2)),
}


def one_rank(graph: DataflowGraph) -> ExecutionPlan:
    return ExecutionPlan("one rank", {c.name: CallLayout((0,), ParallelDims(dp_shard=1)) for c in graph.calls})


def mixed(graph: DataflowGraph) -> ExecutionPlan:
    """Generation and functions over data, training over sequences, inference on three ranks and on one."""

    def layout(call: ModelCall) -> CallLayout:
        if isinstance(call.work, Generate):
            return CallLayout((0, 1, 2, 3), ParallelDims(dp_shard=2, tp=2))
        if isinstance(call.work, TrainStep):
            dims = ParallelDims(ulysses=2, dp_shard=2) if call.role == "actor" else ParallelDims(ring=2, dp_shard=2)
            return CallLayout((0, 1, 2, 3), dims, zero=3, micro_batch_tokens=24)
        if isinstance(call.work, Compute):
            return CallLayout((1, 2, 3), ParallelDims(dp_shard=3))
        return CallLayout((1, 2, 3), ParallelDims(dp_shard=3), micro_batch_tokens=30)

    return ExecutionPlan("mixed", {call.name: layout(call) for call in graph.calls})


def build_role(call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> RoleModel:
    config = CONFIGS["llama"]()
    spec = RoleSpec(
        call.role,
        "tiny",
        scalar_config(config) if call.role in SCALAR else config,
        seed=len(call.role),
        optimizer=AdamW(0.1, eps=ADAM_EPS),
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_NORM,
    )
    return RoleModel(
        spec,
        layout,
        mesh,
        trained=isinstance(call.work, TrainStep),
        make_generator=lambda role: Generator(role.stage.model, mesh, first=role.stage.first, last=role.stage.last),
    )


def given(graph: DataflowGraph, step: int) -> Samples:
    draw = torch.Generator().manual_seed(step)
    ids = [torch.randint(8, VOCAB, (3 + (5 * i + step) % 11,), generator=draw) for i in range(PROMPTS)]
    masks = [(torch.arange(len(x)) >= 1).float() * (torch.arange(len(x)) < len(x) - 1) for x in ids]
    indices = [torch.tensor(i) for i in range(PROMPTS)]
    values = {"prompt_ids": ids, "prompt_index": indices, "tokens": ids, "mask": masks}
    return Samples(tuple(range(PROMPTS)), values).only(graph.given)


def run_steps() -> dict[tuple[str, str], tuple[list[dict[str, float]], dict[str, Tensor], dict[str, dict[str, float]]]]:
    """By algorithm and plan: metrics of each step, summed weights, what functions remember on this rank."""
    groups, found = ProcessGroups(), {}
    for name, (algorithm, options) in ALGORITHMS.items():
        for plan_of in (one_rank, mixed):
            graph = build_graph(algorithm, options)
            plan = plan_of(graph)
            made = Executor(graph, plan, groups, build_role, torch.device("cpu"), moving=Moving(ranks_per_host=4))
            metrics = [made.run_step(given(graph, step), number=step, seed=step).metrics for step in range(STEPS)]
            weights = {
                f"{role}.{key}": getattr(weight, "full_tensor", lambda weight=weight: weight)().clone()
                for role, model in made.trained.items()
                for key, weight in model.weights().items()
            }
            states = {call: function.state_dict() for call, function in stateful(graph).items()}
            found[name, plan.name] = (metrics, weights, states)
    return found


def test_mixed_layouts_make_the_steps_of_one_rank(ranks: RankPool) -> None:
    found = ranks.run(run_steps, 4, timeout=300)
    for name in ALGORITHMS:
        metrics, weights, states = found[0][name, "one rank"]
        for rank in range(4):
            other_metrics, other_weights, other_states = found[rank][name, "mixed"]
            for mine, theirs in zip(other_metrics, metrics, strict=True):
                assert mine == pytest.approx(theirs, abs=2e-5), name
                assert theirs.get("logprob_difference_max", 0.0) < 1e-5
                assert any(number > 1 for key, number in theirs.items() if key.endswith("/optimizer_steps")), name
            for key, weight in other_weights.items():
                torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-5, msg=f"{name}: {key}")
            if rank:  # rank 0 has no functions
                for call, state in states.items():
                    assert other_states[call] == pytest.approx(state, rel=1e-5), name
