"""One run at a time writes to a folder: a lock in the folder that ends with the process that holds it.

    FOLDER/run.lock     locked (flock) by the run's first rank; the first line says which process of which host that is

The file stays when the run has ended, and marks the folder as that of a run.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .output import warn

LOCK = "run.lock"
WAIT_SECONDS = 5.0  # for the ranks of a killed launcher to end


class FolderInUse(ValueError):
    """Another process writes to the folder; the message names it."""


@contextmanager
def locked(folder: Path, seconds: float = WAIT_SECONDS) -> Iterator[str]:
    """Create `folder` and hold its lock during the block; yield what the lock's file says, another text every time.

    Where the file system has no locks, warn and go on.

    Raises:
        FolderInUse: if another process still holds the lock after so many seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        _lock(file.fileno(), folder, seconds)
        text = f"{this_process()}\n{secrets.token_hex(8)}\n"
        file.truncate(0)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        yield text


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def holder(folder: Path) -> str:
    """Return which process holds the lock of `folder`, such as `process 7 on a`; empty if none does."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ((folder / LOCK).read_text().splitlines() or ["another process"])[0]
    except OSError:  # there is no lock, or the file system has none
        return ""
    return ""


def _lock(file: int, folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise FolderInUse(
                    f"{folder} is in use: {holder(folder) or 'another process'} writes to it; wait until it has "
                    f"ended, or choose another folder"
                ) from None
            time.sleep(0.1)
        except OSError as error:
            return warn(f"{folder / LOCK} cannot be locked ({error}): nothing keeps another run out of this folder")
