"""What a run tells: one record a step, shown on screen and kept in the run's folder.

    RUN/metrics.jsonl   every step, one JSON object a line
    RUN/tensorboard/    the same numbers for TensorBoard

Only rank 0 has a `RunLog`. It prints a line every so many steps, and on a terminal a progress bar below them.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """One step. loss and grad_norm are global; bytes are the mean over ranks; memory is this rank's peak so far."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    attention_sent_bytes: int
    fsdp_sent_bytes: int

    def line(self) -> str:
        """The record for a person."""
        mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        return (
            f"loss {self.loss:.4f}  grad norm {self.grad_norm:.3f}  {count(self.tokens_per_second)} tokens/s{mfu}  "
            f"memory {size(self.memory_bytes)}  sent {size(self.attention_sent_bytes)} attention + "
            f"{size(self.fsdp_sent_bytes)} FSDP"
        )


class RunLog:
    """Keeps a run's records below `folder` and shows them on `out`, for as long as its `with` block runs."""

    def __init__(self, folder: Path, *, steps: int, log_every: int, out: TextIO) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import, on rank 0 alone

        self._steps = steps
        self._log_every = log_every
        self._file = (folder / METRICS_FILE).open("w")
        self._tensorboard = SummaryWriter(folder / "tensorboard")
        self._console = Console(file=out, highlight=False)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, refresh_per_second=2, disable=not out.isatty())
        self._task = self._progress.add_task("", total=steps)

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._tensorboard.close()
        self._file.close()

    def record(self, record: StepRecord) -> None:
        """Keep and show one step."""
        self._file.write(json.dumps(asdict(record)) + "\n")
        self._file.flush()
        for name, value in asdict(record).items():
            if name != "step" and value is not None:
                self._tensorboard.add_scalar(name, value, record.step)
        self._progress.update(self._task, completed=record.step)
        if record.step in (1, self._steps) or record.step % self._log_every == 0:
            self._console.print(f"step {record.step}/{self._steps}  {record.line()}", soft_wrap=True)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that CUDA tensors took on `device`, or on a CPU the most that this process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def size(number_of_bytes: float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number_of_bytes < 1024:
            return f"{number_of_bytes:.0f} B" if unit == "B" else f"{number_of_bytes:.1f} {unit}"
        number_of_bytes /= 1024
    return f"{number_of_bytes:.1f} TiB"


def count(number: float) -> str:
    """`12345` as `12.3k`."""
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"
