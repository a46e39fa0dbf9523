"""A run has its folder to itself, all ranks see it, and what it continues from is whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.harness.ranks import RankPool
from tests.parallel.checkpoint.test_checkpointer import overwrite, truncate
from usp.config import TrainConfig
from usp.parallel import latest
from usp.rlhf.config import RlhfConfig
from usp.rlhf.trainer import train_rlhf
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch, StopRequest
from usp.run.output import LOCK, locked
from usp.train.checkpoints import CHECKPOINTS, find_start, new_folder
from usp.train.prepare import prepare
from usp.train.trainer import train

RUN = TrainConfig(
    seq_len=64, steps=6, warmup_steps=2, checkpoint_every=2, batch_size=2, adam_eps=1e-4, device="cpu", hang_timeout=0
)


def train_here(config: TrainConfig | RlhfConfig) -> str:
    """Train on the ranks of a pool, or in this process; return the message of a refusal."""
    many = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
    launch = Launch(rank, size, local_rank=rank, local_world_size=size)
    where = "trainer" if isinstance(config, TrainConfig) else "rlhf"
    group = patch(f"usp.{'train' if where == 'trainer' else where}.trainer.process_group", lambda *_: nullcontext())
    with ExitStack() as stack:
        if many:
            stack.enter_context(group)
        stack.enter_context(patch("usp.train.checkpoints.locked", partial(locked, seconds=0.2)))
        stack.enter_context(patch("usp.train.checkpoints.SEEN_SECONDS", 0.2))
        try:
            if isinstance(config, TrainConfig):
                train(prepare(config, launch), launch)
            else:
                train_rlhf(config, launch, StopRequest(), None)
        except ConfigurationError as error:
            if not many and dist.is_initialized():
                dist.destroy_process_group()
            return str(error)
    return ""


def records_of(run: Path) -> list[tuple[int, float, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


# The folder


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(new_folder, ["tiny"] * 4))
    assert {folder.name for folder in folders} == {"now-tiny", "now-tiny-2", "now-tiny-3", "now-tiny-4"}
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.slow
def test_a_folder_in_use_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    with locked(tmp_path):
        for said in ranks.run(train_here, 2, replace(RUN, output=str(tmp_path))):
            assert said.startswith(f"{tmp_path} is in use: process {os.getpid()} on {socket.gethostname()} writes")
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_run_that_ended_while_this_one_waited_is_not_written_over(tmp_path: Path) -> None:
    prepared = prepare(replace(RUN, output=str(tmp_path)), Launch())
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigurationError, match="already holds a run: choose another directory"):
        train(prepared, Launch())
    dist.destroy_process_group()


def train_in(folders: list[Path]) -> str:
    before = Path.cwd()
    os.chdir(folders[dist.get_rank()])
    try:
        return train_here(replace(RUN, output="run"))
    finally:
        os.chdir(before)


@pytest.mark.slow
def test_a_folder_that_not_all_ranks_see_is_refused_before_the_first_step(ranks: RankPool, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    for said in ranks.run(train_in, 3, [one, other, other]):
        assert "the run's folder is not shared by all ranks" in said and "give an --output that all hosts share" in said
        assert f"wrote to {one}/run on " in said and f"not seen by ranks 1-2 in {other}/run on " in said
    assert [path.name for path in (one / "run").iterdir()] == [LOCK] and not list(other.iterdir())


# The checkpoint


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks with checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert ranks.run(train_here, 2, replace(RUN, batch_size=1, output=str(folder))) == ["", ""]
    assert [path.name for path in sorted((folder / CHECKPOINTS).iterdir())] == ["step-00000004", "step-00000006"]
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


DAMAGES = [
    ("rank-00001.safetensors", overwrite),
    ("rank-00000.safetensors", truncate),
    ("extra.safetensors", overwrite),
    ("checkpoint.json", overwrite),
    ("checkpoint.json", Path.unlink),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
@pytest.mark.slow(full=2)
def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(
    whole: Path, run: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run / CHECKPOINTS / "step-00000006" / name)
    assert train_here(replace(RUN, output=str(run), resume="auto")) == ""
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if line.startswith("warning: ")]
    assert f"checkpoint {run / CHECKPOINTS / 'step-00000006'} is damaged: " in line
    assert "it is now called step-00000006.damaged, and the one before it is used" in line
    assert f"resumed from: {run / CHECKPOINTS / 'step-00000004'}" in shown.out
    assert latest(run / CHECKPOINTS) == run / CHECKPOINTS / "step-00000006"  # written again
    for ours, theirs in zip(records_of(run), records_of(whole), strict=True):  # on one rank, with the same data
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_ranks_fall_back_together(ranks: RankPool, whole: Path, run: Path) -> None:
    overwrite(run / CHECKPOINTS / "step-00000006" / "rank-00001.safetensors")
    config = replace(RUN, batch_size=1, output=str(run), resume="auto")
    assert ranks.run(train_here, 2, config) == ["", ""]
    assert records_of(run) == records_of(whole)


def test_a_damaged_checkpoint_that_was_named_is_refused(run: Path, tmp_path: Path) -> None:
    newest = run / CHECKPOINTS / "step-00000006"
    config = replace(RUN, steps=8, output=str(tmp_path / "new"), resume=str(newest))
    for name in ("rank-00001.safetensors", "checkpoint.json"):  # found after the ranks have met, and before
        overwrite(newest / name)
        said = train_here(config)
        assert f"{newest / name} does not match its checksum" in said
    assert newest.is_dir()


@pytest.mark.slow
def test_the_damaged_checkpoint_of_another_run_is_left_alone(run: Path, tmp_path: Path) -> None:
    overwrite(run / CHECKPOINTS / "step-00000006" / "rank-00001.safetensors")
    assert train_here(replace(RUN, steps=7, output=str(tmp_path / "new"), resume=str(run))) == ""
    assert [step for step, _, _ in records_of(tmp_path / "new")] == [5, 6, 7]
    assert sorted(path.name for path in (run / CHECKPOINTS).iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_not_written_over(run: Path, whole: Path, tmp_path: Path) -> None:
    for path in (run / CHECKPOINTS).iterdir():
        overwrite(path / "checkpoint.json")
    assert "holds no complete checkpoint" in train_here(replace(RUN, output=str(tmp_path / "new"), resume=str(run)))
    for restart in range(2):  # once they are renamed, too
        said = train_here(replace(RUN, output=str(run), resume="auto"))
        assert said.startswith(f"the run in {run} cannot continue, because all of its checkpoints are damaged ("), (
            restart
        )
        assert "step-00000004.damaged, step-00000006.damaged" in said and "begin anew with another --output" in said
    with pytest.raises(ValueError, match="all of its checkpoints are damaged"):  # a restart by the launcher
        find_start(replace(RUN, output=str(run)), Launch(attempt=1))
    assert records_of(run) == records_of(whole)
    shutil.rmtree(run / CHECKPOINTS)
    assert train_here(replace(RUN, steps=1, output=str(run), resume="auto")) == ""


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_tried_again_and_left_alone(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usp.train.checkpoints.RETRIES", (0.0, 0.0))
    read, failures = Path.read_text, [4]

    def failing(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "checkpoint.json" and failures[0]:
            failures[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", failing)
    config = replace(RUN, steps=7, output=str(run), resume="auto")
    said = train_here(config)  # one attempt before the folder is claimed, three after it
    error = f"checkpoint {run / CHECKPOINTS / 'step-00000006'} cannot be read: [Errno {errno.ESTALE}] Stale file handle"
    assert said == f"{error}: start again when its file system answers"
    assert capsys.readouterr().err.count(f"warning: {error}; trying again in 0 s\n") == 2
    failures[0] = 2
    assert train_here(config) == ""
    assert [step for step, _, _ in records_of(run)] == [1, 2, 3, 4, 5, 6, 7]
    assert not list((run / CHECKPOINTS).glob("*.damaged"))


@pytest.mark.exhaustive
def test_rlhf_falls_back_too(ranks: RankPool, tmp_path: Path) -> None:
    config = RlhfConfig(
        prompt_tokens=64,
        prompts=2,
        group_size=2,
        max_new_tokens=4,
        sft_steps=1,
        steps=2,
        checkpoint_every=1,
        device="cpu",
        output=str(tmp_path),
        hang_timeout=0.0,
    )
    assert ranks.run(train_here, 2, config) == ["", ""]
    assert (tmp_path / LOCK).exists() and (tmp_path / "sft" / LOCK).exists()
    scores = (tmp_path / "metrics.jsonl").read_text()
    overwrite(next((tmp_path / CHECKPOINTS / "step-00000002").glob("rank-*")))
    assert ranks.run(train_here, 2, replace(config, resume="auto")) == ["", ""]
    assert (tmp_path / CHECKPOINTS / "step-00000002.damaged").exists()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == json.loads(scores.splitlines()[0])
    assert second["score"] == json.loads(scores.splitlines()[1])["score"]
