"""How a run that fails ends: one readable message, on one rank where every rank failed alike.

    ConfigurationError   every rank raises it before it communicates   message, no traceback     exit code 2
    TrainingDiverged     every rank raises it at the same step         message, no traceback     exit code 1
    RanksDisagree        every rank raises it at the same point        message, no traceback     exit code 1
    a lost connection    another rank is gone, and says why itself     one line                  exit code 1
    anything else        this rank's own fault                         traceback with the rank   exit code 1
    Ctrl-C               every rank gets the signal                    one line, on rank 0       exit code 130

Of what rank 0 says as well, the others keep quiet. They wait for the launcher to end them, and speak only when it does
not: then rank 0 did not fail, or is on another host.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass
from enum import Enum
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


class Speaker(Enum):
    """Who says how the run ended."""

    THIS_RANK = "this rank alone knows"
    FIRST_RANK = "every rank knows, rank 0 says it"
    FIRST_RANK_OR_THIS = "every rank knows; this one says it too unless the launcher ends it soon"


@dataclass(frozen=True)
class Ending:
    """What a failed rank says, and its exit code."""

    message: str
    exit_code: int
    speaker: Speaker


def ending_of(error: BaseException, rank: int) -> Ending:
    """How a rank ends that `error` stops."""
    if isinstance(error, ConfigurationError):
        return Ending(f"error: {error}", 2, Speaker.FIRST_RANK_OR_THIS)
    if isinstance(error, (TrainingDiverged, RanksDisagree)):
        return Ending(f"error: {error}", 1, Speaker.FIRST_RANK_OR_THIS)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted: stopped before the end, and saved no checkpoint", INTERRUPTED, Speaker.FIRST_RANK)
    if lost_peer(error):
        lost = f"rank {rank} lost its connection to another rank; the rank that failed says why"
        return Ending(lost, 1, Speaker.FIRST_RANK_OR_THIS)
    text = "".join(traceback.format_exception(error)).rstrip()
    return Ending(f"rank {rank} failed:\n{text}", 1, Speaker.THIS_RANK)


def lost_peer(error: BaseException) -> bool:
    """Whether `error` says that another rank went away, not that this one did something wrong."""
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in LOST_PEER)


def end(ending: Ending, rank: int, error_file: str | None) -> int:
    """Print what there is to say and give the exit code.

    error_file: where torchrun reads what its summary repeats (TORCHELASTIC_ERROR_FILE); None without torchrun.
    """
    if rank != 0 and ending.speaker is Speaker.FIRST_RANK:
        return ending.exit_code
    if rank != 0 and ending.speaker is Speaker.FIRST_RANK_OR_THIS:
        time.sleep(LAUNCHER_SECONDS)
    print(ending.message, file=sys.stderr, flush=True)
    if error_file is not None:
        record = {"message": ending.message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(error_file).write_text(json.dumps({"message": record}))
    return ending.exit_code
