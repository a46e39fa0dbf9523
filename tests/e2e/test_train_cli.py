"""train.py as a user runs it: to completion, interrupted, killed, crashed and diverged."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.processes import ONE_THREAD, ROOT, Ended, Run, run_here
from tests.harness.ranks import RankPool
from usp.commands.train import main

MESH = ["--sp-ulysses", "2", "--sp-ring", "2", "--seq-len", "512"]
FOREVER = ["--sp-ulysses", "2", "--seq-len", "256", "--steps", "100000", "--log-every", "1", "--output", "run"]


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(ranks: RankPool, exhaustive: bool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Return the directory and the result of a run on 4 ranks: with --exhaustive of torchrun, else of the pool."""
    folder, args = tmp_path_factory.mktemp("finished"), [*MESH, "--steps", "15", "--output", "run"]
    if not exhaustive:
        return folder / "run", ranks.run(run_here, 4, "train", args, folder)[0]
    with Run(args, folder, ranks=4) as run:
        return folder / "run", run.end()


@pytest.mark.slow
def test_a_run_completes_and_its_loss_falls(finished: tuple[Path, Ended]) -> None:
    folder, ended = finished
    assert ended.exit_code == 0, ended.err
    records = metrics_of(folder)
    assert len(records) == 15 and records[-1]["loss"] < records[0]["loss"] - 1.5
    assert all(record["attention_sent_bytes"] > 0 and record["fsdp_sent_bytes"] > 0 for record in records)
    assert "ranks: 4 (ring=2 ulysses=2), layout zigzag" in ended.out
    assert "step 15/15  loss" in ended.out and "model: run/model" in ended.out
    assert list((folder / "tensorboard").iterdir())


@pytest.mark.slow
def test_the_saved_model_has_learned(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    ids = torch.tensor([tokenizer.encode((ROOT / "usp" / "config.py").read_text())[:512]])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < metrics_of(folder)[0]["loss"] - 1.5


@pytest.mark.slow
def test_a_run_chooses_its_own_degrees(ranks: RankPool, tmp_path: Path) -> None:
    # With Muon, whose memory is proved by a dry run, which cannot be made inside the run.
    flags = ["--plan", "tune", "--hardware", "h100", "--global-batch-size", "2", "--seq-len", "512"]
    flags += ["--optimizer", "muon"]
    few = [*flags, "--output", "run", "--checkpoint-every", "20", "--tune-budget", "0.9"]
    ended = ranks.run(run_here, 2, "train", [*few, "--steps", "40"], tmp_path)[0]
    assert ended.out.count("layouts the simplest within") == 1 and "tuned, at the cost of" in ended.out
    assert len(metrics_of(tmp_path / "run")) == 40 and metrics_of(tmp_path / "run")[0]["tokens"] == 2 * 512
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert chosen["plan"] == "none" and chosen["batch_size"] * chosen["dp_shard"] * chosen["dp_replicate"] == 2
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "tune.jsonl").read_text().splitlines()]
    assert line["chosen"].items() <= chosen.items() and len(line["trials"]) > 1
    again = ranks.run(run_here, 2, "train", [*few, "--steps", "41", "--resume", "auto"], tmp_path)[0]
    assert "plan: as the run has tuned it" in again.out and len(metrics_of(tmp_path / "run")) == 41


@pytest.mark.slow
def test_interrupting_saves_and_leaves_no_process(launch: Callable[..., Run], tmp_path: Path) -> None:
    with launch(FOREVER, tmp_path, ranks=2) as run:
        run.wait_for(lambda: "step 2/" in run.out.read_text())
        os.killpg(run.process.pid, signal.SIGINT)  # as Ctrl-C does for the foreground process group
        ended = run.end()
    assert ended.exit_code != 0
    said = r"^stopped by SIGINT after step \d+; checkpoint (\S+): continue with --resume \S+$"
    (checkpoint,) = re.findall(said, ended.err, re.MULTILINE)
    assert (tmp_path / checkpoint).is_dir() and "Traceback" not in ended.err.partition("stopped by SIGINT")[0]


@pytest.mark.slow
def test_a_diverged_run_names_the_last_good_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = [*FOREVER, "--sp-ulysses", "1", "--learning-rate", "1e30", "--warmup-steps", "0"]
    try:
        assert main(["--device", "cpu", *args], ONE_THREAD) != 0
    finally:
        dist.destroy_process_group()  # which a run that fails leaves to the end of its process
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "step 2 has loss = " in line and "The last good step is 1, and its weights are in run/last-good" in line
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "last-good")
