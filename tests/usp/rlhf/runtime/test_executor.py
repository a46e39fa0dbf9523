"""Steps under several plans match a single process; concurrent calls overlap; errors are reported on every rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.rlhf.toy import HIDDEN, VOCABULARY, Alone, SharingModel, ToyModel, ppo, prompts
from usp.parallel import ParallelDims, ParallelMesh, ProcessGroups
from usp.rlhf.graph import Compute, DataflowGraph, Generate, Inference, ModelCall, Reduce
from usp.rlhf.plan.named_plans import Facts, flattening, heuristic, interleaving, separation
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor, StepResult
from usp.rlhf.runtime.timeline import Event
from usp.rlhf.runtime.trace import totals
from usp.rlhf.samples import Samples, derived_seed

STEPS, PROMPTS = 2, 5
COLLECTED = ("tokens", "advantages", "returns", "old_logprobs", "finished")
FACTS = Facts(world_size=8, ranks_per_host=4, heads=4, layers=2)


def one_rank(graph: DataflowGraph) -> ExecutionPlan:
    return ExecutionPlan("one rank", {c.name: CallLayout((0,), ParallelDims(dp_shard=1)) for c in graph.calls})


def mixed(graph: DataflowGraph) -> ExecutionPlan:
    def layout(ranks: range | tuple[int, ...], zero: int = 0, **degrees: int) -> CallLayout:
        return CallLayout(tuple(ranks), replace(ParallelDims(), **degrees).resolve(len(ranks)), zero)  # type: ignore[arg-type]

    calls = {
        "actor_generate": layout(range(4), tp=2),
        "ref_inference": layout((4, 5)),
        "reward_inference": layout((6, 7), tp=2),
        "critic_inference": layout(range(8), tp=4),
        "actor_inference": layout(range(2, 8), ulysses=2),
        "advantages": layout((1, 3, 5)),
        "actor_train": layout(range(8), zero=3, ulysses=2, tp=2),
        "critic_train": layout(range(4, 8), pp=2, tp=2),
    }
    return ExecutionPlan("mixed", calls, frozenset({"ref"}))


def plans(graph: DataflowGraph) -> list[ExecutionPlan]:
    tp2 = ParallelDims(tp=2)
    return [
        one_rank(graph),
        heuristic(graph, FACTS),
        flattening(graph, replace(FACTS, dims=ParallelDims(), zero=3)),
        interleaving(graph, replace(FACTS, dims=tp2)),
        separation(graph, replace(FACTS, dims=ParallelDims(ulysses=2, ring=2), rollout_dims=tp2, zero=3)),
        mixed(graph),
    ]


@dataclass(frozen=True)
class Run:
    """One rank's results of some steps, and the weights of its trained roles."""

    metrics: list[dict[str, float]]
    samples: list[Samples | None]
    events: list[tuple[Event, ...]]
    weights: dict[str, dict[str, Tensor]]


def executor(graph: DataflowGraph, plan: ExecutionPlan, groups: ProcessGroups, **options: object) -> Executor:
    build_role = options.pop("build_role", SharingModel)
    return Executor(graph, plan, CopyOptions(groups, build_role, torch.device("cpu"), 4), **options)  # type: ignore[arg-type]


def steps(made: Executor, number: int = STEPS) -> list[StepResult]:
    return [made.run_step(prompts(PROMPTS, n), number=n, seed=n) for n in range(1, number + 1)]


def run_plans(folder: Path, names: tuple[str, ...]) -> list[Run]:
    """Run the plans of these names."""
    graph, groups, runs = ppo(), ProcessGroups(), []
    for plan in (plan for plan in plans(graph) if plan.name in names):
        trained: dict[str, ToyModel] = {}

        def build_role(call: ModelCall, *place: Any, trained: dict[str, ToyModel] = trained) -> ToyModel:
            model = SharingModel(call, *place)
            if call.kind == "train_step":
                trained[call.role] = model
            return model

        made = executor(graph, plan, groups, build_role=build_role, collect=COLLECTED, folder=folder / plan.name)
        results = steps(made)
        metrics, samples, events = ([getattr(r, key) for r in results] for key in ("metrics", "samples", "events"))
        runs.append(Run(metrics, samples, events, {role: model.full() for role, model in trained.items()}))
    return runs


