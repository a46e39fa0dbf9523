"""What a run says and logs while the disk fails: warnings, and files of lines that a full disk does not stop."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from parallel import format_ranks

WAITING_BYTES = 2**24  # of lines that a file waits with, at most


def warn(message: str) -> None:
    """Print a warning to the standard error, unless its reader is gone."""
    with suppress(OSError):
        print(f"warning: {message}", file=sys.stderr, flush=True)


class LineFile:
    """A file to which the lines of a step are appended, all or none of them.

    Lines that cannot be written do not stop the run: they wait, up to a limit, and are written before later ones.
    """

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
