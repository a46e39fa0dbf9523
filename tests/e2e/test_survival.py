"""A run that is killed, hangs or is asked to stop loses no work."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.e2e.processes import Run

TINY = ["--sp-ulysses", "2", "--seq-len", "256", "--log-every", "1", "--checkpoint-every", "2"]


def logged_steps(run: Path) -> list[tuple[int, float, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_killed_run_resumes_in_its_directory_bit_for_bit(tmp_path: Path) -> None:
    """The default directory is named after the time, and the restart finds that of the first attempt."""
    args, undisturbed, killed = [*TINY, "--steps", "8"], tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    with Run(args, undisturbed, ranks=2, torchrun=("--standalone",)) as run:
        assert run.end().exit_code == 0
    with Run(args, killed, ranks=2, torchrun=("--standalone", "--max-restarts", "1")) as run:
        run.wait_for(lambda: "step 5/" in run.out.read_text())
        os.kill(run.workers()[1], signal.SIGKILL)
        ended = run.end()
    assert ended.exit_code == 0, ended.err
    (first,), (second,) = (list((folder / "runs").iterdir()) for folder in (undisturbed, killed))
    assert logged_steps(first) == logged_steps(second) and len(logged_steps(first)) == 8
    ours, theirs = weights_of(first), weights_of(second)
    assert ours and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sigterm_saves_a_checkpoint_and_exits(tmp_path: Path) -> None:
    args = [*TINY, "--sp-ulysses", "1", "--checkpoint-every", "0", "--output", "run"]
    with Run([*args, "--steps", "100000"], tmp_path) as run:
        run.wait_for(lambda: "step 2/" in run.out.read_text())
        run.process.send_signal(signal.SIGTERM)
        ended = run.end()
    assert ended.exit_code == 143
    (line,) = ended.err.splitlines()
    assert line.startswith("stopped by SIGTERM after step ") and line.endswith("continue with --resume")
    last = logged_steps(tmp_path / "run")[-1][0]
    assert f"after step {last}; checkpoint run/checkpoints/step-{last:08}:" in line


HANG = """
import os, sys, time
from usp.commands.train import main
from usp.train.trainer import Trainer

step = Trainer.step

def hang(self, number):
    if number == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1000)
    return step(self, number)

Trainer.step = hang
exit_code = main(sys.argv[1:], os.environ)
if exit_code:
    os._exit(exit_code)
"""


def test_a_hang_is_reported_and_the_run_resumes(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    args = [*TINY, "--steps", "4", "--hang-timeout", "10", "--output", "run"]
    with Run(args, tmp_path, ranks=2, script=script, torchrun=("--standalone", "--max-restarts", "1")) as run:
        ended = run.end()
    assert ended.exit_code == 0, ended.err
    assert ended.err.count("error: no progress for 10 seconds (--hang-timeout)") == 1
    assert "rank 0: in all_reduce (step 3, " in ended.err
    assert "rank 1: in no collective (step 2, checkpoint)" in ended.err and "look first at rank 1" in ended.err
    assert [step for step, _, _ in logged_steps(tmp_path / "run")] == [1, 2, 3, 4]
