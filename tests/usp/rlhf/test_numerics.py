"""Real steps of real algorithms under plans of all kinds, compared with one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import tiny_config
from tests.usp.rlhf.roles.test_role_model import ADAM, config_of
from tests.usp.tiny import CONFIGS, LEARNING_RATE, VOCAB
from usp.hf.disk import persistent_buffers
from usp.hf.lora import Lora
from usp.parallel import ParallelDims, ParallelMesh, ProcessGroups, Reallocation
from usp.rlhf.algorithms.critic_free import CISPO, GRPO, GSPO, OnPolicyDistillation, ReMax
from usp.rlhf.algorithms.ppo import PPO
from usp.rlhf.algorithms.preferences import DPO
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.graph import DataflowGraph, Generate, ModelCall
from usp.rlhf.plan.named_plans import Facts, flattening, heuristic, interleaving, separation
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.roles.rows import micro_batches
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.samples import Samples
from usp.sp.sequence import IGNORED_LABEL

STEPS, ALL_STEPS = 2, 5
TOLERANCE = 1e-5
SAMPLING = Generate(max_new_tokens=4, temperature=0.8, top_k=40, stop_ids=(7, 11, 13))
FAMILY = "llama-4kv"


def parity_of(prompt: list[int], response: list[int], answer: int) -> float:
    """A reward that most responses have something of."""
    return sum(token % 2 for token in response) / (1 + len(response)) + answer / 100


REWARD = ScoreWith(parity_of, list, lambda index: index)
ALGORITHMS: dict[str, Any] = {
    "ppo": PPO(generate=SAMPLING, mini_batches=2, kl_target=0.5),
    "grpo": GRPO(generate=replace(SAMPLING, group_size=2), reward=REWARD, mini_batches=2),
    "dpo": DPO(mini_batches=2),
    "remax": ReMax(generate=SAMPLING, reward=REWARD),
    "distillation": OnPolicyDistillation(generate=SAMPLING, reward=REWARD),
}
ONCE = GRPO(generate=replace(SAMPLING, group_size=2), reward=REWARD)
VARIANTS: dict[str, tuple[str, Any]] = {
    "once": ("grpo", ONCE),
    "once, recomputed": ("grpo", replace(ONCE, old_logprobs="recompute")),
    "gspo": ("gspo", GSPO(generate=ONCE.generate, reward=REWARD, mini_batches=2, old_logprobs="rollout")),
    "cispo": ("cispo", CISPO(generate=ONCE.generate, reward=REWARD, mini_batches=2)),
}
# All ranks are used: those that a name has no degree for are data-parallel.
APART, STAGES = "generate tp2, train r2", "train dp, all else pp2"
PLANS = (
    "flattening",
    "tp2 pp2",
    "u2 tp2",
    "u2 r2 tp2",
    "generate tp4, train u2 r2",
    "separation",
    "interleaving",
    "heuristic",
    STAGES,
)
# Without --exhaustive, on four ranks. More with GRPO: test_switching.py
CHOSEN = {
    "ppo": ("separation",),
    "grpo": ("interleaving",),
    "dpo": ("heuristic",),
    "remax": ("u2 tp2",),
    "distillation": ("flattening",),
}


def facts(**options: Any) -> Facts:
    """All ranks, on two hosts."""
    ranks = dist.get_world_size()
    return replace(Facts(ranks, ranks // 2, 4, 2), **options)


def alone(graph: DataflowGraph) -> ExecutionPlan:
    layout = CallLayout((0,), ParallelDims(dp_shard=1))
    return ExecutionPlan("alone", {call.name: layout for call in graph.calls})


def plan_of(name: str, graph: DataflowGraph) -> ExecutionPlan:
    if name == "flattening":
        return flattening(graph, facts(zero=3))
    if name == "tp2 pp2":
        return flattening(graph, facts(dims=ParallelDims(tp=2, pp=2)))
    if name == "u2 tp2":
        return flattening(graph, facts(dims=ParallelDims(ulysses=2, tp=2)))
    if name == "u2 r2 tp2":
        return flattening(graph, facts(dims=ParallelDims(ulysses=2, ring=2, tp=2)))
    if name == "separation":
        dims, rollout_dims = ParallelDims(ring=2), ParallelDims(tp=2)
        return separation(graph, facts(dims=dims, rollout_dims=rollout_dims, zero=3))
    if name == "interleaving":
        return interleaving(graph, facts(dims=ParallelDims(ulysses=2), zero=3))
    if name == "heuristic":
        return heuristic(graph, facts())
    if name == HEURISTIC_WITH_EXPERTS:
        return heuristic(graph, facts(heads=2, experts=True))
    of_calls, dims, trained, zero = {
        APART: (("generate",), ParallelDims(tp=2), ParallelDims(ring=2), 3),
        STAGES: (("generate", "inference"), ParallelDims(pp=2), ParallelDims(), 0),
        "generate tp4, train u2 r2": (("generate",), ParallelDims(tp=4), ParallelDims(ulysses=2, ring=2), 3),
        TO_WHOLE_EXPERTS: (("generate",), ParallelDims(ulysses=2), ParallelDims(ulysses=2, ring=2), 3),
        DIVIDED_EXPERTS: (("generate",), ParallelDims(tp=2, ep=4), ParallelDims(ulysses=2, ep=2), 3),
    }[name]
    plan = flattening(graph, facts(dims=trained, zero=zero, sp_layout="balanced" if trained.sp > 2 else "zigzag"))
    ranks = dist.get_world_size()
    everything = CallLayout(tuple(range(ranks)), dims.resolve(ranks))
    return replace(plan, calls={**plan.calls, **{c.name: everything for c in graph.calls if c.kind in of_calls}})


def given(algorithm: str, step: int) -> Samples:
    """Prompts, or pairs of sequences, of uneven lengths."""
    draw = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, VOCAB, (int(n),), generator=draw) for n in torch.randint(2, 20, (8,), generator=draw)]
    if algorithm == "dpo":
        masks = [(torch.arange(len(one)) >= len(one) // 2).float() for one in ids]
        for mask in masks:
            mask[-1] = 0
        return Samples(tuple(range(8)), {"tokens": ids, "mask": masks})
    values = {"prompt_ids": ids}
    if algorithm != "ppo":
        values["prompt_index"] = [torch.tensor(index) for index in range(8)]
    return Samples(tuple(range(8)), values)


Steps = list[tuple[dict[str, float], dict[str, list[Tensor]]]]


Result = tuple[Steps, dict[str, Tensor]]


def builder(
    trained: dict[str, RoleModel],
    dtype: torch.dtype = torch.float32,
    family: str = FAMILY,
    lora: Lora | None = None,
) -> Callable[[ModelCall, CallLayout, ParallelMesh], RoleModel]:
    """The function that builds roles, the actor with adapters, and puts those that train into `trained`."""

    def build(call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> RoleModel:
        head = "values" if call.role in ("critic", "reward") else "logprobs"
        config = config_of(family, head) if family in CONFIGS else tiny_config(family)
        spec = RoleSpec(
            call.role,
            "tiny",
            config,
            seed=len(call.role),
            dtype=dtype,
            optimizer=ADAM,
            learning_rate=LEARNING_RATE,
            loss_chunk=5,
            balance=0.5 if family == "mixtral" else 0.0,  # of the routers' load
            lora=lora if call.role == "actor" else None,
        )

        model = RoleModel(spec, layout, mesh, trained=call.kind == "train_step", slots=5)
        if model.trained:
            trained[call.role] = model
            model.fill = lambda: fill(model)
        return model

    def fill(model: RoleModel) -> None:
        RoleModel.fill(model)
        for number, (_, buffer) in enumerate(persistent_buffers(model.stage.model)):
            buffer.copy_(torch.linspace(-0.5, 0.5, buffer.numel()).roll(number).view_as(buffer))

    return build


def weights_of(trained: Mapping[str, RoleModel]) -> dict[str, Tensor]:
    """This rank's trained weights, whole."""
    return {
        f"{role}.{name}": weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
        for role, model in trained.items()
        for name, weight in model.weights().items()
    }