@pytest.mark.slow
def test_every_plan_matches_a_single_process(ranks: RankPool, tmp_path: Path, exhaustive: bool) -> None:
    graph, alone = ppo(), Alone()
    every = [plan for plan in plans(graph) if exhaustive or plan.name in ("one rank", "separation", "mixed")]
    wanted = [alone.step(graph, prompts(PROMPTS, n), derived_seed(n, "actor_generate")) for n in range(1, STEPS + 1)]
    found = ranks.run(run_plans, 8, tmp_path, tuple(plan.name for plan in every))
    for number, plan in enumerate(every):
        runs = [of_rank[number] for of_rank in found]
        for n, (metrics, values) in enumerate(wanted):
            for run in runs:
                assert {key: run.metrics[n][key] for key in metrics} == pytest.approx(metrics, abs=1e-5), plan.name
                assert run.metrics[n]["logprob_difference_max"] < 1e-5
                assert run.metrics[n]["tokens_length"] == sum(map(len, values["tokens"])) / len(values["tokens"])
            collected = runs[0].samples[n]
            assert collected is not None
            for key in COLLECTED:
                for mine, theirs in zip(collected[key], values[key], strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5, msg=f"{plan.name}: {key}")
        held = [(role, of_role) for run in runs for role, of_role in run.weights.items()]
        assert {role for role, _ in held} == {"actor", "critic"}
        for role, of_role in held:
            for name, value in of_role.items():
                torch.testing.assert_close(value, alone.weights[role][name], rtol=0, atol=1e-6, msg=plan.name)
        _check_events(plan, [event for run in runs for event in run.events[-1]])


def _check_events(plan: ExecutionPlan, events: list[Event]) -> None:
    """Check that the timeline shows what the plan is for, and that all sent bytes are received."""
    kinds = {event.kind for event in events}
    assert sum(e.sent for e in events) == sum(e.received for e in events) == sum(e.minimum for e in events)
    assert sum(e.crossed for e in events) == sum(e.host_minimum for e in events)
    if plan.name == "separation":
        received: Counter[str] = Counter()
        for event in events:
            received[event.name] += event.received
        # All that inference needs is in the copy that generated, but half of B, whose rows fsdp cuts before tp.
        assert received["actor for actor_inference"] == HIDDEN * VOCABULARY * 8 // 2
        assert received["actor for actor_generate"] > 2 * received["actor for actor_inference"]
    assert ("offload" in kinds) == ("load" in kinds) == bool(plan.offload)
    moves = plan.name in ("flattening", "separation", "mixed")  # the others share the memory of the trained copy
    assert ("reallocate" in kinds) == ("release" in kinds) == moves
    assert ("transfer" in kinds) == (plan.name != "one rank")


