"""What speaks for and against each compared method on given hardware: its step, whether it fits, and what would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from parallel import Hardware
from usp.config import AC_MODES, TrainConfig, flag
from usp.cost.grid import Grid
from usp.cost.job import Job, job_of
from usp.cost.planner.advice import parts, seconds
from usp.cost.planner.layouts import MLP_TILE
from usp.cost.time_report import StepReport, memory_parts
from usp.hf.models import ModelConfig
from usp.run.metrics import size

from .comparison import Compared


@dataclass(frozen=True)
class Verdict:
    """A feasible method on given hardware.

    Attributes:
        remedy: for a method that does not fit, the flags that save memory at the least cost and the step with them;
            None if it fits, or if none of them suffices.
    """

    found: Compared
    step: StepReport
    remedy: tuple[str, StepReport] | None = None

    @property
    def fits(self) -> bool:
        return self.step.fits

    @property
    def reason(self) -> str:
        """Why the method does not fit, and what would make it; empty if it fits."""
        if self.fits:
            return ""
        words = " ".join(self._excesses())
        if self.remedy is None:
            return (
                f"{words} ZeRO-3, recomputation, MLP tiles, and activations and optimizer on the host do not suffice."
            )
        return f"{words} It fits {self._remedy}."

    def _excesses(self) -> Iterator[str]:
        """Yield what exceeds the device's memory, and the host's."""
        step, peak = self.step, self.step.memory.peak.total
        if peak > step.limit:
            largest, nbytes = max(memory_parts(step.memory).items(), key=lambda part: part[1])
            yield (
                f"Needs {size(peak)} of a device where {size(step.limit)} are usable, most for {largest}: "
                f"{size(nbytes)}."
            )
        if step.on_host > step.host_limit:
            yield f"Needs {size(step.on_host)} of a host's memory where {size(step.host_limit)} are usable."

    @property
    def short(self) -> str:
        """Whether the method fits, or with which flags."""
        return "yes" if self.fits else "no" if self.remedy is None else self._remedy

    @property
    def _remedy(self) -> str:
        assert self.remedy is not None
        flags, saved = self.remedy
        return f"with {flags}: {size(saved.memory.peak.total)}, {seconds(saved.time.total)}"


def judge(found: Iterable[Compared], model_config: ModelConfig, hardware: Hardware) -> list[Verdict]:
    """Return the feasible methods, the fastest that fits first, then those that would fit with a remedy, likewise.

    Raises:
        ValueError: if the hardware has no peak for the dtype, or connects too few devices.
    """
    verdicts = [_verdict(one, one.job, model_config, hardware) for one in found if one.job is not None]
    return sorted(verdicts, key=_rank)


def _rank(one: Verdict) -> tuple[int, float]:
    if one.fits:
        return 0, one.step.time.total
    return (2, one.step.memory.peak.total) if one.remedy is None else (1, one.remedy[1].time.total)


def _verdict(found: Compared, job: Job, model_config: ModelConfig, hardware: Hardware) -> Verdict:
    step = StepReport(job, hardware)
    if step.fits:
        return Verdict(found, step)
    saving = []
    for changes in _savings(job.config):
        try:
            config = replace(job.config, **changes)
            other = StepReport(job_of(config, model_config, job.world_size, job.model, job.data), hardware)
        except ValueError:  # zero-bubble has neither ZeRO-2 nor 3
            continue
        if other.fits:
            saving.append((" ".join(_words(changes)), other))
    return Verdict(found, step, min(saving, key=lambda pair: pair[1].time.total, default=None))


def _savings(config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yield changes of flags that save memory."""
    zeros, modes = range(max(1, config.zero), 4), AC_MODES[AC_MODES.index(config.ac) :]
    for zero, ac, offload, optimizer in product(zeros, modes, (False, True), (False, True)):
        if offload and ac == "none":
            continue
        changes = {"zero": zero, "ac": ac, "ac_offload": offload, "mlp_tile": MLP_TILE if offload else 0}
        changes["optim_offload"] = optimizer
        yield {name: value for name, value in changes.items() if value != getattr(config, name)}


def _words(changes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in changes.items():
        yield flag(name) if value is True else f"{flag(name)} {value}"


def verdict_table(verdicts: Iterable[Verdict], hardware: Hardware) -> Grid:
    """Return the methods with their step and peak memory, in the given order."""
    rows = tuple(
        (
            one.found.method,
            seconds(one.step.time.total),
            f"{one.step.tokens_per_second:,.0f}",
            f"{one.step.time.mfu:.2f}",
            size(one.step.memory.peak.total),
            one.short,
        )
        for one in verdicts
    )
    columns = ("method", "step", "tokens/s per device", "MFU", "memory", "fits")
    return Grid(f"A step on {hardware.name}, the fastest that fits first", columns, rows)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return the step as JSON values: seconds, bytes and fractions."""
    step = verdict.step
    return {
        "seconds": step.time.total,
        "parts": parts(step.time),
        "kernels": list(step.time.kernels),
        "mfu": step.time.mfu,
        "memory_limit_bytes": step.limit,
        "fits": verdict.fits,
        "reason": verdict.reason,
    }
