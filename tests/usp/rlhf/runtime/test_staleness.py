"""Rollouts ahead: a step's samples are made beside the training of an earlier step, with the weights before it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.rlhf.toy import Alone, ToyModel, ppo, prompts
from usp.parallel import ParallelDims, ParallelMesh, ProcessGroups
from usp.rlhf.graph import DataflowGraph, Generate, ModelCall, TrainStep
from usp.rlhf.plan.named_plans import Facts, flattening, separation
from usp.rlhf.plan.operations import schedule
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor, StepInput, StepResult
from usp.rlhf.runtime.measure import merge
from usp.rlhf.samples import Samples, derived_seed
from usp.run.failures import UserCodeFailed

STEPS, PROMPTS = 3, 5
COLLECTED = ("tokens", "advantages", "old_logprobs")
FACTS = Facts(world_size=8, ranks_per_host=4, heads=4, layers=2)


def apart(graph: DataflowGraph) -> ExecutionPlan:
    """Rank 0, which collects samples, trains; the train steps of two roles overlap."""

    def layout(ranks: range | tuple[int, ...], zero: int = 0, **degrees: int) -> CallLayout:
        return CallLayout(tuple(ranks), replace(ParallelDims(), **degrees).resolve(len(ranks)), zero)  # type: ignore[arg-type]

    calls = {
        "actor_generate": layout(range(4, 8), tp=2),
        "ref_inference": layout((4, 5)),
        "reward_inference": layout((6, 7), tp=2),
        "critic_inference": layout(range(4, 8), tp=4),
        "actor_inference": layout(range(4, 8), zero=3, ulysses=2),
        "advantages": layout((5, 7)),
        "actor_train": layout((0, 1), zero=3),
        "critic_train": layout((2, 3), tp=2),
    }
    return ExecutionPlan("apart", calls, frozenset({"ref"}))


def halves(graph: DataflowGraph) -> ExecutionPlan:
    dims, rollout = ParallelDims(ulysses=2, ring=2), ParallelDims(tp=2)
    return separation(graph, replace(FACTS, dims=dims, rollout_dims=rollout, zero=3))


def asked(number: int) -> StepInput:
    return StepInput(prompts(PROMPTS, number), number, seed=number)


@dataclass(frozen=True)
class Run:
    """A rank's results, its trained weights, and what was in flight after the second step."""

    metrics: list[dict[str, float]]
    samples: list[Samples | None]
    weights: dict[str, dict[str, Tensor]]
    in_flight: tuple[dict[str, Any], dict[str, Tensor]]


def made(plan: ExecutionPlan, trained: dict[str, ToyModel], **options: Any) -> Executor:
    def build_role(call: ModelCall, *place: Any) -> ToyModel:
        model = ToyModel(call, *place)
        if call.kind == "train_step":
            trained[call.role] = model
        return model

    copies = CopyOptions(ProcessGroups(), options.pop("build_role", build_role), torch.device("cpu"), 4)
    return Executor(replace(ppo(), depth=options.pop("depth", 1)), plan, copies, **options)


def iterate(executor: Executor, first: int, steps: int) -> list[StepResult]:
    results = [executor.run(asked(n + 1) if n < STEPS else None) for n in range(first, first + steps)]
    return [result for result in results if result is not None]


def run_plan(plan: ExecutionPlan) -> Run:
    trained: dict[str, ToyModel] = {}
    executor = made(plan, trained, collect=COLLECTED, first=2)
    assert executor.run(asked(1)) is None
    results = iterate(executor, 1, 2)
    (made_ahead,) = executor.in_flight
    saved = made_ahead.to_extra(), made_ahead.whole(executor.device)
    results += iterate(executor, 3, STEPS - 2)
    assert not executor.in_flight
    weights = {role: model.full() for role, model in trained.items()}
    return Run([r.metrics for r in results], [r.samples for r in results], weights, saved)