def run(
    algorithm: str,
    plan_name: str,
    steps: int,
    groups: ProcessGroups,
    dtype: torch.dtype = torch.float32,
    family: str = FAMILY,
) -> Result:
    """What rank 0 is told of each step, and this rank's trained weights, whole.

    family: of `tests.usp.tiny`, or a type of transformers.
    """
    graph = build_graph(*VARIANTS.get(algorithm, (algorithm, ALGORITHMS.get(algorithm))))
    trained: dict[str, RoleModel] = {}
    build = builder(trained, dtype, family)
    keys = {*graph.given, *graph.producers}
    shown = tuple(
        key for key in ("tokens", "greedy_tokens", "old_logprobs", "advantages", "ref_logprobs") if key in keys
    )
    plan = alone(graph) if plan_name == "alone" else plan_of(plan_name, graph)
    executor = Executor(graph, plan, CopyOptions(groups, build, torch.device("cpu"), 4), collect=shown)
    told: Steps = []
    for number in range(1, steps + 1):
        result = executor.run_step(given(algorithm, number), number, seed=number)
        if result.samples is not None:
            told.append((result.metrics, {key: list(result.samples[key]) for key in shown}))
    return told, weights_of(trained)


def roll_labels_of_each_part(*args: Any, **options: Any) -> list[dict[str, Tensor]]:
    batches = micro_batches(*args, **options)
    for batch in batches:
        labels = batch["shift_labels"]
        batch["shift_labels"] = batch["input_ids"].roll(-1, dims=1).where(labels != IGNORED_LABEL, IGNORED_LABEL)
    return batches


