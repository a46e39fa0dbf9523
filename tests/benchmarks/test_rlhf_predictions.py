"""The benchmarks of predicted RLHF plans: the published cells, the layouts that are searched, and what is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.rlhf import real_figure, real_search
from benchmarks.rlhf.real_figure import Result, gain, spearman
from benchmarks.rlhf.real_rows import Cell, cells, models, ppo
from benchmarks.rlhf.real_search import ReaLsSeconds, bytes_by_rule, real_space, reals_plan
from benchmarks.rlhf.real_system import (
    OFFLOADED,
    Constants,
    bounded_step,
    heuristic,
    heuristic_seconds,
    pieces,
    real_layout,
    runtime,
)
from usp.parallel import ParallelDims
from usp.planning.rlhf_search import options
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

CELL = Cell(7, 7, 16, 128, 24.0, 14.6)


def results() -> list[Result]:
    return [Result(cell, cell.heuristic, (cell.real,)) for cell in cells()]


@pytest.mark.slow
def test_the_cells_have_the_published_gain() -> None:
    found = results()
    assert len(found) == 33 and sum(one.cell.bars for one in found) == 36
    assert gain(found, measured=True) == pytest.approx(0.261, abs=5e-4)
    assert all(one.cell.samples * (128 + one.cell.response) == 2**17 for one in found)
    assert spearman([1.0, 2.0, 2.0, 5.0], [2.0, 3.0, 3.0, 9.0]) == pytest.approx(1.0)
    notes = list(real_figure.notes(found, Constants()))
    assert "off by 0.00 on average" in real_figure.answer(found) and "correlation 1.00" in real_figure.answer(found)
    assert "Gains that are off by more than 0.30: none." in notes
    assert "Heuristic seconds that are off by more than 15%: none." in notes
    assert "gains 1.15 at 128 tokens" in notes[-1]


def test_reals_micro_batches_its_baseline_and_collectives() -> None:
    constants, plan, graph = Constants(), heuristic(CELL), ppo(CELL.response)
    train, inference = plan["actor_train"], plan["ref_inference"]
    assert (train.micro_batch_tokens, inference.micro_batch_tokens) == (2**17 // 4 // 4, 2**17 // 2)
    every = {name: set(options(graph[name], real_space(16, CELL.samples))) for name in plan.calls if graph[name].role}
    assert plan["actor_generate"] in every["actor_generate"]
    searched = {real_layout(graph["actor_train"], layout, CELL) for layout in every["actor_train"]}
    assert replace(train, zero=0) in searched
    slower = replace(constants, collective=100.0)
    assert heuristic_seconds(CELL, slower) > 1.5 * heuristic_seconds(CELL, constants)
    assert slower.launches(8) == pytest.approx(100.0)
    # of n exponential delays the largest is 1 / 2 + ... + 1 / n means above the mean
    late = {ranks: sum(1 / n for n in range(2, ranks + 1)) for ranks in (2, 4, 8)}
    growth = [100.0 - slower.launches(ranks) for ranks in (2, 4)]
    assert growth[0] / growth[1] == pytest.approx((late[8] - late[2]) / (late[8] - late[4]))


def test_reals_reallocations_go_there_and_back() -> None:
    def dims(pp: int, tp: int, dp: int) -> ParallelDims:
        return ParallelDims(pp=pp, tp=tp, dp_shard=dp)

    # A sixth of the layers is in two sevenths, a third in up to four tenths; a shard of tp 2 comes from two of tp 4.
    assert pieces(dims(7, 4, 1), dims(6, 2, 1)) == 2 * 2 and pieces(dims(1, 1, 8), dims(4, 8, 1)) == 1
    assert pieces(dims(10, 1, 1), dims(3, 1, 1)) == 4
    constants, numel = Constants(), models(7, 7)["actor"].numel
    there = constants.moves(numel, dims(1, 8, 1), dims(2, 1, 8), near=False)
    assert there == pytest.approx(16 * numel * (1 / 8 + 1 / 2) / 200e9 + 8 * 0.03)
    assert constants.moves(numel, dims(1, 8, 1), dims(2, 1, 8), near=True) == pytest.approx(
        16 * numel * (1 / 8 + 1 / 2) / 1800e9 + 8 * 0.03
    )
    trained, copy = (
        WeightCopy("actor", CallLayout(tuple(range(16)), degrees)) for degrees in (dims(2, 8, 1), dims(2, 1, 8))
    )
    estimates = runtime(CELL, constants).estimates
    back = constants.moves(numel, dims(2, 1, 8), dims(2, 8, 1), near=False)
    there = constants.moves(numel, dims(2, 8, 1), dims(2, 1, 8), near=False)
    assert estimates.fill_seconds(trained, copy) == pytest.approx(there)
    assert estimates.fill_seconds(copy, trained) == pytest.approx(back)
    assert estimates.fill_seconds(trained, replace(trained, layout=replace(trained.layout, zero=1))) == 0


def test_a_step_of_real_ends_with_both_train_steps_and_their_weights_on_the_way_back() -> None:
    """The actor rolls out and trains on the first half of the ranks, the critic on the second; inference takes both."""
    real, every = runtime(CELL, Constants()), tuple(range(16))
    halves = {"actor_generate": every[:8], "actor_train": every[:8], "critic_train": every[8:]}

    def plan(tp: int) -> ExecutionPlan:
        calls = dict(heuristic(CELL).calls)
        for name, ranks in halves.items():
            calls[name] = CallLayout(ranks, ParallelDims(tp=tp if name == "actor_generate" else 8, dp_shard=8 // tp))
            if name != "actor_generate":
                calls[name] = CallLayout(ranks, ParallelDims(tp=8, dp_shard=1), ac="full")
        return ExecutionPlan("halves", calls, frozenset(OFFLOADED))

    def took(*names: str, tp: int) -> float:
        return sum(real.estimates.call_seconds(name, plan(tp)[name]) for name in names)

    inference = ("reward_inference", "ref_inference", "critic_inference")
    for tp in (8, 1):
        of = plan(tp)
        copies = {name: WeightCopy(name.split("_")[0], of[name].of_weights) for name in of.calls}
        pairs = [("actor_generate", "actor_train"), ("critic_inference", "critic_train")]
        there, back = (
            [real.estimates.fill_seconds(*(copies[name] for name in pair[::way])) for pair in pairs] for way in (1, -1)
        )
        assert (there[0] > 0, there[1] > 0) == (tp == 1, True)
        actor, critic = (took(name, tp=tp) for name in ("actor_train", "critic_train"))
        trained = sum(there) + max(actor + back[0], critic) + back[1]  # the critic's weights move on all ranks
        expected = took("actor_generate", *inference, tp=tp) + trained + real.estimates.constants.clear
        assert real.seconds(of) == pytest.approx(expected)


def test_a_bounded_step_makes_the_best_of_the_rest() -> None:
    slopes, residuals = np.array([[1.0, 0.5], [0.5, 1.0], [0.2, 0.1]]), np.array([-2.0, -1.0, 0.3])
    free = bounded_step(slopes, residuals, 0.0, np.full(2, np.inf))
    assert free == pytest.approx(np.linalg.lstsq(slopes, -residuals, rcond=None)[0])
    assert free[0] > 0.5
    step = bounded_step(slopes, residuals, 0.0, np.array([0.5, np.inf]))
    left = residuals + 0.5 * slopes[:, 0]
    assert step == pytest.approx((0.5, -(slopes[:, 1] @ left) / (slopes[:, 1] @ slopes[:, 1])))


def test_reals_rule_of_memory() -> None:
    graph, model, plan = ppo(CELL.response), models(7, 7)["actor"], heuristic(CELL)
    weights = 3 * 32000 * 4096 + 32 * 4096 * (4 * 4096 + 3 * 11008)

    def held(name: str, **dims: int) -> tuple[float, float]:
        layout = CallLayout(tuple(range(16)), ParallelDims(**dims)) if dims else plan[name]
        return bytes_by_rule(graph[name], layout, model, CELL.workload)

    assert held("actor_train") == (24 * weights / 16, 512 // 4 * 4 * 256 * 4096 * 32 / 8)
    assert held("actor_train", dp_shard=16)[0] == pytest.approx((4 + 20 / 16) * weights)
    assert held("actor_generate") == (4 * weights / 16, 512 / 2 * 4 * 256 * 4096 * 32 / 8)
    assert held("critic_inference") == (4 * weights / 16, 0.0)
    assert held("reward_inference") == (0.0, 4 * weights / 16)


@pytest.mark.slow
def test_reals_plan_takes_what_its_estimates_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk's steps, of all chains at once, against one plan on a clock for each device."""
    monkeypatch.setattr(real_search, "PROPOSALS", 64 * 200)
    cell = replace(CELL, devices=8)
    real = runtime(cell, Constants()).estimates
    seconds, plan = reals_plan(cell, real)
    estimate, free, held, used = ReaLsSeconds(real), [0.0] * 8, [0.0] * 8, [0.0] * 8

    def run(ready: float, ranks: set[int], took: float) -> float:
        end = max([ready, *(free[rank] for rank in ranks)]) + took
        for rank in ranks if took else ():
            free[rank] = end
        return end if took else ready

    def call(name: str, ready: float) -> float:
        return run(ready, set(plan[name].ranks), estimate.of_call(real.graph[name], plan[name].dims))

    for name in (name for name in plan.calls if name != "advantages"):
        always, running = bytes_by_rule(real.graph[name], plan[name], real.models[real.graph[name].role], cell.workload)
        for rank in plan[name].ranks:
            held[rank], used[rank] = held[rank] + always, max(used[rank], running)
    assert max(a + b for a, b in zip(held, used, strict=True)) < 80 * 2**30
    rolled = call("actor_generate", 0.0)
    ready = max(call(f"{role}_inference", rolled) for role in ("reward", "ref", "critic"))
    pairs = (("actor_generate", "actor_train"), ("critic_inference", "critic_train"))
    moves = []
    for pair in pairs:
        a, b = (plan[name].dims for name in pair)
        numel = real.models[real.graph[pair[1]].role].numel
        moves.append([estimate.of_reallocation(numel, *way, near=True) for way in ((a, b), (b, a))])
    both = [{*plan[one].ranks, *plan[other].ranks} for one, other in pairs]
    begins = [run(ready, ranks, there) for ranks, (there, _) in zip(both, moves, strict=True)]
    ends = [call(train, begin) for (_, train), begin in zip(pairs, begins, strict=True)]
    for ranks, (_, back), end in zip(both, moves, ends, strict=True):
        run(end, ranks, back)
    assert seconds == pytest.approx(max(free))
    assert plan.offload == {"ref", "reward"} and set(plan.calls) == {call.name for call in real.graph.calls}