def run_plans() -> tuple[list[Run], dict[str, float]]:
    """Every plan; and a step of the second with what was in flight under the first."""
    runs = [run_plan(plan(ppo())) for plan in (halves, apart)]
    executor = made(apart(ppo()), {})
    extra, values = runs[0].in_flight
    saved = executor.saved_in_flight(extra)
    saved.fill(values)
    executor.in_flight = [saved]
    result = executor.run(None)
    assert result is not None
    return runs, result.metrics


@pytest.mark.slow
def test_samples_are_made_with_the_weights_before_the_last_train_steps(ranks: RankPool) -> None:
    graph, alone = ppo(), Alone()
    values = [alone.roll_out(graph, asked(1).given, derived_seed(1, "actor_generate"))]
    initial, restarted = Alone(), {}
    wanted = []
    for number in range(1, STEPS + 1):
        if number < STEPS:
            following = asked(number + 1)
            values.append(alone.roll_out(graph, following.given, derived_seed(following.seed, "actor_generate")))
        if number == 3:
            restarted = initial.train(graph, values[2])
        wanted.append(alone.train(graph, values[number - 1]))
    found = ranks.run(run_plans, 8)
    for place, plan in enumerate(("halves", "apart")):
        runs = [of_rank[0][place] for of_rank in found]
        for n, metrics in enumerate(wanted):
            for run in runs:
                assert {key: run.metrics[n][key] for key in metrics} == pytest.approx(metrics, abs=1e-5), plan
            collected = runs[0].samples[n]
            assert collected is not None
            for key in COLLECTED:
                for mine, theirs in zip(collected[key], values[n][key][:2], strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5, msg=f"{plan}: {key}")
        for role, weights in ((role, of_role) for run in runs for role, of_role in run.weights.items()):
            for name, value in weights.items():
                torch.testing.assert_close(value, alone.weights[role][name], rtol=0, atol=1e-6, msg=plan)
        assert all(run.in_flight[0] == runs[0].in_flight[0] for run in runs)
    for _, metrics in found:  # of initial weights, as only samples were restored
        assert {key: metrics[key] for key in restarted} == pytest.approx(restarted, abs=1e-5)


def run_depths(depths: range) -> list[list[dict[str, float]]]:
    """Return the metrics of each step, by depth."""
    found = []
    for depth in depths:
        executor = made(separation(ppo(), replace(FACTS, world_size=4)), {}, depth=depth)
        results = [executor.run(asked(number) if number <= STEPS else None) for number in range(1, STEPS + depth + 1)]
        assert results[:depth] == [None] * depth and not executor.in_flight
        found.append([result.metrics for result in results if result is not None])
    return found


@pytest.mark.exhaustive
def test_rollouts_may_run_any_number_of_steps_ahead(ranks: RankPool) -> None:
    graph, wanted = ppo(), list[list[dict[str, float]]]()
    for depth in range(3):
        alone, values, losses = Alone(), [], []
        for number in range(1, STEPS + depth + 1):
            if number <= STEPS:
                values.append(alone.roll_out(graph, asked(number).given, derived_seed(number, "actor_generate")))
            if number > depth:
                losses.append(alone.train(graph, values[number - depth - 1]))
        wanted.append(losses)
    assert wanted[0][-1] != wanted[1][-1] != wanted[2][-1]
    for found in ranks.run(run_depths, 4, range(3)):
        for steps, of_one in zip(found, wanted, strict=True):
            for metrics, losses in zip(steps, of_one, strict=True):
                assert {key: metrics[key] for key in losses} == pytest.approx(losses, abs=1e-5)


