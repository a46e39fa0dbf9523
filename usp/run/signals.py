"""Signals that ask a run to save and end.

    SIGTERM   schedulers, `kill`, and torchrun, which passes its own on to every rank
    SIGUSR1   SLURM's --signal=USR1@SECONDS, where torchrun is told to pass it on (--signals-to-handle)

The handler sets a flag and nothing else; the trainer asks for it after each step. torchrun kills what is still there
after 30 seconds (--shutdown-timeout): a step and a checkpoint must fit. A later signal ends the process at once.
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
ECHO_SECONDS = 2.0  # a scheduler and torchrun may both send one for the same wish


@dataclass
class StopRequest:
    """Whether this process was asked to stop: `signal_number` is 0 until it is, then the first signal's."""

    signal_number: int = 0
    since: float = 0.0

    @property
    def requested(self) -> bool:
        return self.signal_number != 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the block runs, such signals set the flag; then they do what they did before. Main thread only."""
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
