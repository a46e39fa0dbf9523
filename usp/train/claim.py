"""Claiming the folder of a run: one run writes to it, all ranks see it, and the checkpoint to continue is whole.

    create and lock it (rank 0) -> every rank reads the lock -> find the start again (rank 0) -> verify its checkpoint

What `prepare` found before the ranks communicated may have changed until the folder is locked; what counts is the
start that is found under the lock.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from parallel import DamagedCheckpoint, set_aside, verify
from usp.run.failures import ConfigurationError
from usp.run.lock import LOCK, locked
from usp.run.output import warn
from usp.run.watchdog import named

from .resume import CHECKPOINTS, RUNS, Start

T = TypeVar("T")
P = TypeVar("P", bound=Any)  # a dataclass with the fields `start` and `saved`

SEEN_SECONDS = 5.0  # for a network file system to show on one host what another one has written


@contextmanager
def run_folder(folder: Path | None, name: str) -> Iterator[Path]:
    """Hold the folder of a run during the block, a new one of RUNS called by `name` for None. Collective.

    Raises:
        ConfigurationError: on every rank, if another run writes to the folder, or some ranks do not see it.
    """
    with ExitStack() as stack:
        claimed, text = from_first_rank(lambda: _create_and_lock(folder, name, stack))
        _check_shared(claimed, text)
        yield claimed


def settled(prepared: P, folder: Path, find: Callable[[Collection[Path]], Start], prepare: Callable[[Start], P]) -> P:
    """Return `prepared` in its folder, which is locked, with a checkpoint that is whole. Collective.

    find, prepare: how `prepared` was made; it is made anew where the start is no longer the one that was found. find
    takes the checkpoints that are damaged.

    Raises:
        ConfigurationError: on every rank, as `sound_start` and `prepare` do.
    """
    start = sound_start(folder, find)
    if start == replace(prepared.start, folder=folder) and (prepared.saved is None) == (start.checkpoint is None):
        return replace(prepared, start=start)
    return prepare(start)


def sound_start(folder: Path, find: Callable[[Collection[Path]], Start]) -> Start:
    """Find where the run in `folder` begins, from a checkpoint that agrees with its checksums. Collective.

    A damaged checkpoint of this folder is renamed, so that no later run finds it.

    Raises:
        ConfigurationError: on every rank, if `find` refuses, or the user named a checkpoint that is damaged.
    """
    damaged: list[Path] = []
    while True:
        start = from_first_rank(lambda: replace(find(damaged), folder=folder))
        if start.checkpoint is None:
            return start
        try:
            verify(start.checkpoint)
            return start
        except DamagedCheckpoint as error:
            if start.named:
                raise ConfigurationError(f"{error}; choose another checkpoint") from error
            damaged.append(start.checkpoint)
            if dist.get_rank() == 0:
                warn(f"{error}; {_put_away(start.checkpoint, folder)}, and the one before it is used, if there is one")


def from_first_rank(work: Callable[[], T]) -> T:
    """Return on every rank what `work` returns on rank 0. Collective.

    Raises:
        ConfigurationError: on every rank, for a ValueError or OSError of `work`.
    """
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = work()
        except (ValueError, OSError) as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise ConfigurationError(told[1])
    return told[0]


def new_folder(name: str) -> Path:
    """Create a folder of RUNS that is named after the time and `name`, and numbered if there is one of that name."""
    RUNS.mkdir(parents=True, exist_ok=True)
    first = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    for folder in itertools.chain([first], numbered):
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("there is always another number")


def _create_and_lock(folder: Path | None, name: str, stack: ExitStack) -> tuple[Path, str]:
    folder = folder or new_folder(name)
    try:
        return folder, stack.enter_context(locked(folder))
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error}") from error


def _check_shared(folder: Path, text: str) -> None:
    """Check that every rank reads `text` in the folder's lock. Raises ConfigurationError on every rank otherwise."""
    end = time.monotonic() + SEEN_SECONDS
    while not (seen := _reads(folder, text)) and time.monotonic() < end:
        time.sleep(0.1)
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (seen, f"{folder.resolve()} on {socket.gethostname()}"))
    without = defaultdict(list)
    for rank, (seen, place) in enumerate(places):
        if not seen:
            without[place].append(rank)
    if without:
        shown = "; ".join(f"{named(ranks)} in {place}" for place, ranks in without.items())
        raise ConfigurationError(
            f"the run's folder is not shared by all ranks: what rank 0 wrote to {places[0][1]} is not seen by {shown}. "
            f"Every rank writes its part of each checkpoint: give an --output that all hosts share"
        )


def _reads(folder: Path, text: str) -> bool:
    with suppress(OSError):
        next(folder.parent.iterdir(), None)  # NFS looks again for a folder that it remembers as missing
        return (folder / LOCK).read_text() == text
    return False


def _put_away(checkpoint: Path, folder: Path) -> str:
    """Rename a damaged checkpoint of `folder`, and say what became of it; those of other runs are left alone."""
    if checkpoint.parent.resolve() != (folder / CHECKPOINTS).resolve():
        return "it is left alone"
    try:
        return f"it is now called {set_aside(checkpoint).name}"
    except OSError as error:
        return f"it cannot be renamed ({error})"
