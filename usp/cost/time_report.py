"""The predicted step of a configuration: seconds by part, MFU, memory, and a run's own metrics beside them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group

from parallel import Hardware
from usp.run.failures import ConfigurationError
from usp.run.metrics import METRICS_FILE

from .grid import GIB, Grid
from .job import Job
from .memory.footprint import Footprint, largest_footprint
from .memory.host_memory import host_bytes
from .planner.advice import parts, seconds
from .planner.choice import usable
from .time.model_flops import model_flops
from .time.step_time import StepTime, step_seconds

_FIRST_STEPS = 3  # of a run, which allocate, connect and compile


@dataclass(frozen=True)
class StepReport:
    """A step of `job` on `hardware`, and of what a run measured the medians over its steps but the first."""

    job: Job
    hardware: Hardware
    measured: Measured | None = None

    @cached_property
    def time(self) -> StepTime:
        return step_seconds(self.job, self.hardware)

    @cached_property
    def memory(self) -> Footprint:
        """The memory of the pipeline stage that needs most."""
        return largest_footprint(self.job)[0]

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.job.config.seq_len * self.job.config.batch_size * self.job.dims.batch

    @property
    def unmasked_mfu(self) -> float:
        """MFU with the masked half of attention counted as work, as PaLM's (arXiv 2204.02311, appendix B) does."""
        flops = model_flops(self.job, masked=True) / self.job.world_size
        return flops / self.time.total / self.time.peak

    @cached_property
    def on_host(self) -> int:
        """Bytes that the ranks of a host keep in its memory."""
        return host_bytes(self.job, self.hardware.host_devices)

    @property
    def limit(self) -> float:
        """Bytes of a device that a run can use."""
        return usable(self.hardware).device

    @property
    def host_limit(self) -> float:
        """Bytes of a host that a run can use."""
        return usable(self.hardware).host

    @property
    def fits(self) -> bool:
        return self.memory.peak.total <= self.limit and self.on_host <= self.host_limit

    @property
    def tokens_per_second(self) -> float:
        """Tokens that a device processes per second."""
        return self.tokens / self.time.total / self.job.world_size


@dataclass(frozen=True)
class Measured:
    """What a run recorded: seconds and MFU of its median step, and rank 0's peak memory.

    Attributes:
        mfu: None where the run's device has no known peak.
    """

    steps: int
    seconds: float
    mfu: float | None
    memory_bytes: int


