"""A run that is killed, hangs or is asked to stop loses no work."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.processes import Ended, Run, run_here
from tests.e2e.test_rlhf_cli import SMALL
from tests.harness.ranks import RankPool
from usp.parallel import latest
from usp.run.metrics import StepRecord
from usp.train.trainer import Trainer

TINY = ["--sp-ulysses", "2", "--seq-len", "256", "--log-every", "1", "--checkpoint-every", "2"]


def logged_steps(run: Path) -> list[tuple[int, float, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


FAILS = """
import os, signal, sys
from usp.commands.train import main
from usp.run.launch import leave
from usp.train.trainer import Trainer

step = Trainer.step

def fail(self, number):
    place = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], number
    if place == ("0", "1", 5):
        os.kill(os.getpid(), signal.SIGKILL)
    if place == ("1", "1", 7):
        raise RuntimeError("this rank is broken")
    return step(self, number)

Trainer.step = fail
leave(main(sys.argv[1:], os.environ))
"""


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_and_crash_resumes_in_its_directory_bit_for_bit(
    ranks: RankPool, launch: Callable[..., Run], tmp_path: Path
) -> None:
    """The default directory is named after the time, and the restart finds that of the first attempt."""
    args, undisturbed, broken = [*TINY, "--steps", "8"], tmp_path / "undisturbed", tmp_path / "broken"
    undisturbed.mkdir()
    broken.mkdir()
    ranks.run(run_here, 2, "train", args, undisturbed)
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with launch(args, broken, ranks=2, script=script, torchrun=("--standalone", "--max-restarts", "1")) as run:
        ended = run.end()
    assert ended.exit_code != 0 and "resumed from: " in ended.out, ended.err
    killed, _, crashed = ended.err.partition("failed (exitcode: -9) local_rank: 1 ")  # torchrun says it
    crashed, _, summary = crashed.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
    assert (killed + crashed).count("Traceback (most recent call last)") == 2  # the crashed rank's and torchrun's
    assert "lost its connection" not in killed + crashed
    assert crashed.count("RuntimeError: this rank is broken\nrank 1 failed: RuntimeError: this rank is broken") == 1
    assert "rank      : 1 " in summary.partition("Root Cause")[2]
    (first,), (second,) = (list((folder / "runs").iterdir()) for folder in (undisturbed, broken))
    assert len(logged_steps(second)) == 6
    ranks.run(run_here, 2, "train", [*args, "--output", str(second), "--resume", "auto"], broken)
    assert logged_steps(first) == logged_steps(second) and len(logged_steps(first)) == 8
    ours, theirs = weights_of(first), weights_of(second)
    assert ours and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_exits(ranks: RankPool, tmp_path: Path) -> None:
    args = [*TINY, "--sp-ulysses", "1", "--checkpoint-every", "0", "--steps", "100000"]
    (ended,) = ranks.run(stopped_in_step_3, 1, args, tmp_path)
    check_stopped(ended, tmp_path)
    assert logged_steps(next((tmp_path / "runs").iterdir()))[-1][0] == 3


def stopped_in_step_3(args: list[str], folder: Path) -> Ended:
    step = Trainer.step

    def stopped(self: Trainer, number: int) -> StepRecord:
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(self, number)

    with patch.object(Trainer, "step", stopped):
        return run_here("train", args, folder, 143)


def check_stopped(ended: Ended, folder: Path) -> None:
    assert ended.exit_code == 143
    (line,) = ended.err.splitlines()
    (run_folder,) = (folder / "runs").iterdir()
    assert line.startswith("stopped by SIGTERM after step ")
    assert line.endswith(f"continue with --resume runs/{run_folder.name}")
    last = logged_steps(run_folder)[-1][0]
    assert run_folder.name.endswith("-tiny")
    assert f"after step {last}; checkpoint runs/{run_folder.name}/checkpoints/step-{last:08}:" in line


@pytest.mark.slow
def test_a_killed_launcher_takes_its_ranks_along_and_can_be_started_again(
    launch: Callable[..., Run], tmp_path: Path
) -> None:
    """Without a watchdog. torchrun ends with 1 after a SIGTERM, whatever its ranks' exit code is."""
    args = [*TINY, "--steps", "100000", "--hang-timeout", "0", "--output", str(tmp_path / "run"), "--resume", "auto"]
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with launch(args, first, ranks=2) as killed:
        killed.wait_for(lambda: latest(tmp_path / "run" / "checkpoints") is not None)
        killed.process.kill()
        killed.process.wait()
        with launch(args, second, ranks=2) as run:
            run.wait_for(lambda: run.out.read_text().count("\nstep ") >= 2)
            assert killed.members() == []
            run.process.send_signal(signal.SIGTERM)
            ended = run.end()
        said = killed.err.read_text()
    assert said.count(f"error: torchrun (process {killed.process.pid}) is gone") == 1
    assert "resumed from: " in ended.out and ended.exit_code == 1
    assert "stopped by SIGTERM after step " in ended.err
    steps = [step for step, _, _ in logged_steps(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))