class Meeting(ToyModel):
    """A model that trains, or generates the second time, only once the other does."""

    def __init__(self, call: ModelCall, layout: CallLayout, mesh: ParallelMesh, folder: Path) -> None:
        super().__init__(call, layout, mesh)
        self._folder, self._times = folder, 0

    def _meet(self, own: str, other: str) -> None:
        (self._folder / own).touch()
        deadline = time.monotonic() + 600
        while not (self._folder / other).exists():
            assert time.monotonic() < deadline, f"{own} does not overlap with {other}"
            time.sleep(0.01)

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        self._times += 1
        if self._times == 2:
            self._meet("generate", "train")
        return super().generate(prompts, work, seed)

    def train_step(self, mini_batches: Any, work: TrainStep) -> dict[str, float]:
        if not (self._folder / "generate").exists() or not (self._folder / "train").exists():
            self._meet("train", "generate")
        return super().train_step(mini_batches, work)


def run_meeting(folder: Path) -> list[str]:
    """Return what each rank was told, of a reward that failed beside the training of the first step, too."""
    refuse, checked = False, list[int]()

    def check(number: int) -> dict[str, float]:
        checked.append(number)
        if refuse:
            raise UserCodeFailed("no score")
        return {}

    graph = ppo()
    plan = separation(graph, replace(FACTS, world_size=4))
    executor = made(plan, {}, build_role=partial(Meeting, folder=folder), before_changes=check)
    executor.run(asked(1))
    executor.run(asked(2))
    refuse = True
    executor.run(asked(3))  # of the samples that did not fail
    said = [str(executor.in_flight)]
    refuse = False
    for wrong in (lambda: executor.run(asked(3)), lambda: made(flattening(graph, replace(FACTS, world_size=4)), {})):
        try:
            wrong()
        except (UserCodeFailed, ValueError) as error:
            said.append(str(error))
    assert checked == [1, 2, 3]
    return said


def test_rollouts_run_at_the_time_of_training_and_may_fail_without_it(ranks: RankPool, tmp_path: Path) -> None:
    for none, failed, shared in ranks.run(run_meeting, 4, tmp_path):
        assert (none, failed) == ("[]", "no score")
        assert "staleness=1: actor_generate, ref_inference, " in shared
        assert "advantages must not run on ranks 0-3, of actor_train, critic_train" in shared


def test_the_effective_sample_size_is_a_fraction_of_all_tokens() -> None:
    weights = [0.5, 1.0, 2.0, 0.0]
    sums = {"mean": sum(weights) / 4, "square": sum(weight**2 for weight in weights) / 4}
    metrics = merge([({f"actor/rollout_is_{name}": value for name, value in sums.items()}, {})], {})
    kish = 3.5**2 / 5.25 / 4
    assert metrics == {"actor/rollout_is_mean": 0.875, "actor/rollout_is_eff_sample_size": pytest.approx(kish)}


def test_an_iteration_moves_weights_first_and_hands_samples_over_last() -> None:
    graph = replace(ppo(), depth=1)
    operations = schedule(graph, separation(graph, FACTS), 8)
    kinds = [(operation.kind, operation.ahead, operation.call) for operation in operations]
    trains = [place for place, (kind, ahead, _) in enumerate(kinds) if kind == "call" and not ahead]
    moves = [place for place, (kind, _, _) in enumerate(kinds) if kind == "reallocate"]
    assert max(moves) < min(trains) and [kinds[place][2] for place in trains] == ["actor_train", "critic_train"]
    announced = [operation for operation in operations if operation.kind == "announce"]
    assert [operation.ranks for operation in announced] == [tuple(range(4)), tuple(range(8))]
    after = operations[operations.index(announced[1]) + 1 :]
    edges = {(operation.call, name) for operation in after for name in operation.calls}
    assert {operation.kind for operation in after} == {"transfer"} and all(operation.ahead for operation in after)
    assert edges == {
        (call, train) for call in ("actor_generate", "advantages") for train in ("actor_train", "critic_train")
    }
    before = operations[: operations.index(announced[1])]
    assert {rank for o in before if o.ahead and o.kind != "reallocate" for rank in o.ranks} == set(range(4))
