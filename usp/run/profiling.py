"""Profiler traces of a few steps: RUN/profile/rank-N.json.gz, for chrome://tracing or ui.perfetto.dev.

Every rank writes a trace, to show which ranks wait for which. Ring steps, all-to-alls and collectives appear by name.
Shapes and memory are not recorded, to keep the overhead low.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


def parse_steps(text: str, steps: int) -> range:
    """Parse the steps to profile: "3" is step 3, "5:8" is steps 5 to 8 inclusive, "" is none. Raises ValueError for any
    other text, and for steps past `steps`, the last of the run."""
    if not text:
        return range(0)
    parts = text.split(":")
    if len(parts) <= 2 and all(part.isascii() and part.isdigit() for part in parts):
        first, last = int(parts[0]), int(parts[-1])
        if 1 <= first <= last:
            if last > steps:
                raise ValueError(f"profile={text} names step {last}, but the run ends at step {steps}")
            return range(first, last + 1)
    raise ValueError(f"profile={text!r} must be a step, such as 3, or a range of steps, such as 5:8, from 1")


class StepProfiler:
    """Profiler of `steps` on this rank; writes the trace below `folder` after the last of them."""

    def __init__(self, steps: range, folder: Path, rank: int, device: torch.device) -> None:
        self._steps = steps
        self._path = folder / "profile" / f"rank-{rank}.json.gz"
        self._device = device
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile optimizer step `number` if it is one of `steps`; a run resumed among them traces the rest."""
        if number not in self._steps:
            yield
            return
        if self._profile is None:
            self._profile = profile(
                activities={ProfilerActivity.CPU, getattr(ProfilerActivity, self._device.type.upper())}
            )
            self._profile.start()
        with record_function(f"step {number}"):
            yield
        if number == self._steps[-1]:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
