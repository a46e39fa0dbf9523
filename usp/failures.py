"""How a run that fails ends: one readable message, and an exit code.

    ConfigurationError   every rank raises it before it communicates   message, no traceback   exit code 2
    TrainingDiverged     every rank raises it at the same step         message, no traceback   exit code 1
    RanksDisagree        every rank raises it at the same point        message, no traceback   exit code 1
    a lost connection    another rank is gone, and says why itself     one line                exit code 1
    anything else        one rank's own fault, or the same on all      traceback and rank      exit code 1
    Ctrl-C               every rank gets the signal                    one line                exit code 130

The first rank to end speaks; it is found with a counter in torchrun's store, which outlives the ranks. The others keep
quiet and wait for torchrun to end them: leaving at once could end the first before it has spoken. Without that store
rank 0 speaks at once, and the others only when nothing ends them while they wait. A rank that lost a connection waits
in any case: what ended the other rank, or the launcher that saw it end, knows more.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from usp.launch import Launch

LAUNCHER_SECONDS = 10.0
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C
LOST_PEER = ("closed by peer", "reset by peer", "connection refused", "socket closed", "broken pipe", "remote process")


class ConfigurationError(ValueError):
    """The configuration cannot run; every rank finds the same before any of them communicates."""


class TrainingDiverged(RuntimeError):
    """Loss or gradient norm are no longer finite; every rank sees the same at the same step."""


class RanksDisagree(RuntimeError):
    """Ranks hold different values of what must be the same; every one of them found out at the same point."""


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
    if isinstance(error, (TrainingDiverged, RanksDisagree)):
        return Ending(f"error: {error}", 1)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted: stopped before the end, and saved no checkpoint", INTERRUPTED)
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


def end(ending: Ending, launch: Launch, error_file: str | None) -> int:
    """Print what there is to say, if no other rank has said it, and give the exit code.

    error_file: where torchrun reads what its summary repeats (TORCHELASTIC_ERROR_FILE); None without torchrun.
    """
    interrupted = ending.exit_code == INTERRUPTED
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and torchrun each send one for one Ctrl-C
    if ending.consequence:
        time.sleep(LAUNCHER_SECONDS)
    first = first_to_end(launch)
    if not first and not interrupted:
        time.sleep(LAUNCHER_SECONDS)
    if first or (first is None and not interrupted):
        print(ending.traceback + ending.message, file=sys.stderr, flush=True)
        if error_file is not None and not ending.consequence:
            record = {"message": ending.message, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(error_file).write_text(json.dumps({"message": record}))
    return ending.exit_code


def first_to_end(launch: Launch) -> bool | None:
    """Whether no other rank of this launch has asked this before; None where nobody can tell (rank 0: True)."""
    unknown = True if launch.rank == 0 else None
    if launch.agent_store is None:
        return unknown
    host, port = launch.agent_store
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=LAUNCHER_SECONDS))
        return store.add(f"train.py/ended/{launch.attempt}", 1) == 1
    except dist.DistError:
        return unknown
