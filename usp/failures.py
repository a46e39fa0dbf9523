"""How a run that fails ends: one readable message, on one rank where every rank failed alike.

    ConfigurationError   every rank raises it before it communicates   message, no traceback     exit code 2
    TrainingDiverged     every rank raises it at the same step         message, no traceback     exit code 1
    a lost connection    another rank is gone, and says why itself     one line                  exit code 1
    anything else        this rank's own fault                         traceback with the rank   exit code 1
    Ctrl-C                                                             one line                  exit code 130

Ranks other than 0 keep quiet about what rank 0 says as well. They wait for the launcher to end them, and speak only
when it does not: then rank 0 did not fail, or is on another host.
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
LOST_PEER = ("closed by peer", "reset by peer", "connection refused", "socket closed", "broken pipe", "remote process")


class ConfigurationError(ValueError):
    """The configuration cannot run; every rank finds the same before any of them communicates."""


class TrainingDiverged(RuntimeError):
    """Loss or gradient norm are no longer finite; every rank sees the same at the same step."""


@dataclass(frozen=True)
class Ending:
    """What a failed rank says and its exit code; `shared` when the other ranks say the same."""

    message: str
    exit_code: int
    shared: bool


def ending_of(error: BaseException, rank: int) -> Ending:
    """How a rank ends that `error` stops."""
    if isinstance(error, ConfigurationError):
        return Ending(f"error: {error}", 2, shared=True)
    if isinstance(error, TrainingDiverged):
        return Ending(f"error: {error}", 1, shared=True)
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted: stopped before the end, and saved no checkpoint", 130, shared=True)
    if lost_peer(error):
        return Ending(f"rank {rank} lost its connection to another rank; the rank that failed says why", 1, shared=True)
    text = "".join(traceback.format_exception(error)).rstrip()
    return Ending(f"rank {rank} failed:\n{text}", 1, shared=False)


def lost_peer(error: BaseException) -> bool:
    """Whether `error` says that another rank went away, not that this one did something wrong."""
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in LOST_PEER)


def end(ending: Ending, *, rank: int, error_file: str | None) -> int:
    """Print what there is to say and give the exit code.

    error_file: where torchrun reads what its summary repeats (TORCHELASTIC_ERROR_FILE); None without torchrun.
    """
    if ending.shared and rank != 0:
        time.sleep(LAUNCHER_SECONDS)
    print(ending.message, file=sys.stderr, flush=True)
    if error_file is not None and ending.exit_code != 130:
        record = {"message": ending.message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(error_file).write_text(json.dumps({"message": record}))
    return ending.exit_code
