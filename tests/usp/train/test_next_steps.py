"""What a run says at its end is true: its lines load the model, and its commands go on."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.e2e.processes import ROOT, run_here
from tests.harness.ranks import RankPool
from tests.usp.data.chat_templates import write_tokenizer
from tests.usp.tiny import drawn_model
from usp.commands.flags import parse
from usp.config import CurriculumStage, TrainConfig
from usp.data.tokenizer import Tokenizer
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.hf.tokenizers import load_tokenizer
from usp.rlhf.config import RlhfConfig
from usp.rlhf.trainer import train_rlhf
from usp.run.launch import Launch, StopRequest
from usp.train.prepare import prepare
from usp.train.summary import next_steps
from usp.train.trainer import train

SMALL = TrainConfig(seq_len=64, steps=2, warmup_steps=0, device="cpu")
EIGHT = Launch(0, 16, 0, 8, rendezvous=True)
NAMES = {
    each.__name__: each for each in (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoConfig, PeftModel)
}


@pytest.fixture(autouse=True)
def no_group_stays_open() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def said(text: str) -> dict[str, str]:
    """Return the last lines of what a run printed, by their first word."""
    lines = text.splitlines()
    begin = max(number for number, line in enumerate(lines) if line.startswith("run: "))
    return dict(line.split(": ", 1) for line in lines[begin:])


def words(command: str, program: str) -> list[str]:
    """Return the arguments of a command that starts a program in one process."""
    first, script, *arguments = shlex.split(command)
    assert (first, script) == ("python", f"{program}.py") and (ROOT / script).is_file()
    return [*arguments, "--device", "cpu"]


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def base_model(folder: Path) -> str:
    config = load_model_config("tiny")
    save_weights(dict(drawn_model(config).named_parameters()), folder, config=config)
    return str(folder)


def test_a_run_is_loaded_and_continued_by_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a run"  # whose path needs quotes
    train(prepare(replace(SMALL, output=str(folder)), Launch()), Launch())
    lines = said(capsys.readouterr().out)
    assert list(lines) == ["run", "load", "serve", "continue"] and lines["run"] == f"{folder}, 2 steps"
    assert eval(lines["load"], dict(NAMES)).config.model_type == "llama"
    assert shlex.split(lines["serve"]) == ["vllm", "serve", f"{folder}/model", "--tokenizer", f"{folder}/tokenizer"]
    assert (folder / "tokenizer").is_dir()
    train(prepare(parse(words(lines["continue"], "train"), TrainConfig), Launch()), Launch())
    assert steps_of(folder) == [1, 2, 3, 4]


@pytest.mark.parametrize("scaling", ["none", "yarn"])
@pytest.mark.slow(but=1)
def test_adapters_are_loaded_and_merged_by_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scaling: str
) -> None:
    config = load_model_config("tiny")
    config.max_position_embeddings = 64 if scaling == "none" else 32
    save_weights(dict(drawn_model(config).named_parameters()), tmp_path / "base", config=config)
    asked = replace(SMALL, model=str(tmp_path / "base"), tokenizer="bytes", lora_rank=2, rope_scaling=scaling)
    train(prepare(replace(asked, output=str(tmp_path / "run")), Launch()), Launch())
    lines = said(capsys.readouterr().out)
    model = eval(lines["load"], dict(NAMES))
    assert isinstance(model, PeftModel)
    assert model.config.rope_parameters["rope_type"] == ("default" if scaling == "none" else scaling)
    before, _, command = lines["serve"].partition(" python ")
    assert before == "a whole model, which is written by"
    train(prepare(parse(words(f"python {command}", "train"), TrainConfig), Launch()), Launch())
    lines = said(capsys.readouterr().out)
    assert steps_of(tmp_path / "run") == [1, 2]  # nothing is trained for it
    assert lines["load"] == f'AutoModelForCausalLM.from_pretrained("{tmp_path}/run/model")'
    assert eval(lines["load"], dict(NAMES)).config.model_type == "llama"


@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
@pytest.mark.slow(but=1)
def test_rlhf_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str) -> None:
    rows = [{"prompt": f"{n}?", "answer": "yes", "chosen": "yes", "rejected": "no"} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = RlhfConfig(
        algorithm=algorithm, data=str(tmp_path / "data.jsonl"), prompts=2, steps=1, device="cpu",
        output=str(tmp_path / "run"), model=base_model(tmp_path / "base"), tokenizer="bytes",
    )  # fmt: skip
    train_rlhf(config, Launch(), StopRequest(), None)
    lines = said(capsys.readouterr().out)
    assert ("serve" in lines) == (algorithm == "sft") and lines["run"].endswith("1 steps")
    expression, _, command = lines["load"].partition(", or ")
    assert eval(expression, dict(NAMES)).config.model_type == "llama"
    assert command == ("" if algorithm == "sft" else f"rlhf.py --reward-model {tmp_path}/run/model")
    train_rlhf(parse(words(lines["continue"], "rlhf"), RlhfConfig), Launch(), StopRequest(), None)
    assert steps_of(tmp_path / "run") == [1, 2]


@pytest.mark.slow
def test_the_rank_with_the_bar_says_what_others_wrote(ranks: RankPool, tmp_path: Path) -> None:
    few = ["--prompts", "2", "--group-size", "2", "--prompt-tokens", "64", "--max-new-tokens", "4", "--sft-steps", "0"]
    arguments = ["--plan", "separation", *few, "--steps", "1", "--output", "run"]
    first, second = ranks.run(run_here, 2, "rlhf", arguments, tmp_path)  # the second rank trains
    assert "actor: run/model\n" in first.out and "load: " in first.out and not second.out


def lines_of(
    folder: Path, config: TrainConfig = SMALL, launch: Launch = EIGHT, tokenizer: Tokenizer | None = None, **more: Any
) -> dict[str, str]:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    found = next_steps("train", config, folder, launch, tokenizer or load_tokenizer("bytes"), 2, "CausalLM", **more)
    return dict(line.split(": ", 1) for line in found)


def test_without_a_checkpoint_nothing_can_continue(tmp_path: Path) -> None:
    assert lines_of(tmp_path)["continue"].startswith("not possible, because --checkpoint-every 0")


def test_a_run_starts_on_as_many_ranks_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("usp.train.summary.latest", lambda folder: folder)
    again = f"--config {tmp_path}/config.yaml --resume {tmp_path} --steps 4"
    nodes = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 8"
    assert lines_of(tmp_path)["continue"] == f"torchrun {nodes} train.py {again}"
    one = replace(EIGHT, world_size=8)
    assert lines_of(tmp_path, launch=one)["continue"] == f"torchrun --nproc-per-node 8 train.py {again}"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/usp-train"])
    assert lines_of(tmp_path, launch=one)["continue"].startswith("torchrun --nproc-per-node 8 --no-python usp-train ")
    assert lines_of(tmp_path, launch=Launch())["continue"] == f"usp-train {again}"


def test_a_curriculum_is_continued_by_another_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("usp.train.summary.latest", lambda folder: folder)
    line = lines_of(tmp_path, replace(SMALL, curriculum=(CurriculumStage(2),)))["continue"]
    assert line.startswith(f"add a stage to {tmp_path}/config.yaml, then torchrun ") and "--steps" not in line


def test_a_model_with_a_chat_template_is_chatted_with(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer-of-a-model", "chatml")
    lines = lines_of(tmp_path / "run", tokenizer=load_tokenizer(str(tmp_path / "tokenizer-of-a-model")))
    model = tmp_path / "run" / "model"
    assert lines["serve"] == f"vllm serve {model}"
    assert lines["chat"] == f"transformers serve {model}, and in another terminal transformers chat {model}"
