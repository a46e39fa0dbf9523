"""Error types, their messages and exit codes; objects from a user's Python file."""

from __future__ import annotations

import difflib
import importlib.util
import json
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from usp.parallel import RanksDisagree, Violation, violation_of

from .launch import TICK_SECONDS, Launch, RanksMissing

T = TypeVar("T")

LAUNCHER_SECONDS = 10.0
EXIT_SECONDS = 0.5  # for a process to exit
REACH_SECONDS = 5.0  # for a host to accept a connection
REFUSED = 2
SIGNALLED = 128  # as shells report: 128 + the signal's number
INTERRUPTED = SIGNALLED + signal.SIGINT
HUNG = 124  # the exit code of timeout(1)
# What torch says when another rank is gone.
LOST_PEER = ("closed by peer", "reset by peer", "connection refused", "socket closed", "broken pipe", "remote process")


class ConfigurationError(ValueError):
    """Invalid configuration; raised on every rank before any of them communicates."""


def listed(problems: Sequence[str | Violation]) -> str:
    """Join `problems` into one message, numbered if there are several."""
    if len(problems) == 1:
        return str(problems[0])
    lines = (f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    return "\n".join([f"{len(problems)} problems:", *lines])


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'zigzag'?)` if `word` is close to one of `known`, otherwise nothing."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


class Problems(list["str | Violation"]):
    """Problems of a configuration, collected to be reported in one message. errors: types that `attempt` expects; any
    other error is not a problem of the configuration and passes through; ValueError and OSError by default."""

    def __init__(self, *errors: type[Exception]) -> None:
        super().__init__()
        self._errors = errors or (ValueError, OSError)

    def attempt(self, load: Callable[[], T]) -> T | None:
        """Return `load()`; None if it fails, after adding its message."""
        try:
            return load()
        except self._errors as error:
            self.append(violation_of(error))
            return None

    def check(self) -> None:
        """Raise ConfigurationError if there are any."""
        if self:
            raise ConfigurationError(listed(self))


class TrainingDiverged(RuntimeError):
    """Non-finite loss or gradient norm, or samples of another model; raised on every rank at the same step."""


class UserCodeFailed(RuntimeError):
    """Failure of a user-provided function; the message needs no traceback."""


class WriteFailed(RuntimeError):
    """Files of a model could not be written; raised on every rank."""


class CheckpointFailed(RuntimeError):
    """The model is written, but not the last checkpoint; raised on every rank."""


class Stopped(Exception):
    """Stop requested by a signal; raised on every rank after the same step. checkpoint: the newest. failure: why that
    is not of this step; empty if it is."""

    def __init__(self, signal_number: int, step: int, checkpoint: Path | None, failure: str = "") -> None:
        name = signal.Signals(signal_number).name
        saved = (
            f"checkpoint {checkpoint}: continue with --resume {checkpoint.parents[1]}"
            if checkpoint
            else "no checkpoint was saved"
        )
        lost = f"{failure}; the newest is " if failure and checkpoint else f"{failure}; " if failure else ""
        super().__init__(f"stopped by {name} after step {step}; {lost}{saved}")
        self.signal_number = signal_number


@dataclass(frozen=True)
class Ending:
    """Message and exit code of a failed rank. consequence: it failed because another rank did."""

    message: str
    exit_code: int
    traceback: str = ""
    consequence: bool = False


def ending_of(error: BaseException, rank: int) -> Ending:
    """Return how `rank` ends after `error`."""
    if isinstance(error, ConfigurationError):
        return Ending(f"error: {error}", REFUSED)
    if isinstance(error, (TrainingDiverged, RanksDisagree, UserCodeFailed, WriteFailed, CheckpointFailed)):
        return Ending(f"error: {error}", 1)
    if isinstance(error, RanksMissing):
        return Ending(f"error: {error}", HUNG)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted: progress since the last checkpoint is lost", INTERRUPTED)
    if isinstance(error, Stopped):
        return Ending(str(error), SIGNALLED + error.signal_number)
    words = str(error).lower() if isinstance(error, RuntimeError) else ""
    if isinstance(error, dist.DistNetworkError) or any(sign in words for sign in LOST_PEER):
        message = f"rank {rank} lost its connection to another rank; see the message of the rank that failed"
        return Ending(message, 1, consequence=True)
    text = "".join(traceback.format_exception(error))
    return Ending(f"rank {rank} failed: {type(error).__name__}: {error}", 1, traceback=text)


def end(ending: Ending, launch: Launch, error_file: str | None, asked_to_stop: bool = False) -> int:
    """Report `ending` unless another rank does, and return the exit code. Under torchrun a refusal is only in its
    summary, everything else is printed as well.

    error_file: file that torchrun's summary reads (TORCHELASTIC_ERROR_FILE); None without torchrun. asked_to_stop:
    whether a signal has asked this rank to stop.
    """
    interrupted = ending.exit_code == INTERRUPTED
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and torchrun each send one for one Ctrl-C
    if ending.consequence and asked_to_stop:
        return ending.exit_code
    store = reachable_store(launch)
    if ending.exit_code == REFUSED and store is not None and error_file is not None:
        with suppress(dist.DistError):  # torchrun has exited
            return _refuse(ending.message, launch, store, error_file)
    reported = f"said/{launch.attempt}"
    # Without a store its host is gone, or this rank's own torchrun: then a thread says so at its next tick, and exits.
    patience = LAUNCHER_SECONDS if store is not None or launch.agent_store is None else 10 * TICK_SECONDS
    if ending.consequence:
        wait_for_key(store, reported, patience)
    first = _first_to_end(store, launch)
    if not first and not interrupted:
        wait_for_key(store, reported, patience)
        if store is not None:
            time.sleep(EXIT_SECONDS)  # of two that leave at once, torchrun would name the lower rank as the cause
    if first or (first is None and not interrupted):
        print(ending.traceback + ending.message, file=sys.stderr, flush=True)
        if error_file is not None and not ending.consequence:
            tell_launcher(ending.message, error_file)
        if store is not None:
            with suppress(dist.DistError):
                store.set(reported, "")
    return ending.exit_code


def _refuse(message: str, launch: Launch, store: dist.Store, error_file: str) -> int:
    """Return the exit code of a rank that refuses: 0 except for the first of its host, because torchrun reports every
    other one in several lines. That one gives torchrun `message`, with which its summary ends, and leaves last."""
    store.set(f"said/{launch.attempt}", "")
    store.add(f"ended/{launch.attempt}", 1)
    host = f"refused/{launch.attempt}/{launch.rank - launch.local_rank}"
    if store.add(host, 1) > 1:
        return 0
    tell_launcher(message, error_file)
    end = time.monotonic() + LAUNCHER_SECONDS
    while store.add(host, 0) < launch.local_world_size and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(EXIT_SECONDS)
    return REFUSED


def tell_launcher(message: str, error_file: str) -> None:
    """Write this rank's message for torchrun's summary, at once whole: torchrun fails at a file that is not."""
    whole = Path(f"{error_file}.new")
    whole.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}))
    whole.replace(error_file)


def reachable_store(launch: Launch) -> dist.Store | None:
    """Return torchrun's store; None if there is none, or it is gone."""
    try:
        if launch.agent_store is not None:  # torch tries for a minute to reach a port that nobody has
            socket.create_connection(launch.agent_store, REACH_SECONDS).close()
        return launch.store()
    except (dist.DistError, OSError):
        return None


def wait_for_key(store: dist.Store | None, key: str, seconds: float) -> None:
    """Wait until `key` is in the store, at most `seconds`; without a store, wait for all of them."""
    if store is None:
        time.sleep(seconds)
        return
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not store.check([key]):
            time.sleep(0.05)
    except dist.DistError:  # torchrun has exited
        return


def _first_to_end(store: dist.Store | None, launch: Launch) -> bool | None:
    """Return whether this is the first rank of the attempt to ask; without a store True on rank 0, else None."""
    unknown = True if launch.rank == 0 else None
    try:
        return unknown if store is None else store.add(f"ended/{launch.attempt}", 1) == 1
    except dist.DistError:
        return unknown


def load_from_file(name: str, what: str) -> Any:
    """Return the object that PATH.py:NAME names; `what` it is, for messages. Raises ValueError for another name, a file
    that cannot be imported, or a missing object."""
    path, _, object_name = name.rpartition(":")
    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"{name} must be PATH.py:NAME with an existing file")
    spec = importlib.util.spec_from_file_location(f"{file.resolve()}", file)  # a name that no import can shadow
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ValueError(f"{name}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, object_name):
        raise ValueError(f"{name}: {file} has no {what} {object_name}{nearest(object_name, vars(module))}")
    return getattr(module, object_name)
