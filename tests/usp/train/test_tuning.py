"""The first steps of a run are shared by several layouts: the same losses and weights, and the fastest stays."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from tests.harness.ranks import RankPool
from tests.usp.tiny import drawn_model
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.run.launch import Launch
from usp.run.watchdog import Watchdog
from usp.train import trainer
from usp.train.prepare import prepare
from usp.train.trainer import Trainer
from usp.train.tuning import (
    COUNTED,
    HOPELESS,
    OPTIONS,
    ROUNDS,
    Decision,
    Trial,
    Tuner,
    cost,
    decided,
    fastest,
    next_trial,
)

RUN = TrainConfig(
    seq_len=64, steps=16, warmup_steps=2, checkpoint_every=7, adam_eps=1e-4, device="cpu", tokenizer="bytes"
)
DENSE: list[dict[str, Any]] = [
    {"dp_shard": 4, "batch_size": 1},
    {"sp_ulysses": 2, "sp_ring": 2, "batch_size": 4, "zero": 3},  # every rank keeps its parts
    {"tp": 2, "pp": 2, "batch_size": 4, "micro_batches": 2},
    {"dp_replicate": 2, "sp_ring": 2, "batch_size": 2},
    {"tp": 2, "tp_sequence_parallel": True, "sp_ulysses": 2, "batch_size": 4, "micro_batches": 4},
    {"pp": 2, "pp_schedule": "interleaved-1f1b", "sp_ring": 2, "batch_size": 4, "micro_batches": 2},
]
EXPERTS: list[dict[str, Any]] = [
    {"dp_shard": 4, "batch_size": 1},
    {"ep": 4, "dp_shard": 4, "batch_size": 1},
    {"ep": 2, "sp_ulysses": 2, "dp_shard": 2, "batch_size": 2, "micro_batches": 2},
    {"tp": 2, "tp_sequence_parallel": True, "ep": 2, "sp_ring": 2, "batch_size": 4, "zero": 3},
]
JOBS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "experts": ("moe", EXPERTS, {"router_aux_loss_coef": 0.02}),
    "dense": ("tiny", DENSE, {"eval_every": 3}),
    "lora": ("tiny", DENSE[:4], {"lora_rank": 2, "lora_alpha": 4}),
    "muon, packed": ("tiny", DENSE[:4], {"optimizer": "muon", "sp_layout": "striped", "lora_rank": 0}),
}


@dataclass(eq=False)
class EachInTurn(Tuner):
    """Every candidate runs two steps, whatever they take, and the race is over."""

    taken: int = -1

    def _decide(self, done: int, remaining: int) -> tuple[int, list[Trial], Decision[Trial] | None]:
        self.taken += 1
        turn = self.taken // 2
        if turn < len(self.trials) and self.trials[turn].failed:
            self.taken = 2 * (turn := turn + 1)
        if turn < len(self.trials):
            return turn, self.trials, None
        best = fastest(self.trials)
        return best, self.trials, Decision(done, remaining, self.trials[best], 2.0, 1.0)


class Watched(Watchdog):
    """Notes the steps of training that may take long."""

    long_steps: tuple[int, ...] = ()

    def progress(self, step: int, phase: str, long: bool = False) -> None:
        self.long_steps += (step,) if phase == "training" and long else ()


def runs(jobs: list[tuple[TrainConfig, list[dict[str, Any]]]]) -> list[tuple[int, ...]]:
    """Run each configuration with the first layout alone, or with all of them in turn, but for those with too large
    micro-batches, which find no memory. Return the steps that may take long."""
    world, whole = dist.get_world_size(), trainer.backward

    def with_little_memory(engine: Any, mesh: Any, inputs: Any, config: TrainConfig, *rest: Any) -> torch.Tensor:
        share = whole(engine, mesh, inputs, config, *rest)
        if config.sp_layout == "striped" and config.ac == "none" and config.batch_size == 2:
            raise torch.OutOfMemoryError("no memory")
        return share

    trainer.backward = with_little_memory
    launch = Launch(rank=dist.get_rank(), world_size=world, local_world_size=world)
    watched = [Watched(Launch(), seconds=0) for _ in jobs]
    for (config, layouts), watchdog in zip(jobs, watched, strict=True):
        trials = [Trial(replace(config, **layout), str(layout), 1.0) for layout in layouts]
        prepared = prepare(trials[0].config, launch)
        trials = [replace(each, config=replace(each.config, dp_shard=_dp(each.config, world))) for each in trials]
        tuner = EachInTurn(trials, 1.0) if len(trials) > 1 else None
        Trainer(prepared, watchdog=watchdog, tuner=tuner).run()
    return [each.long_steps for each in watched]


def _dp(config: TrainConfig, world: int) -> int:
    return world // (config.dp_replicate * config.sp_ring * config.sp_ulysses * config.tp * config.pp)


def metrics_of(folder: Path) -> torch.Tensor:
    names = ("step", "tokens", "loss", "grad_norm", "learning_rate", "eval_loss")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [[record[name] or 0.0 for name in names] for record in records]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", JOBS)
def test_a_race_changes_neither_losses_nor_weights(
    ranks: RankPool, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    family, layouts, flags = JOBS[name]
    source = load_model_config("tiny" if family == "tiny" else "qwen3-moe-tiny")
    source.num_hidden_layers = 2 if family == "moe" else 4
    save_weights(dict(drawn_model(source).named_parameters()), tmp_path / family, config=source)
    text, held = tmp_path / "text.txt", tmp_path / "held.txt"
    for file, lines in ((text, 400), (held, 20)):
        file.write_text("".join(f"line {line} of {file.name}, " * (1 + line % 7) for line in range(lines)))
    base = replace(RUN, model=str(tmp_path / family), data=str(text), data_cache=str(tmp_path / "cache"), **flags)
    base = replace(base, eval_data=str(held) if base.eval_every else "", steps=2 * len(layouts) + 2)
    tuned, alone = (replace(base, output=str(tmp_path / part)) for part in ("tuned", "alone"))
    in_turn, first = ranks.run(runs, 4, [(tuned, layouts), (alone, layouts[:1])])[0]
    assert first == (1,) and set(in_turn) >= set(range(1, 2 * len(layouts), 2))  # with each engine the first step
    found, wanted = metrics_of(tmp_path / "tuned"), metrics_of(tmp_path / "alone")
    assert found[:, :2].equal(wanted[:, :2]) and (found[:, 2:] - wanted[:, 2:]).abs().max() <= 1e-5 * wanted.max()
    folder = "adapter/adapter_model.safetensors" if base.lora_rank else "model/model.safetensors"
    torch.testing.assert_close(
        *(load_file(tmp_path / run / folder) for run in ("tuned", "alone")), rtol=1e-4, atol=1e-5
    )

    (line,) = [json.loads(line) for line in (tmp_path / "tuned" / "tune.jsonl").read_text().splitlines()]
    without = [bool(each["failed"]) for each in line["trials"]]
    assert [len(each["seconds"]) for each in line["trials"]] == [0 if failed else 1 for failed in without]
    assert without.count(True) == (name == "muon, packed")
    chosen = decided(tmp_path / "tuned", 4)
    written = yaml.safe_load((tmp_path / "tuned" / "config.yaml").read_text())
    assert chosen == line["chosen"] == {name: written[name] for name in OPTIONS} and decided(tmp_path, 4) is None
    assert decided(tmp_path / "tuned", 8) is None and decided(tmp_path / "alone", 4) is None


def trials_of(number: int) -> list[Trial]:
    return [Trial(TrainConfig(), str(index), 1.0) for index in range(number)]


def race(took: Sequence[float], allowed: float, noise: float = 0.0, moving: float = 0.0) -> tuple[list[Trial], int]:
    """Race candidates whose steps take so long; return them, and the number of steps."""
    tuner, rng, steps = Tuner(trials_of(len(took)), 1.0), random.Random(0), 0
    while (index := next_trial(tuner.trials, tuner.current, allowed)) is not None:
        if index != tuner.current:
            tuner.moved(tuner.trials[index], moving)
        tuner.ran(took[index] * (1 + noise * rng.random()) * (3 if tuner._first else 1))
        steps += 1
    return tuner.trials, steps


def test_the_fastest_stays() -> None:
    for number, took in enumerate([(1.0, 2.0, 0.5, 0.52), (1.0,), (1.0, 0.9, 0.8, 0.7, 0.6), (0.5, 0.501, 5.0)]):
        trials, steps = race(took, math.inf, noise=0.01, moving=0.2)
        assert took[fastest(trials)] <= 1.005 * min(took), (number, trials)
        assert steps <= len(took) * (COUNTED + 1) + 2 * COUNTED * ROUNDS
    trials, _ = race((1.0, 2.0, 0.5), math.inf)
    assert [len(each.seconds) for each in trials] == [COUNTED, 1, COUNTED] and HOPELESS < 2.0
    trials, _ = race((1.0, 1.0), math.inf, noise=0.5)
    assert [len(each.seconds) for each in trials] == [COUNTED * ROUNDS] * 2  # nothing tells them apart
    trials, _ = race((1.0, 0.5), math.inf)
    # The first step in a layout takes three times as long; that of the run itself is not due to the race.
    assert cost(trials) == pytest.approx(COUNTED * 0.5 + 2 * 0.5)


def test_a_race_costs_no_more_than_allowed() -> None:
    slow = (1.0, *(1.4 for _ in range(9)))
    costs = [cost(race(slow, allowed, moving=0.3)[0]) for allowed in (0.0, 1.0, 5.0, math.inf)]
    assert costs[0] == 0 and costs == sorted(costs) and costs[-1] > 15
    assert all(found <= allowed + 5 for found, allowed in zip(costs, (0.0, 1.0, 5.0), strict=False))
    trials, steps = race((1.0, 0.1), 0.0)
    assert steps == COUNTED + 1 and not trials[1].seconds  # no move is free


def test_the_steps_that_remain_decide_whether_the_fastest_is_worth_a_move() -> None:
    slower, faster = trials_of(2)
    trials = [replace(slower, seconds=(1.0,) * 9), replace(faster, seconds=(0.9,) * 9, first=(1.0,), moving=5.0)]
    tuner = Tuner(trials, 0.0)
    assert tuner._decide(20, 1000)[0] == 1
    chosen, _, decision = tuner._decide(20, 51)
    assert chosen == 0 and decision is not None and decision.best == trials[1]
    assert decision.verdict == "the change takes 5.10 s and saves 5.10 s" and decision.figures()["switched"] == 0
    tuner.trials[0] = replace(trials[0], failed="no memory")
    assert tuner._decide(20, 51)[0] == 1


def test_a_candidate_without_memory_is_left_out() -> None:
    tuner = Tuner(trials_of(3), 1.0)
    for took in (9.0, 1.0, 1.0, 1.0):
        tuner.ran(took)
    assert next_trial(tuner.trials, 0, math.inf) == 1
    tuner.moved(tuner.trials[1], 0.5, "no memory")
    assert tuner.current == 0 and next_trial(tuner.trials, 0, math.inf) == 2 and fastest(tuner.trials) == 0
    tuner.decision = Decision(4, 9, tuner.trials[0], 1.0, 1.0)
    assert "no memory" in str(tuner.table().rows) and json.loads(tuner.line(4))["trials"][1]["failed"] == "no memory"
