"""Files that several runs and a full disk may touch: lines, warnings, and the lock of a folder."""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from usp.parallel import format_ranks

WAITING_BYTES = 2**24  # of lines that a file waits with, at most
LOCK = "run.lock"
WAIT_SECONDS = 5.0  # for the ranks of a killed launcher to end


def warn(message: str) -> None:
    """Print a warning to the standard error, unless its reader is gone."""
    with suppress(OSError):
        print(f"warning: {message}", file=sys.stderr, flush=True)


@contextmanager
def working(words: str, shown: bool = True, every: float = math.inf) -> Iterator[Callable[[str], None]]:
    """Say in a `with` block what takes long: beside a spinner on a terminal, elsewhere by a line at most each `every`
    seconds; nothing unless `shown`. It gives a function that replaces the words."""
    from rich.console import Console

    said = -math.inf

    def say(words: str) -> None:
        nonlocal said
        if shown and time.monotonic() - said > every:
            said = time.monotonic()
            print(words, file=sys.stderr, flush=True)

    if shown and sys.stderr.isatty():
        with Console(stderr=True).status(words) as status:
            yield status.update
    else:
        say(words)
        yield say


class LineFile:
    """A file to which the lines of a step are appended, all or none of them. Lines that cannot be written do not stop
    the run: they wait, up to a limit, and are written before later ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[tuple[int, bytes]] = []  # (step, lines)
        self._lost: list[int] = []  # steps whose lines could not wait either
        self._warned = False

    def append(self, step: int, lines: Iterable[str]) -> None:
        """Write the lines of a step, given without their ends, and those that still wait. Warn at the first failure."""
        self._waiting.append((step, "".join(f"{line}\n" for line in lines).encode()))
        try:
            self._write(b"".join(data for _, data in self._waiting))
        except OSError as error:
            if not self._warned:
                warn(f"{self.path} cannot be written: {error}; the run goes on, and tries again after every step")
            self._warned = True
            while sum(len(data) for _, data in self._waiting) > WAITING_BYTES:
                self._lost.append(self._waiting.pop(0)[0])
        else:
            self._waiting.clear()

    def close(self) -> None:
        """Say which steps' lines were never written. Nothing is open between two steps."""
        if missing := sorted({*self._lost, *(step for step, _ in self._waiting)}):
            warn(f"{self.path} lacks the lines of steps {format_ranks(missing, ', ')}")

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            if (written := file.write(data)) != len(data):
                with suppress(OSError):
                    file.truncate(end)  # without a part of a line, later lines can be read
                raise OSError(f"only {written} of {len(data)} bytes were written")


@contextmanager
def locked(folder: Path, seconds: float = WAIT_SECONDS) -> Iterator[str]:
    """Create `folder` and hold its lock during the block; yield what the lock's file says, another text every time.

    Where the file system has no locks, warn and go on. Raises ValueError, naming the process that still holds the lock
    after so many seconds.
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
                writer = holder(folder) or "another process"
                raise ValueError(f"{folder} is in use: {writer} writes to it; choose another folder") from None
            time.sleep(0.1)
        except OSError as error:
            return warn(f"{folder / LOCK} cannot be locked ({error}): nothing keeps another run out of this folder")