def move_those_of_the_first_step(
    self: Reallocation, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]]
) -> None:
    MOVE(self, src, dst, copies)
    first = self.__dict__.setdefault("first", {name: weight.clone() for name, weight in dst.items()})
    with torch.no_grad():
        for name, weight in dst.items():
            weight.copy_(first[name])


MOVE = Reallocation.run
BROKEN: dict[str, Callable[[], AbstractContextManager]] = {
    "labels are shifted after sharding": lambda: patch(
        "usp.rlhf.roles.role_model.micro_batches", roll_labels_of_each_part
    ),
    "gradients are averaged over ranks": lambda: patch.object(
        FSDPModule, "set_gradient_divide_factor", lambda module, factor: None
    ),
    "new weights do not reach generation": lambda: patch.object(Reallocation, "run", move_those_of_the_first_step),
}


# With windows, rotary frequencies by layer and a tied head; with sinks and experts; with buffers in its checkpoints.
TO_WHOLE_EXPERTS = "generate u2, train u2 r2"
DIVIDED_EXPERTS = "generate tp2 ep4, train u2 ep2"
HEURISTIC_WITH_EXPERTS = "heuristic, experts"
FAMILIES = {"glm4_moe": TO_WHOLE_EXPERTS, "mixtral": DIVIDED_EXPERTS}
MORE_FAMILIES = {
    "qwen3_moe": HEURISTIC_WITH_EXPERTS,
    "gemma3_text": "separation",
    "gpt_oss": TO_WHOLE_EXPERTS,
    "cohere2": "separation",
    "granite": "tp2 pp2",
    "deepseek_v3": TO_WHOLE_EXPERTS,
    "mixtral": TO_WHOLE_EXPERTS,
}


def run_families(plans: dict[str, str]) -> dict[str, Result]:
    found, groups = {}, ProcessGroups()
    for family, plan in plans.items():
        found[f"{family} alone"] = run("grpo", "alone", 2, groups, family=family)
        found[family] = run("grpo", plan, 2, groups, family=family)
    return found


def run_all(algorithm: str, plans: tuple[str, ...], steps: int) -> dict[str, Result]:
    groups = ProcessGroups()
    return {name: run(algorithm, name, steps, groups) for name in ("alone", *plans)}


def run_broken() -> dict[str, Result]:
    groups = ProcessGroups()
    found = {"alone": run("grpo", "alone", 2, groups)}
    for name, broken in BROKEN.items():
        with broken():
            found[name] = run("grpo", APART, 2, groups)
    return found


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / (1e-12 + wanted.norm())).item()


