"""Signals that ask a run to save a checkpoint and exit.

    SIGTERM   sent by schedulers and `kill`; torchrun forwards it to every rank
    SIGUSR1   SLURM's --signal=USR1@SECONDS; torchrun forwards it with --signals-to-handle

The handler only sets a flag, which the trainer checks after each step. torchrun kills ranks that are still running
after 30 seconds (--shutdown-timeout), so a step and a checkpoint must fit. A later signal exits at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ECHO_SECONDS = 2.0  # a scheduler and torchrun may both send one for the same request


@dataclass
class StopRequest:
    """Request to stop this process: number and time of the first signal, 0 before."""

    signal_number: int = 0
    since: float = 0.0

    @property
    def requested(self) -> bool:
        return self.signal_number != 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while the block runs, then restore the previous handlers. Main thread only."""
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self.since > ECHO_SECONDS:
            os._exit(128 + signal_number)
        if not self.requested:
            self.signal_number, self.since = signal_number, now
