"""How a run that fails ends: one readable message, and an exit code.

    ConfigurationError   every rank raises it before it communicates   message, no traceback   exit code 2
    TrainingDiverged     every rank raises it at the same step         message, no traceback   exit code 1
    RanksDisagree        every rank raises it at the same point        message, no traceback   exit code 1
    a lost connection    another rank is gone, and says why itself     one line                exit code 1
    anything else        one rank's own fault, or the same on all      traceback and rank      exit code 1
    Ctrl-C               every rank gets the signal                    one line, on rank 0     exit code 130

Rank 0 speaks at once. The others wait first: if rank 0 failed too, the launcher ends them before they repeat it. While
a failed rank waits, its connections stay open, so no other rank takes its failure for a lost connection. A rank that
lost one waits in any case: what ended the other rank, or the launcher that saw it end, knows more.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

LAUNCHER_SECONDS = 5.0
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
    """What a failed rank says, and its exit code."""

    message: str
    exit_code: int
    consequence: bool = False  # of what ended another rank


def ending_of(error: BaseException, rank: int) -> Ending:
    """How a rank ends that `error` stops."""
    if isinstance(error, ConfigurationError):
        return Ending(f"error: {error}", 2)
    if isinstance(error, (TrainingDiverged, RanksDisagree)):
        return Ending(f"error: {error}", 1)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted: stopped before the end, and saved no checkpoint", INTERRUPTED)
    if lost_peer(error):
        return Ending(
            f"rank {rank} lost its connection to another rank; the rank that failed says why", 1, consequence=True
        )
    text = "".join(traceback.format_exception(error)).rstrip()
    return Ending(f"{text}\nrank {rank} failed: {type(error).__name__}: {error}", 1)


def lost_peer(error: BaseException) -> bool:
    """Whether `error` says that another rank went away, not that this one did something wrong."""
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in LOST_PEER)


def end(ending: Ending, rank: int, error_file: str | None) -> int:
    """Print what there is to say and give the exit code.

    error_file: where torchrun reads what its summary repeats (TORCHELASTIC_ERROR_FILE); None without torchrun.
    """
    if rank != 0 and ending.exit_code == INTERRUPTED:
        return INTERRUPTED
    if rank != 0 or ending.consequence:
        time.sleep(LAUNCHER_SECONDS)
    print(ending.message, file=sys.stderr, flush=True)
    if error_file is not None and not ending.consequence:
        record = {"message": ending.message.splitlines()[-1], "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(error_file).write_text(json.dumps({"message": record}))
    return ending.exit_code
