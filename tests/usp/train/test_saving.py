"""A checkpoint that cannot be saved is said at once and tried again, and the model is written whatever happens."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
from collections.abc import Collection, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.harness.ranks import RankPool
from tests.usp.train.test_claim import RUN, records_of
from usp.parallel.checkpoint import safetensors_storage
from usp.run.failures import CheckpointFailed, Stopped
from usp.run.launch import Launch, StopRequest
from usp.run.metrics import StepRecord
from usp.train.checkpoints import CHECKPOINTS
from usp.train.prepare import prepare
from usp.train.trainer import Trainer


@contextlib.contextmanager
def full_disk(failing: Collection[int]) -> Iterator[None]:
    """Let the writes of these saves, counted from 1, fail on rank 1."""
    write, saves = safetensors_storage.save_file, iter(range(1, 1000))

    def save_file(tensors: object, path: Path) -> None:
        if next(saves) in failing and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(tensors, path)

    with patch.object(safetensors_storage, "save_file", save_file):
        yield


class Patient(Trainer):
    """A trainer whose saves end before the next step does."""

    def step(self, number: int) -> StepRecord:
        if number == self.stop.since:
            self.stop.signal_number = signal.SIGTERM
        record = super().step(number)
        if self.checkpointer.saving is not None:
            wait([self.checkpointer.saving[1]])
        return record


def run(folder: Path, failing: Collection[int], stop_after: int = 0) -> tuple[str, str]:
    """Return the message with which the run ends, and what it says on the standard error before."""
    rank = dist.get_rank()
    launch = Launch(rank, 2, local_rank=rank, local_world_size=2)
    config = replace(RUN, batch_size=1, checkpoint_every=3, output=str(folder))
    said, end = io.StringIO(), ""
    with full_disk(failing), contextlib.redirect_stderr(said):
        try:
            Patient(prepare(config, launch), StopRequest(since=stop_after)).run()
        except (CheckpointFailed, Stopped) as error:
            end = str(error)
    return end, said.getvalue()


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / CHECKPOINTS).iterdir())


def not_saved(folder: Path, step: int) -> str:
    return f"checkpoint {folder / CHECKPOINTS / f'step-{step:08}'} was not saved: rank 1: OSError: [Errno 28] No space"


@pytest.mark.slow
def test_a_save_that_fails_is_said_after_the_next_step_and_tried_again(ranks: RankPool, tmp_path: Path) -> None:
    (end, said), (_, other) = ranks.run(run, 2, tmp_path, [1])
    assert end == "" and other == ""
    (line,) = said.splitlines()
    assert line.startswith(f"warning: {not_saved(tmp_path, 3)}")
    assert line.endswith("the run goes on, and tries again after step 5")
    assert saved(tmp_path) == ["step-00000005", "step-00000006"]
    assert [step for step, _, _ in records_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_the_last_save_is_tried_twice(ranks: RankPool, tmp_path: Path) -> None:
    (end, said), _ = ranks.run(run, 2, tmp_path, [2])
    assert end == "" and said.count("warning: ") == 1
    assert not_saved(tmp_path, 6) in said and said.endswith("trying again\n")
    assert saved(tmp_path) == ["step-00000003", "step-00000006"]


@pytest.mark.slow
def test_the_model_is_written_whatever_becomes_of_the_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    ends = [end for end, _ in ranks.run(run, 2, tmp_path, range(100))]
    for end in ends:
        assert end.startswith(not_saved(tmp_path, 6))
        assert end.endswith(f"the trained model is written: {tmp_path / 'model'}")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.use_cache
    assert saved(tmp_path) == []


@pytest.mark.parametrize(
    ("failing", "newest"), [((2, 3), "step-00000003"), ((1, 2, 3, 4), ""), ((2,), "step-00000004")]
)
@pytest.mark.slow(but=1)
def test_a_run_that_is_stopped_says_what_was_saved(
    ranks: RankPool, tmp_path: Path, failing: Collection[int], newest: str
) -> None:
    (end, _), _ = ranks.run(run, 2, tmp_path, failing, 4)
    if newest == "step-00000004":  # at the second attempt
        path = tmp_path / CHECKPOINTS / newest
        assert end == f"stopped by SIGTERM after step 4; checkpoint {path}: continue with --resume {tmp_path}"
        return
    assert end.startswith(f"stopped by SIGTERM after step 4; {not_saved(tmp_path, 4)}")
    what = f"the newest is checkpoint {tmp_path / CHECKPOINTS / newest}: continue with --resume {tmp_path}"
    assert end.endswith(what if newest else "; no checkpoint was saved")
    assert saved(tmp_path) == ([newest] if newest else [])
