"""The benchmarks of predicted RLHF plans: the published cells, the layouts that are searched, and what is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness.plots import plot_long_rollouts
from benchmarks.harness.record import Record
from benchmarks.rlhf import long_rollouts, real_figure
from benchmarks.rlhf.long_rollouts import Case, Searched, layouts
from benchmarks.rlhf.real_figure import Result, gain, spearman
from benchmarks.rlhf.real_rows import Cell, cells, models, ppo
from benchmarks.rlhf.real_system import Constants, bytes_by_rule, heuristic, heuristic_seconds, problem
from parallel import ParallelDims, load_hardware
from usp.rlhf.plan.plan import CallLayout

CELL = Cell(7, 7, 16, 128, 24.0, 14.6)


def results() -> list[Result]:
    return [Result(cell, cell.heuristic, cell.real, heuristic(cell), 0.0) for cell in cells()]


def test_the_cells_have_the_published_gain() -> None:
    found = results()
    assert len(found) == 33 and sum(one.cell.bars for one in found) == 36
    assert gain(found, measured=True) == pytest.approx(0.261, abs=5e-4)
    assert all(one.cell.samples * (128 + one.cell.response) == 2**17 for one in found)
    assert spearman([1.0, 2.0, 2.0, 5.0], [2.0, 3.0, 3.0, 9.0]) == pytest.approx(1.0)
    notes = list(real_figure.notes(found, Constants()))
    assert any("off by 0.00 on average" in note and "correlation 1.00" in note for note in notes)
    assert "gains 1.15 at 128 tokens" in notes[-1] and notes[-3:-1] == [
        "Gains that are off by more than 0.30: none.",
        "Heuristic seconds that are off by more than 15%: none.",
    ]


def test_real_searches_micro_batches_and_its_baseline() -> None:
    constants = Constants()
    searched, plan = problem(CELL, constants, even=False), heuristic(CELL)
    train, inference = plan["actor_train"], plan["ref_inference"]
    assert (train.micro_batch_tokens, inference.micro_batch_tokens) == (2**17 // 4 // 4, 2**17 // 2)
    assert {call.name for call in searched.simulator.graph.calls} == set(plan.calls)
    assert plan["actor_generate"] in searched.options["actor_generate"]
    assert replace(train, zero=0) in searched.options["actor_train"]
    slower = replace(constants, collective=100 * constants.collective)
    assert heuristic_seconds(CELL, slower) > 1.5 * heuristic_seconds(CELL, constants)


def test_reals_rule_of_memory_forbids_what_our_own_count_allows() -> None:
    graph, of, plan = ppo(CELL.response), models(7, 7), heuristic(CELL)
    each = (of["actor"].numel + of["critic"].numel) / 16  # tp 8, pp 2; reference and reward model are offloaded
    assert bytes_by_rule(graph, of, plan) == pytest.approx(24 * each)
    # Both are trained on the same devices, replicated: 4 + 20 / 8 bytes, and with another layout the rollout's copy.
    whole = CallLayout(tuple(range(8)), ParallelDims(dp_shard=8), zero=1)
    calls = plan.calls | {name: whole for name in plan.calls if name.endswith("_train")}
    held = bytes_by_rule(graph, of, replace(plan, calls=calls))
    assert held == pytest.approx((4 + 20 / 8) * 16 * each + 2 * each)
    simulated = problem(CELL, Constants(), even=False).simulator
    assert held > 80e9 and simulated.measure(replace(plan, calls=calls))[1] >= held
    assert simulated.measure(plan)[1] < 80e9


def test_rollouts_are_searched_with_ulysses_inside_hosts(tmp_path) -> None:
    simulated = long_rollouts.simulator(7, 2**17, load_hardware("h100"), 64)
    of = layouts(simulated, 7, 32)["actor_train"]
    assert {one.dims.sp for one in of} == {1, 2, 4, 8, 16, 32, 64}
    assert all(one.dims.tp * one.dims.ulysses == min(8, one.dims.tp * one.dims.sp) for one in of)
    fits, fails = Searched(10.0, 0.0, {"actor_train": "ranks 0-7: tp 8"}), Searched(0.0, 99.0, {})
    found = [long_rollouts.Result(Case(7, 2**13 * n, 64), plain, fits, 0.0) for n, plain in ((1, fits), (4, fails))]
    assert long_rollouts.row(found[0])[3:] == ("10 s", "10 s", "1.00", "tp 8", "tp 8")
    assert long_rollouts.row(found[1])[3:6] == ("none: 99 GiB", "10 s", "")
    record = Record.of("x", "", (), (), long_rollouts.notes(found), list(map(long_rollouts.data, found)))
    plot_long_rollouts(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()
