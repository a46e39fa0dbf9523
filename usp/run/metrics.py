"""Metrics of a run, one record per step, printed and written to the run's directory; and traces of a few steps.

    RUN/metrics.jsonl   every step, one JSON object per line
    RUN/tensorboard/    the same numbers for TensorBoard
    RUN/wandb/          the same for Weights & Biases, if a project is set; also for Trackio and MLflow, see `TRACKERS`
    RUN/*-id            the run's id there
    RUN/profile/        rank-N.json.gz of the steps to profile, for chrome://tracing or ui.perfetto.dev

Only rank 0 has a `RunLog`. It prints a line every `log_every` steps, and a progress bar on a terminal. A run resumed
after step N drops the later records, so that every step is logged once, and says what its restart cost. A disk that is
full does not end the run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from usp.parallel import format_ranks

from .output import LineFile, warn

METRICS_FILE = "metrics.jsonl"
BY_POSITION = "eval_loss_by_position"
TRACKERS = {"wandb_project": "wandb", "trackio_project": "trackio", "mlflow_experiment": "mlflow"}  # and their packages
WAITING = 0.01  # the part of a step that may go to waiting for data without a word


class Record(Protocol):
    """Metrics of one step of any kind of run."""

    @property
    def step(self) -> int: ...  # from 1

    @property
    def printed(self) -> bool: ...  # even between log lines

    def numbers(self) -> dict[str, float | None]: ...  # metrics to write by name; None where unknown

    def line(self) -> str: ...  # of the log


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one training step.

    epoch: passes over the data so far; epochs: of a mixture, over each part by its path. loss and grad_norm are global,
    attention_sent_bytes (recurrent layers included) is the mean over ranks, as is attention_wait_seconds, the part of a
    step in which the computation waited for messages of attention, which are exposed; fsdp_sent_bytes (predicted; None
    with images) and memory_bytes (peak so far) are this rank's, as is data_seconds, the part of `seconds` in which
    it waited for its batch. eval_loss and eval_perplexity are of the held-out data after the step; None where it was
    not evaluated. eval_loss_by_position is that loss by the last position of a range, each twice as long as the one
    before; its numbers are "eval_loss_by_position/1024" and so on. Of several held-out sets, these are of the first;
    eval_sets has both losses of each by its name, as numbers "eval_loss/NAME" and "eval_loss_by_position/NAME/1024".
    indexer_loss: the mean over the layers with an indexer that is trained. balanced_rows: the share of the step's rows
    that `--sp-layout auto` divides as balanced, others as zigzag; None with other layouts. document_tokens: of this
    rank's rows, the tokens of the document that the average token is in, so causal attention has half as many pairs for
    each token.
    attention_kernels are those that this rank's calls have used so far. stage: of the curriculum, from 1.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    epoch: float
    tokens: int
    seconds: float
    data_seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int
    attention_sent_bytes: int
    fsdp_sent_bytes: int | None
    attention_wait_seconds: float = 0.0
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_loss_by_position: Mapping[int, float] = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)
    eval_sets: Mapping[str, tuple[float, Mapping[int, float]]] = field(default_factory=dict)
    indexer_loss: float | None = None
    balanced_rows: float | None = None
    document_tokens: float | None = None
    attention_kernels: tuple[str, ...] = ()
    stage: int = 1
    seq_len: int | None = None

    @property
    def printed(self) -> bool:
        return self.eval_loss is not None

    def numbers(self) -> dict[str, float | None]:
        values = asdict(self)
        for name in ("step", "attention_kernels", "epochs", "eval_sets", BY_POSITION):
            del values[name]
        values |= {f"epoch/{path}": epoch for path, epoch in self.epochs.items()}
        values |= {f"{BY_POSITION}/{last}": loss for last, loss in self.eval_loss_by_position.items()}
        for name, (loss, by_position) in self.eval_sets.items():
            values[f"eval_loss/{name}"] = loss
            values |= {f"{BY_POSITION}/{name}/{last}": part for last, part in by_position.items()}
        return values

    def line(self) -> str:
        mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%} ({', '.join(self.attention_kernels)})"
        evaluated = ""
        if self.eval_loss is not None:
            evaluated = f"  eval loss {self.eval_loss:.4f}  perplexity {self.eval_perplexity:.4g}"
            ranges = (f"to {short(last)} {loss:.4f}" for last, loss in self.eval_loss_by_position.items())
            evaluated += f"\n  eval loss by position: {'  '.join(ranges)}"
            if self.eval_sets:
                evaluated += f"\n  eval loss by set: {'  '.join(f'{k} {v[0]:.4f}' for k, v in self.eval_sets.items())}"
        parts = ", ".join(f"{epoch:.2f} of {path}" for path, epoch in self.epochs.items())
        epoch = f"epochs {parts}" if parts else f"epoch {self.epoch:.2f}"
        waited = f"  waited {self.data_seconds:.2f} s for data" if self.data_seconds > WAITING * self.seconds else ""
        exposed = self.attention_wait_seconds / self.seconds
        sent = f"  attention sent {size(self.attention_sent_bytes)} ({exposed:.0%} exposed)"
        auto = "" if self.balanced_rows is None else f"  rows balanced {self.balanced_rows:.0%}"
        indexers = "" if self.indexer_loss is None else f"indexer loss {self.indexer_loss:.4f}  "
        return (
            f"loss {self.loss:.4f}  {indexers}grad norm {self.grad_norm:.3f}  "
            f"{count(self.tokens_per_second)} tokens/s{mfu}  "
            f"memory {size(self.memory_bytes)}{sent if self.attention_sent_bytes else ''}  "
            f"{epoch}{auto}{waited}{evaluated}"
        )


@dataclass(frozen=True)
class Tracker:
    """A run in an experiment tracker. log: add the numbers of a step. finish: end it, and say whether it failed."""

    log: Callable[[dict[str, float], int], object]
    finish: Callable[[bool], object]


class RunLog:
    """Log of a run: writes its records below `folder` and prints them to `out` inside a `with` block. after: step of
    the checkpoint that the run resumes from; 0 for a new run. ranks: their number. trackers: of `open_trackers`. phase:
    returns what the run is doing, which the bar shows."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        log_every: int,
        out: TextIO,
        after: int = 0,
        ranks: int = 1,
        trackers: Sequence[Tracker] = (),
        phase: Callable[[], str] = str,
    ) -> None:
        self._steps = steps
        self._log_every, self._ranks = log_every, ranks
        self._file = LineFile(file := folder / METRICS_FILE)
        self._ended = file.stat().st_mtime if file.exists() else 0.0
        self._before = keep_records(file, after)
        self._tensorboard = TensorBoard(folder / "tensorboard", after)
        self._trackers, self._tracked = trackers, self._before.get("step", 0)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
        from rich.table import Column
        from rich.text import Text

        class Phase(TextColumn):
            def render(self, task: Task) -> Text:
                return Text("" if task.finished else phase())

        self._console = Console(file=out, highlight=False)
        rest = Phase("", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn(), rest)
        self._progress = Progress(*columns, console=self._console, refresh_per_second=2, disable=not out.isatty())
        self._task = self._progress.add_task("", total=steps, completed=after)

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        self._tensorboard.close()
        self._file.close()
        for tracker in self._trackers:
            tracker.finish(kind is not None)

    def record(self, record: Record) -> None:
        """Write and print one step."""
        self._file.append(record.step, [json.dumps({"step": record.step, "ranks": self._ranks, **record.numbers()})])
        numbers = {name: value for name, value in record.numbers().items() if value is not None}
        self._tensorboard.record(record.step, numbers)
        if record.step > self._tracked:  # what a resumed run repeats is there already
            for tracker in self._trackers:
                tracker.log(numbers, record.step)
        self._progress.update(self._task, completed=record.step)
        if record.printed or record.step in (1, self._steps) or record.step % self._log_every == 0:
            self._console.print(f"step {record.step}/{self._steps}  {record.line()}", soft_wrap=True)
        if self._before:
            before, self._before = self._before, {}
            ended = f"step {record.step} ended {seconds(time.time() - self._ended)} after step {before['step']}"
            ranks = f"on {self._ranks} ranks, before on {before.get('ranks', self._ranks)}"
            again = format_ranks(range(record.step, before["step"] + 1), ", ")
            self._console.print(f"resumed: {ended}, {ranks}{again and '; it repeats steps '}{again}", soft_wrap=True)


