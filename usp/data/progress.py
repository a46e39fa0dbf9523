"""How far a long job on data is: a bar on a terminal, and otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINE_SECONDS = 30.0


class DataProgress:
    """Shows in a `with` block how many of `total` bytes are done.

    what: names the job, such as `tokenizing`.
    """

    def __init__(self, what: str, total: int, out: TextIO | None = None) -> None:
        out = out or sys.stderr
        console = Console(file=out, highlight=False)
        self._what, self._total, self._out = what, total, None if console.is_terminal else out
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(TextColumn(what), *columns, TextColumn("{task.fields[note]}"), console=console)
        self._task = self._bar.add_task("", total=total, note="")
        self._next_line = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> DataProgress:
        if self._out is None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._out is None:
            self._bar.stop()

    def update(self, done: int, note: str = "") -> None:
        """Show that `done` bytes are done, and a note beside them."""
        self._bar.update(self._task, completed=min(done, self._total), note=note)
        if self._out is not None and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            part = f"{min(done, self._total) / max(1, self._total):.0%}"
            print(f"{self._what}: {part} of {self._total / 1e6:,.0f} MB  {note}".rstrip(), file=self._out, flush=True)
