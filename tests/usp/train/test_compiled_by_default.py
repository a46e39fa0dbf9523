"""train.py compiles layers on a GPU unless it is told not to, or told something that is against it."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.usp.tiny import tiny_model
from tests.usp.train.test_trainer import launch_of_pool
from usp.commands import train as train_command
from usp.commands.flags import parse
from usp.config import TrainConfig
from usp.run.launch import Launch, StopRequest
from usp.train.prepare import prepare
from usp.train.resolve import compiled_if_possible
from usp.train.trainer import Trainer

AGAINST: tuple[dict[str, Any], ...] = (
    {"ac": "selective"},
    {"pp": 2, "pp_schedule": "zero-bubble", "zero": 1, "micro_batches": 2, "batch_size": 2},
    {"sample_every": 5, "sample_prompts": "prompts.jsonl"},
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(folder)
    return TrainConfig(model=str(folder), seq_len=64)


def test_what_is_against_it_keeps_layers_eager(plain: TrainConfig) -> None:
    assert compiled_if_possible(plain, 4) == replace(plain, compile=True)
    for changes in AGAINST:
        config = replace(plain, **changes)
        assert compiled_if_possible(config, 4) == config
    wrong = replace(plain, sp_ring=3)  # which is said elsewhere, whether layers are compiled or not
    assert compiled_if_possible(wrong, 4) == replace(wrong, compile=True)
    assert compiled_if_possible(replace(plain, model="nowhere"), 4).compile


@pytest.mark.slow
def test_what_is_given_is_known(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("compile: false\n")
    cases = (
        ((), None),
        (("--compile",), True),
        (("--no-compile",), False),
        (("--config", str(tmp_path / "run.yaml")), False),
    )
    for argv, wanted in cases:
        assert parse(argv, TrainConfig, unset=("compile",)).compile is wanted
    assert parse([], TrainConfig).compile is False


@pytest.mark.parametrize(
    ("gpu", "device", "given", "compiled"),
    [
        (True, "auto", None, True),
        (True, "cuda", None, True),
        (True, "cpu", None, False),
        (True, "auto", False, False),
        (False, "auto", None, False),
        (False, "cpu", True, True),
    ],
)
def test_train_compiles_on_gpus_by_default(
    monkeypatch: pytest.MonkeyPatch, plain: TrainConfig, gpu: bool, device: str, given: Any, compiled: bool
) -> None:
    prepared: list[TrainConfig] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("usp.train.prepare.prepare", lambda config, launch: prepared.append(config))
    monkeypatch.setattr("usp.train.trainer.train", lambda *_: None)
    config = replace(plain, device=device, compile=given)
    train_command._run(config, Launch(), StopRequest(), None)
    assert [each.compile for each in prepared] == [compiled]


def printed_by_steps(config: TrainConfig) -> list[str]:
    """What each of two steps prints, without the compiler."""
    with patch("usp.train.build.compile_layers"):
        trainer, printed = Trainer(prepare(config, launch_of_pool())), []
    for number in (1, 2):
        with redirect_stdout(io.StringIO()) as out:
            trainer.step(number)
        printed.append(out.getvalue())
    return printed


@pytest.mark.slow
def test_the_log_says_how_long_the_compiling_step_took(ranks: RankPool, tmp_path: Path) -> None:
    config = TrainConfig(seq_len=64, steps=3, device="cpu", hang_timeout=0, output=str(tmp_path))
    for compiles in (True, False):
        ((first, second),) = ranks.run(printed_by_steps, 1, replace(config, compile=compiles))
        assert first.startswith("compiled: step 1 took ") == compiles and "compiled" not in second