def measured(folder: Path) -> Measured:
    """Read the metrics of a run of train.py.

    Raises:
        ConfigurationError: if there are none, or none after the first steps.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        raise ConfigurationError(f"--against = {folder} holds no {METRICS_FILE}: give the folder of a run of train.py")
    lines = path.read_text().splitlines()
    try:
        records = [json.loads(line) for line in lines][_FIRST_STEPS:]
        if not records:
            raise ConfigurationError(
                f"--against = {folder} has {len(lines)} steps, and the first {_FIRST_STEPS} are left out because they "
                "allocate and connect: let it run longer"
            )
        known = [record["mfu"] for record in records if record["mfu"] is not None]
        return Measured(
            steps=len(records),
            seconds=median(record["seconds"] for record in records),
            mfu=median(known) if known else None,
            memory_bytes=max(record["memory_bytes"] for record in records),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--against = {folder}: {path} is no log of train.py: {error!r}") from error


def render(report: StepReport) -> Group:
    """Return the tables of a report for rich to print."""
    config = report.job.config
    asked = (
        f"{config.model} on {report.job.world_size} x {report.hardware.name} ({report.job.dims}): {report.tokens:,} "
        f"tokens per step, ZeRO-{config.zero}, activation checkpointing {config.ac}"
    )
    compared = [] if report.measured is None else [_comparison(report, report.measured).table()]
    return Group(asked, _times(report).table(), _memory(report).table(), _verdict(report), *compared)


def report_json(report: StepReport) -> dict[str, Any]:
    """Return the report as JSON values: seconds, bytes and fractions."""
    peak = report.memory.peak
    return {
        "seconds": report.time.total,
        "parts": parts(report.time),
        "kernels": list(report.time.kernels),
        "tokens": report.tokens,
        "mfu": report.time.mfu,
        "unmasked_mfu": report.unmasked_mfu,
        "memory_bytes": peak.total,
        "memory_parts": memory_parts(report.memory),
        "host_bytes": report.memory.host,
        "memory_limit_bytes": report.limit,
        "bytes_of_a_host": report.on_host,
        "host_limit_bytes": report.host_limit if math.isfinite(report.host_limit) else None,
        "fits": report.fits,
        "measured": None if report.measured is None else vars(report.measured),
    }


def _times(report: StepReport) -> Grid:
    total, names = report.time.total, {"attention": f"attention by {', '.join(report.time.kernels)}"}
    rows = [
        (names.get(part, part), seconds(value), f"{value / total:.1%}")
        for part, value in sorted(parts(report.time).items(), key=lambda item: -item[1])
        if value
    ]
    rows += [
        ("step", seconds(total), "100%"),
        ("tokens/s per device", f"{report.tokens_per_second:,.0f}", ""),
        ("MFU, visible half of a causal mask", f"{report.time.mfu:.1%}", ""),
        ("MFU, all of attention", f"{report.unmasked_mfu:.1%}", ""),
    ]
    return Grid("Time of a step", ("part", "time", "share"), tuple(rows))


def memory_parts(memory: Footprint) -> dict[str, int]:
    """Return the bytes at the peak by what takes them."""
    peak = memory.peak
    return {
        "parameters": peak.parameters,
        "optimizer states": peak.optimizer,
        "gradients": peak.gradients,
        "gathered parameters and gradients": peak.whole,
        "activations": peak.activations,
        "temporary": peak.transient,
    }


def _verdict(report: StepReport) -> str:
    """Return whether the step fits, and into what."""
    hardware = report.hardware
    words = f"{report.limit / GIB:.1f} GiB, the usable part of {hardware.memory_bytes / GIB:.1f} GiB"
    if report.on_host and math.isfinite(report.host_limit):
        words += f", and {report.host_limit / GIB:.0f} of a host's {hardware.host_memory_bytes / GIB:.0f} GiB"
    return f"the step {'fits' if report.fits else 'does not fit'} into {words}"


def _memory(report: StepReport) -> Grid:
    memory = report.memory
    sizes = {**memory_parts(memory), f"peak, at: {memory.peak.name}": memory.peak.total}
    if memory.host:
        sizes["in host memory"] = memory.host
        sizes["in host memory, all ranks of a host"] = report.on_host
    rows = tuple((name, f"{nbytes / GIB:.2f}") for name, nbytes in sizes.items() if nbytes)
    return Grid("Memory of the rank that needs most", ("category", "GiB"), rows)


def _comparison(report: StepReport, run: Measured) -> Grid:
    rows = [
        ("step", seconds(report.time.total), seconds(run.seconds), f"{report.time.total / run.seconds - 1:+.1%}"),
        (
            "peak memory, GiB",
            f"{report.memory.peak.total / GIB:.2f}",
            f"{run.memory_bytes / GIB:.2f}",
            f"{report.memory.peak.total / run.memory_bytes - 1:+.1%}",
        ),
    ]
    if run.mfu is not None:
        rows.append(
            ("MFU", f"{report.time.mfu:.1%}", f"{run.mfu:.1%}", f"{report.time.mfu / run.mfu - 1:+.1%}"),
        )
    title = f"Prediction and run (median of {run.steps} steps)"
    return Grid(title, ("", "predicted", "measured", "difference"), tuple(rows))


def plot(report: StepReport) -> Any:
    """Return a matplotlib figure: the step's parts, and the run's step, as stacked bars; memory against the limit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    times, memory = figure.subplots(1, 2)
    _stack(times, {name: 1e3 * value for name, value in parts(report.time).items() if value}, "predicted")
    if report.measured is not None:
        times.bar("measured", 1e3 * report.measured.seconds, color="0.6")
    times.set_ylabel("ms per step")
    _stack(memory, {name: nbytes / GIB for name, nbytes in memory_parts(report.memory).items() if nbytes > 0}, "peak")
    memory.axhline(report.limit / GIB, color="black", linestyle="--", linewidth=1, label="usable")
    memory.set_ylabel("GiB per device")
    for axes in (times, memory):
        axes.margins(x=0.4)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, fontsize="small")
    figure.suptitle(f"{report.job.config.model}, {report.job.world_size} x {report.hardware.name}", fontsize="medium")
    return figure


def _stack(axes: Any, sizes: dict[str, float], name: str) -> None:
    below = 0.0
    for part, size in sorted(sizes.items(), key=lambda item: -item[1]):
        axes.bar(name, size, bottom=below, label=part, width=0.5)
        below += size