def check(results: list[dict[str, Result]], name: str, alone: str = "alone") -> None:
    """The plan's steps and weights against those of rank 0 alone."""
    wanted_steps, wanted_weights = results[0][alone]
    steps = results[0][name][0]
    for number, ((metrics, samples), (wanted_metrics, wanted)) in enumerate(zip(steps, wanted_steps, strict=True)):
        where = f"{name}, step {number + 1}"
        for key, ones in wanted.items():
            if ones[0].dtype == torch.int64:
                assert all(map(torch.equal, samples[key], ones)), f"{where}: {key} are others"
            else:
                error = distance(torch.cat(samples[key]), torch.cat(ones))
                assert error < TOLERANCE, f"{where}: {key} are off by {error:.1e}"
        losses = {key: value for key, value in wanted_metrics.items() if key.endswith("loss")}
        assert losses and metrics.keys() == wanted_metrics.keys(), where
        for key, value in losses.items():
            assert metrics[key] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), f"{where}: {key}"
    weights = {key: value for result in results for key, value in result[name][1].items()}
    assert weights.keys() == wanted_weights.keys(), name
    for key, value in wanted_weights.items():
        assert distance(weights[key], value) < TOLERANCE, f"{name}: {key}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.slow(full=3)
def test_steps_under_every_plan_are_those_of_one_process(ranks: RankPool, exhaustive: bool, algorithm: str) -> None:
    plans, steps = (PLANS, ALL_STEPS) if exhaustive else (CHOSEN[algorithm], STEPS)
    results = ranks.run(run_all, 8 if exhaustive else 4, algorithm, plans, steps, timeout=1200)
    for name in plans:
        check(results, name)


def run_variants() -> dict[str, Result]:
    groups = ProcessGroups()
    found = {variant: run(variant, APART, 2, groups) for variant in VARIANTS}
    return found | {f"{variant} alone": run(variant, "alone", 2, groups) for variant in VARIANTS}


@pytest.mark.slow
def test_variants_of_grpo_are_those_of_one_process(ranks: RankPool, exhaustive: bool) -> None:
    results = ranks.run(run_variants, 4 if exhaustive else 2, timeout=1200)
    for variant in VARIANTS:
        check(results, variant, f"{variant} alone")
    for _, weights in (result["once"] for result in results):
        for name, weight in weights.items():
            wanted = next(result["once, recomputed"][1][name] for result in results if name in result["once"][1])
            assert distance(weight, wanted) < 1e-6, name
    for (skipped, _), (recomputed, _) in zip(results[0]["once"][0], results[0]["once, recomputed"][0], strict=True):
        assert skipped["actor/importance_ratio"] == pytest.approx(1, abs=1e-6)
        for key in ("logprob_difference_max", "logprob_difference_mean"):
            assert 0 < skipped[key] == pytest.approx(recomputed[key], rel=0.2, abs=1e-6), key


@pytest.mark.exhaustive  # the roles' models alone: roles/test_role_model.py
def test_steps_of_other_families_are_those_of_one_process(ranks: RankPool, exhaustive: bool) -> None:
    plans = FAMILIES | (MORE_FAMILIES if exhaustive else {})
    results = ranks.run(run_families, 8 if exhaustive else 4, plans, timeout=1200)
    for family in plans:
        check(results, family, f"{family} alone")


@pytest.fixture(scope="module")
def broken_runs(ranks: RankPool) -> list[dict[str, Result]]:
    return ranks.run(run_broken, 2)


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_on_purpose_is_noticed(broken_runs: list[dict[str, Result]], broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        check(broken_runs, broken)


def run_bfloat16() -> Result:
    return run("ppo", APART, 2, ProcessGroups(), torch.bfloat16)


@pytest.mark.slow
def test_bfloat16_computes_with_rounded_weights_and_trains_float32_ones(ranks: RankPool) -> None:
    results = ranks.run(run_bfloat16, 2)
    for metrics, _ in results[0][0]:
        assert 1e-5 < metrics["logprob_difference_max"] < 0.1  # what generates has the new weights, rounded
    for name, weight in (named for _, weights in results for named in weights.items()):
        assert weight.dtype == torch.float32, name
        assert weight.ndim < 2 or not torch.equal(weight, weight.bfloat16().float()), name