class TensorBoard:
    """TensorBoard's files in `folder`, until one cannot be written: its writer does not recover from that."""

    def __init__(self, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

        self._folder, self._step = folder, after
        self._ended = False
        self._writer: Any = None
        with self._until_it_fails():
            self._writer = SummaryWriter(folder, purge_step=after + 1)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step. Warn at the first failure."""
        if not self._ended:
            self._step = step
            with self._until_it_fails():
                for name, value in numbers.items():
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still in memory, and say from which step on that failed."""
        if not self._ended:
            with self._until_it_fails():
                self._writer.close()
        if self._ended:
            warn(f"{self._folder} lacks what came after step {self._step}, and may lack the steps shortly before")

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._ended = True
            warn(f"{self._folder} cannot be written: {error}; the run goes on without it")


def keep_records(file: Path, after: int) -> Mapping[str, Any]:
    """Drop the records of steps later than `after` from a metrics file, and a truncated last line. Return the last
    record that it had; empty without any."""
    earlier: list[bytes] = []
    last: Mapping[str, Any] = {}
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
        try:
            last = json.loads(line)
        except ValueError:
            break
        if last["step"] <= (after or -1) and line.endswith(b"\n"):
            earlier.append(line)
    new = file.with_suffix(".new")
    try:
        new.write_bytes(b"".join(earlier))
        new.replace(file)  # atomic: a run killed here keeps the old records
    except OSError:  # a full disk; steps are in order, so that what stays is the beginning
        with suppress(OSError):
            new.unlink()
            os.truncate(file, sum(map(len, earlier)))
    return last


def tracker_problems(config: Any) -> Iterator[str]:
    """Yield which of `TRACKERS` a configuration gives a project but lack their package."""
    for name, package in TRACKERS.items():
        if project := getattr(config, name):
            spec = importlib.util.find_spec(package)
            if spec is None or not spec.origin:  # a directory named wandb has no origin
                needed = f"needs the package {package}, which is not installed: pip install {package}, or unset it"
                yield f"--{name.replace('_', '-')} {project} {needed}"


def open_trackers(config: Any, folder: Path) -> list[Tracker]:
    """Open the run of `folder` in each of `TRACKERS` that has a project, or resume it. wandb's files are in `folder`
    (WANDB_MODE=offline keeps them there), those of the others where they are set up to keep them."""
    trackers, values = [], asdict(config)
    identity, of_mlflow = folder / "wandb-id", folder / "mlflow-id"
    if not identity.exists() and (config.wandb_project or config.trackio_project):
        identity.write_text(secrets.token_hex(4))
    if project := config.wandb_project:
        import wandb

        options = {"id": identity.read_text(), "resume": "allow", "dir": str(folder), "config": values}
        wandb_run = wandb.init(project=project, name=folder.name, **options)
        trackers.append(Tracker(wandb_run.log, lambda failed: wandb_run.finish(exit_code=int(failed))))
    if project := config.trackio_project:
        import trackio

        name = f"{folder.name}-{identity.read_text()}"  # which it has instead of an id
        trackio_run = trackio.init(project=project, name=name, resume="allow", config=values)
        trackers.append(Tracker(trackio_run.log, lambda failed: trackio_run.finish()))
    if experiment := config.mlflow_experiment:
        import mlflow

        mlflow.set_experiment(experiment)
        before = of_mlflow.read_text() if of_mlflow.exists() else None
        of_mlflow.write_text(mlflow.start_run(run_id=before, run_name=folder.name).info.run_id)
        mlflow.log_dict(values, "config.json")

        def log(numbers: Mapping[str, float], step: int) -> None:
            mlflow.log_metrics({re.sub(r"[^\w\-./ ]", "-", name): value for name, value in numbers.items()}, step=step)

        trackers.append(Tracker(log, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED")))
    return trackers


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
                raise ValueError(f"--profile {text} names step {last}, but the run ends at step {steps}")
            return range(first, last + 1)
    raise ValueError(f"--profile {text!r} must be a step, such as 3, or a range of steps, such as 5:8, from 1")


class StepProfiler:
    """Profiler of `steps` on this rank; writes the trace below `folder` after the last of them.

    Every rank writes one, to show which ranks wait for which. Ring steps, all-to-alls and collectives appear by name.
    Shapes and memory are not recorded, to keep the overhead low.
    """

    def __init__(self, steps: range, folder: Path, rank: int, device: torch.device) -> None:
        self.steps = steps
        self._path = folder / "profile" / f"rank-{rank}.json.gz"
        self._device = device
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile optimizer step `number` if it is one of `steps`; a run resumed among them traces the rest."""
        if number not in self.steps:
            yield
            return
        if self._profile is None:
            self._profile = profile(
                activities={ProfilerActivity.CPU, getattr(ProfilerActivity, self._device.type.upper())}
            )
            self._profile.start()
        with record_function(f"step {number}"):
            yield
        if number == self.steps[-1]:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of CUDA tensors on `device`, or of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def size(number_of_bytes: float) -> str:
    """Format bytes: 1536 is `1.5 KiB`."""
    return _scaled(number_of_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def count(number: float) -> str:
    """Format a count: 12345 is `12.3k`."""
    return _scaled(number, 1000, ("", "k", "M", "G"))


def seconds(value: float) -> str:
    """Format seconds: 0.0123 is `12.3 ms`."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def short(number: int) -> str:
    """Return `128K` for 131072."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if number >= unit and number % unit == 0:
            return f"{number // unit}{name}"
    return str(number)


def _scaled(number: float, base: int, units: Sequence[str], digits: int = 0) -> str:
    if number < base or len(units) == 1:
        return f"{number:.{digits}f}{units[0]}"
    return _scaled(number / base, base, units[1:], digits=1)
