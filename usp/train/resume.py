"""Where a run begins: in which folder, and from which checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel import latest
from usp.config import RunConfig
from usp.run.launch import Launch
from usp.run.lock import holder, this_process
from usp.run.metrics import METRICS_FILE

AUTO = "auto"
CHECKPOINTS, MODEL, ADAPTER, BEST = "checkpoints", "model", "adapter", "best"  # folders of a run
RUNS = Path("runs")  # of runs without --output
FOLDER_KEY = "run-folder"


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        folder: of the run; None for one named after the time.
        checkpoint: to resume from; None for a new run.
        finished_too: the checkpoint may be of the last step, after which only the model is left to write.
        named: the user named this checkpoint; otherwise it is the newest of a run, and the one before can replace it.
    """

    folder: Path | None = None
    checkpoint: Path | None = None
    finished_too: bool = False
    named: bool = False


def remember_folder(folder: Path, launch: Launch) -> None:
    """Remember the run's folder for restarts of the same launch; rank 0 does."""
    if launch.rank == 0:
        launch.remember(FOLDER_KEY, str(folder))


def find_start(
    config: RunConfig, launch: Launch, traces: Sequence[str] = (METRICS_FILE,), damaged: Collection[Path] = ()
) -> Start:
    """Find where the run of `config` begins: in its own folder after a restart, where `--resume` says, or anew.

    traces: names of files by which a folder is known to hold a run. damaged: checkpoints that cannot be used.

    Raises ValueError for a `--resume` without checkpoint, and an `--output` that holds another run or is not writable.
    """
    start = _start(config, launch, traces, damaged)
    folder = (start.folder or RUNS).resolve()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise ValueError(
            f"--output = {start.folder or RUNS} is not writable: {above} is not a directory that files can be "
            f"created in; choose another"
        )
    return start


def _start(config: RunConfig, launch: Launch, traces: Sequence[str], damaged: Collection[Path]) -> Start:
    folder = Path(config.output).expanduser() if config.output else None
    remembered = launch.recall(FOLDER_KEY) if launch.attempt > 0 else None
    # If there is a store and it has no folder, no earlier attempt got as far as writing to one.
    restarted = launch.attempt > 0 and (remembered is not None or launch.agent_store is None)
    if restarted:
        folder = Path(remembered) if remembered else folder
        found = latest(folder / CHECKPOINTS, damaged) if folder else None
        if found or not config.resume:
            return Start(folder, found, finished_too=True)
    if config.resume == AUTO:
        if folder is None:
            raise ValueError("--resume auto continues the run in --output: give --output")
        return Start(folder, latest(folder / CHECKPOINTS, damaged), finished_too=True)
    start = _named(config.resume, folder, damaged) if config.resume else Start(folder)
    continued = start.checkpoint.parent.parent.resolve() if start.checkpoint else None
    if folder and folder.resolve() != continued and not restarted and _holds_a_run(folder, traces):
        writer = holder(folder)
        busy = f", to which {writer} writes" if writer not in ("", this_process()) else ""
        raise ValueError(
            f"--output = {config.output} already holds a run{busy}: choose another directory, or continue "
            f"it with --resume auto"
        )
    return start


def _holds_a_run(folder: Path, traces: Sequence[str]) -> bool:
    return any((folder / name).exists() for name in traces) or latest(folder / CHECKPOINTS) is not None


def _named(resume: str, folder: Path | None, damaged: Collection[Path]) -> Start:
    """Resolve `--resume`: a run's folder, its `checkpoints` folder, or one checkpoint."""
    path = Path(resume).expanduser().absolute()  # not resolved: `checkpoints` may be a link to another disk
    is_checkpoint = re.fullmatch(r"step-\d+", path.name)
    run = path.parent.parent if is_checkpoint else path.parent if path.name == CHECKPOINTS else path
    newest = latest(run / CHECKPOINTS, damaged)
    found = path if is_checkpoint else newest
    if found is None or not found.is_dir():
        raise ValueError(
            f"--resume = {resume} holds no complete checkpoint: give the folder of a run, or one of its checkpoints"
        )
    is_newest = newest is not None and found.resolve() == newest.resolve()
    if not is_newest and (folder is None or folder.resolve() == run.resolve()):
        raise ValueError(
            f"--resume = {resume} is not the newest checkpoint of {run} ({newest}), from which a later "
            f"restart would continue: give another --output to the run that continues from it"
        )
    return Start(folder or run, found, named=bool(is_checkpoint))
