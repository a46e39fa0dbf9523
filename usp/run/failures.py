"""How a run that fails ends: one readable message, and an exit code.

    ConfigurationError   every rank raises it before it communicates   message, no traceback   exit code 2
    TrainingDiverged     every rank raises it at the same step         message, no traceback   exit code 1
    RanksDisagree        every rank raises it at the same point        message, no traceback   exit code 1
    UserCodeFailed       one rank raises it; its message says it all   message, no traceback   exit code 1
    a lost connection    another rank is gone, and says why itself     one line                exit code 1
    anything else        one rank's own fault, or the same on all      traceback and rank      exit code 1
    Ctrl-C               every rank gets the signal                    one line                exit code 130
    Stopped              every rank agreed to stop, and saved          one line                exit code 143, 138
    a hang               usp.run.watchdog ends every rank                  one message             exit code 124

The first rank to end speaks; it is found with a counter on torchrun's board, which outlives the ranks. The others keep
quiet and leave when it has spoken: leaving earlier could end the first before. Without a board rank 0 speaks at once,
and the others only when nothing ends them while they wait. A rank that lost a connection waits in any case: what ended
the other rank, or the launcher that saw it end, knows more; it leaves at once when the launcher has asked it to.
"""

from __future__ import annotations

import difflib
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from parallel import RanksDisagree

from .launch import Launch

LAUNCHER_SECONDS = 10.0
SIGNALLED = 128  # shells add the signal's number
INTERRUPTED = SIGNALLED + signal.SIGINT
HUNG = 124  # the exit code of timeout(1)
LOST_PEER = ("closed by peer", "reset by peer", "connection refused", "socket closed", "broken pipe", "remote process")


class ConfigurationError(ValueError):
    """The configuration cannot run; every rank finds the same before any of them communicates."""


def listed(problems: Sequence[str]) -> str:
    """One message of all of them."""
    if len(problems) == 1:
        return problems[0]
    lines = (f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    return "\n".join([f"{len(problems)} things to change", *lines])


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'zigzag'?)` for a near match of `word` in `known`, otherwise nothing."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


class TrainingDiverged(RuntimeError):
    """Loss or gradient norm are no longer finite; every rank sees the same at the same step."""


class UserCodeFailed(RuntimeError):
    """What the user gave to be called failed on this rank; the message says all there is to know."""


class Stopped(Exception):
    """The run ended after a whole step because a signal asked for it; every rank raises it after the same step."""

    def __init__(self, signal_number: int, step: int, checkpoint: Path | None) -> None:
        name = signal.Signals(signal_number).name
        kept = f"checkpoint {checkpoint}: continue with --resume" if checkpoint else "no checkpoint was saved"
        super().__init__(f"stopped by {name} after step {step}; {kept}")
        self.signal_number = signal_number


@dataclass(frozen=True)
class Ending:
    """What a failed rank says, and its exit code. consequence: another rank's end is what ended this one."""

    message: str
    exit_code: int
    traceback: str = ""
    consequence: bool = False


def ending_of(error: BaseException, rank: int) -> Ending:
    """How a rank ends that `error` stops."""
    if isinstance(error, ConfigurationError):
        return Ending(f"error: {error}", 2)
    if isinstance(error, (TrainingDiverged, RanksDisagree, UserCodeFailed)):
        return Ending(f"error: {error}", 1)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted: what came after the last checkpoint is lost (SIGTERM saves it)", INTERRUPTED)
    if isinstance(error, Stopped):
        return Ending(str(error), SIGNALLED + error.signal_number)
    if lost_peer(error):
        lost = f"rank {rank} lost its connection to another rank; the rank that failed says why"
        return Ending(lost, 1, consequence=True)
    text = "".join(traceback.format_exception(error))
    return Ending(f"rank {rank} failed: {type(error).__name__}: {error}", 1, traceback=text)


def lost_peer(error: BaseException) -> bool:
    """Whether `error` says that another rank went away, not that this one did something wrong."""
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in LOST_PEER)


def end(ending: Ending, launch: Launch, error_file: str | None, asked_to_stop: bool = False) -> int:
    """Print what there is to say, if no other rank has said it, and give the exit code.

    error_file: where torchrun reads what its summary repeats (TORCHELASTIC_ERROR_FILE); None without torchrun.
    asked_to_stop: the launcher, or somebody else, has sent this rank a signal to end.
    """
    interrupted = ending.exit_code == INTERRUPTED
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and torchrun each send one for one Ctrl-C
    if ending.consequence and asked_to_stop:
        return ending.exit_code
    board = reachable_board(launch)
    said = f"said/{launch.attempt}"
    if ending.consequence:
        wait_for_key(board, said, LAUNCHER_SECONDS)
    first = first_to_end(board, launch)
    if not first and not interrupted:
        wait_for_key(board, said, LAUNCHER_SECONDS)
    if first or (first is None and not interrupted):
        print(ending.traceback + ending.message, file=sys.stderr, flush=True)
        if error_file is not None and not ending.consequence:
            tell_launcher(ending.message, error_file)
        if board is not None:
            board.set(said, "")
    return ending.exit_code


def tell_launcher(message: str, error_file: str) -> None:
    """Write what torchrun's summary repeats of this rank."""
    record = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(error_file).write_text(json.dumps({"message": record}))


def reachable_board(launch: Launch) -> dist.Store | None:
    """torchrun's board; None where there is none, or not any more."""
    try:
        return launch.board()
    except dist.DistError:
        return None


def wait_for_key(board: dist.Store | None, key: str, seconds: float) -> None:
    """Return when `key` is on the board, or after `seconds`; without a board after all of them."""
    if board is None:
        time.sleep(seconds)
        return
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not board.check([key]):
            time.sleep(0.05)
    except dist.DistError:  # torchrun is gone, and knows
        return


def first_to_end(board: dist.Store | None, launch: Launch) -> bool | None:
    """Whether no other rank of this start has asked this before; None where nobody can tell (rank 0: True)."""
    unknown = True if launch.rank == 0 else None
    try:
        return unknown if board is None else board.add(f"ended/{launch.attempt}", 1) == 1
    except dist.DistError:
        return unknown
