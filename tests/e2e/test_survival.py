"""A run that is killed, hangs or is asked to stop loses no work."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.processes import Ended, Run, run_here
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