class Meeting(ToyModel):
    """A model whose inference ends only once the other inference calls have begun, as marked by files."""

    def __init__(self, call: ModelCall, layout: CallLayout, mesh: ParallelMesh, folder: Path) -> None:
        super().__init__(call, layout, mesh)
        self._folder = folder

    def inference(self, samples: Samples, work: Inference, output: str, layout: CallLayout | None = None) -> Samples:
        (self._folder / output).touch()
        deadline = time.monotonic() + 600
        while not all((self._folder / key).exists() for key in ("ref_logprobs", "score", "values")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{output} does not overlap with the other calls")
            time.sleep(0.01)
        return super().inference(samples, work, output)


def run_meeting(folder: Path) -> None:
    graph = ppo()
    plan = interleaving(graph, FACTS)
    apart = [plan[name].ranks for name in ("ref_inference", "reward_inference", "critic_inference", "actor_inference")]
    assert apart == [(0, 1), (2, 3), (4, 5), (6, 7)]
    made = executor(graph, plan, ProcessGroups(), build_role=partial(Meeting, folder=folder))
    made.run_step(prompts(PROMPTS, 1), number=1, seed=1)


@pytest.mark.slow
def test_calls_on_disjoint_ranks_run_at_the_same_time(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(run_meeting, 8, tmp_path)


class Slow(ToyModel):
    """A model that generates until all the files of `marks` exist."""

    def __init__(
        self, call: ModelCall, layout: CallLayout, mesh: ParallelMesh, marks: list[Path], **kind: bool
    ) -> None:
        super().__init__(call, layout, mesh, **kind)
        self._marks = marks

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        deadline = time.monotonic() + 600
        while not all(mark.exists() for mark in self._marks):
            assert time.monotonic() < deadline, "the critic's ranks do not begin its reallocation"
            time.sleep(0.01)
        return super().generate(prompts, work, seed)


def run_stale(folder: Path) -> tuple[list[dict[str, float]], tuple[Event, ...]]:
    """Return the metrics of two steps, the second with stale weights, and this rank's events of the first.

    Samples are generated until every rank that trains the critic has begun to send its weights.
    """
    graph = ppo()
    plan = separation(graph, replace(FACTS, world_size=4))
    marks = [folder / f"critic-{rank}" for rank in plan["critic_train"].ranks]
    made = executor(graph, plan, ProcessGroups(), build_role=partial(Slow, marks=marks, stale=True))
    copies = made.copies
    reallocate = copies.reallocate

    def mark(copy: WeightCopy, *rest: Any) -> None:
        (folder / f"{copy.role}-{dist.get_rank()}").touch()
        reallocate(copy, *rest)

    def forget(copy: WeightCopy, sources: tuple[WeightCopy, ...], event: Event) -> None:
        if dist.get_rank() in copy.layout.ranks:
            copies.model(copy).allocate()

    copies.reallocate = mark  # type: ignore[method-assign]
    first = made.run_step(prompts(PROMPTS, 1), number=1, seed=1)
    copies.reallocate = forget  # type: ignore[method-assign]
    return [first.metrics, made.run_step(prompts(PROMPTS, 2), number=2, seed=2).metrics], first.events


def test_stale_weights_are_noticed_and_waiting_for_slow_ranks_is_not_moving(ranks: RankPool, tmp_path: Path) -> None:
    alone = Alone()
    wanted = [alone.step(ppo(), prompts(PROMPTS, n), derived_seed(n, "actor_generate"))[0] for n in (1, 2)]
    found = ranks.run(run_stale, 4, tmp_path)
    first, second = found[0][0]
    assert {key: first[key] for key in wanted[0]} == pytest.approx(wanted[0], abs=1e-5)
    assert abs(second["actor/loss"] - wanted[1]["actor/loss"]) > 1e-2
    assert abs(second["critic/loss"] - wanted[1]["critic/loss"]) > 1e-2
    events = [event for _, of_rank in found for event in of_rank]
    # The training ranks join the reallocation of the critic at once, those that generate only afterwards.
    moved = next(row for row in totals(events) if row.kind == "reallocate" and row.name.startswith("critic"))
    generated = {event.rank: event.end for event in events if event.kind == "generate"}
    joined = [event for event in events if event.kind == "reallocate" and event.name == moved.name]
    begin, end = min(event.start for event in joined), max(event.end for event in joined)
    arrival = min(event.start for event in joined if event.rank in generated)
    assert begin < min(generated.values()) <= arrival
    assert moved.waiting >= arrival - begin and 0 < moved.seconds <= end - arrival + 1e-9


def scores(samples: Samples, reduce: Reduce) -> Samples:
    return Samples(samples.ids, {"score": [torch.zeros(2) for _ in samples.ids]})


def run_refusals() -> list[str]:
    """Return every error message on this rank, in order."""
    call = ModelCall("rewards", "", Compute(scores), ("prompt_ids",), ("score",))
    graph, groups, said = DataflowGraph((call,), ("prompt_ids",)), ProcessGroups(), []
    everywhere = CallLayout((0, 1), ParallelDims(dp_shard=2))

    def attempt(make: Callable[[], object]) -> None:
        try:
            make()
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    missing = ExecutionPlan("mine", {"rewards": CallLayout((0, 1, 2), ParallelDims(dp_shard=3))})
    attempt(lambda: executor(graph, missing, groups))
    own = ExecutionPlan(f"of rank {dist.get_rank()}", {"rewards": everywhere})
    attempt(lambda: executor(graph, own, groups))
    made = executor(graph, ExecutionPlan("mine", {"rewards": everywhere}), groups)
    attempt(lambda: made.run_step(Samples((), {"prompt_ids": []}), 1, 0))
    attempt(lambda: made.run_step(prompts(2 + dist.get_rank(), 1), 1, 0))
    attempt(lambda: made.run_step(prompts(2, 1), 1, 0))
    return said


def test_errors_are_raised_on_every_rank(ranks: RankPool) -> None:
    for said in ranks.run(run_refusals, 2):
        missing, own, empty, different, shape = said
        assert "ValueError: plan 'mine': rewards: ranks 2 are missing from the world of 2 ranks (0-1)" in missing
        differs = "plan.name = 'of rank 0' on rank 0, 'of rank 1' on rank 1"
        assert own == f"RanksDisagree: the graph and the plan must be the same on all ranks, but differs: {differs}"
        assert empty.startswith("ValueError: rewards: mini_batches=1 of 0 samples")
        assert "RanksDisagree: number, seed and samples of a step must be the same on all ranks" in different
        assert "call rewards returned 'score' of sample" in shape
        assert "torch.float32 of shape (2,), expected torch.float32 of shape (): one number" in shape