# Steps of a program on hosts, of which LOST dies in its third step, when a checkpoint of the second is complete and the
# fourth rank's log has both. What is left goes on, and in its fourth step waits for the other host.
ON_HOSTS = """
import os, signal, sys, time
from importlib import import_module
from pathlib import Path
from usp.run.launch import leave

program, run, lost = os.environ["PROGRAM"], Path(os.environ["OUTPUT"]), os.environ["LOST"]
trainer = import_module(f"usp.{program}.trainer")
kind = trainer.Trainer if program == "train" else trainer.RlhfTrainer
step, alone, died = kind.step, os.environ["GROUP_WORLD_SIZE"] == "1", run / "died"

def fail(self, number):
    while number == 4 and alone and not self.stop.signal_number:
        time.sleep(0.05)
    if number == 3 and not died.exists() and os.environ["GROUP_RANK"] == lost and os.environ["LOCAL_RANK"] == "1":
        while not (run / "checkpoints/step-00000002").exists() or (run / "metrics.jsonl").read_text().count("}\\n") < 2:
            time.sleep(0.05)
        died.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number)

kind.step = fail
leave(import_module(f"usp.commands.{program}").main(sys.argv[1:], os.environ))
"""
TRAINED = ["--seq-len", "256", "--log-every", "1", "--global-batch-size", "4"]


@pytest.mark.parametrize(
    ("program", "args", "elastic", "lost"),
    [
        ("train", TRAINED, ["--plan", "auto", "--hardware", "h100"], 0),
        ("train", [*TRAINED, "--model", "qwen3-tiny"], ["--sp-ulysses", "2"], 1),
        ("rlhf", [*SMALL, "--prompts", "4"], ["--plan", "flattening"], 0),
    ],
)
@pytest.mark.slow
def test_a_run_goes_on_when_a_host_is_lost_and_with_it_again_when_it_returns(
    ranks: RankPool,
    launch: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    args: list[str],
    elastic: list[str],
    lost: int,
) -> None:
    """The hosts are torchrun's agents with addresses of their own, which meet in a file."""
    args, calm, run = [*args, "--steps", "6", "--checkpoint-every", "2"], tmp_path / "calm", tmp_path / "run"
    (script := tmp_path / "on_hosts.py").write_text(ON_HOSTS)
    environment = {"PROGRAM": program, "OUTPUT": str(run), "LOST": str(lost), "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}.items():
        monkeypatch.setenv(name, value)
    meeting = f"--nnodes 1:2 --max-restarts 9 --rdzv-backend c10d --rdzv-id x --rdzv-endpoint {tmp_path / 'meeting'}"
    conf = "--rdzv-conf store_type=file,last_call_timeout=5"

    def host(number: int, name: str) -> Run:
        (folder := tmp_path / name).mkdir()
        torchrun = f"{meeting} {conf} --local-addr 127.0.0.{number + 1}".split()
        again = ["--output", str(run), "--resume", "auto"]
        return launch([*args, *elastic, *again], folder, ranks=2, script=script, torchrun=tuple(torchrun))

    with host(1 - lost, "stays") as stays, host(lost, "dies") as dies:
        dies.process.wait()
        stays.wait_for(lambda: logged_ranks(run) == [4, 4, 2])
        with host(lost, "returns") as returns:
            ends = [one.end() for one in (stays, returns)]
    assert [ended.exit_code for ended in ends] == [0, 0], ends[0].err + ends[1].err
    said = ends[0].out + ends[1].out
    assert re.search(r"resumed: step 3 ended [\d.]+ s after step 2, on 2 ranks, before on 4\n", said), said
    assert re.search(r"resumed: step 5 ended [\d.]+ s after step 4, on 4 ranks, before on 2\n", said), said
    assert logged_ranks(run) == [4, 4, 2, 2, 4, 4]
    ranks.run(run_here, 1, program, [*args, "--output", str(calm)], tmp_path)
    names = ("loss", "grad_norm") if program == "train" else ("score", "actor/loss")
    ours, theirs = ([[one[name] for name in names] for one in records_of(folder)] for folder in (run, calm))
    assert ours == [pytest.approx(each, rel=1e-4, abs=1e-5) for each in theirs]
    weights, alone = weights_of(run), weights_of(calm)
    assert all(torch.dist(weights[name], alone[name]) < 1e-5 * alone[name].norm() for name in alone)


def records_of(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def logged_ranks(run: Path) -> list[int]:
    return [record["ranks"] for record in records_of(run)]
