"""The predicted step of a configuration: seconds by part, MFU and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from usp.config import TrainConfig
from usp.hf.models import model_facts
from usp.model.facts import ModelFacts
from usp.optimizers import OPTIMIZERS
from usp.parallel.cluster.hardware import Hardware
from usp.predict.compute import model_flops, sharing
from usp.predict.devices import Memory, usable
from usp.predict.job import Data, Job
from usp.predict.memory import Footprint, Moment, host_bytes, largest_footprint
from usp.predict.seconds import PUBLISHED_ERRORS, StepTime, counted_seconds, published_kind, step_seconds
from usp.predict.traffic import Sent
from usp.run.failures import ConfigurationError
from usp.run.metrics import seconds
from usp.run.tables import GIB, Grid
from usp.train.resolve import job_of, trained_model

from .job_cost import JobCost, Terms, job_cost, job_grid, missing_prices

if TYPE_CHECKING:  # with transformers' models it takes seconds to import
    from usp.train.dry_run import DryRun

FIGURES = ("step", "tokens/s per device", "MFU")  # columns of `figures`


@dataclass(frozen=True)
class StepReport:
    """A step of `job` on `hardware`, by dry runs for a job without formulas."""

    job: Job
    hardware: Hardware
    runs: tuple[DryRun, ...] = ()  # of one rank of each pipeline stage that may be the slowest

    @cached_property
    def time(self) -> StepTime:
        if not self.runs:
            return step_seconds(self.job, self.hardware)
        return max((self._counted(run) for run in self.runs), key=lambda time: time.total)

    def _counted(self, run: DryRun) -> StepTime:
        from usp.predict.meter import FSDP_COLLECTIVES

        sent = []
        for each in run.sent:
            axes = [x for x in each.axes if "fsdp" in x and each.collective in FSDP_COLLECTIVES] or each.axes
            sent.append(Sent(axes[0], each.collective, each.nbytes, each.calls))
        return counted_seconds(self.job, self.hardware, run.rank, sent, run.work, run.update, run.offloaded_bytes)

    @cached_property
    def memory(self) -> Footprint:
        """The memory of the pipeline stage that needs the most."""
        if not self.runs:
            return largest_footprint(self.job)[0]
        from usp.predict.meter import CATEGORIES

        run = max(self.runs, key=lambda run: run.peak_bytes)
        parameters, gradients, optimizer, whole, activations, transient = map(run.by_category.__getitem__, CATEGORIES)
        peak = Moment("the dry run", parameters, optimizer, gradients, whole, activations, transient)
        return Footprint(parameters, gradients, optimizer, activations, run.host_bytes, peak)

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.job.config.seq_len * self.job.config.batch_size * self.job.dims.batch

    @property
    def unmasked_mfu(self) -> float:
        """MFU with the masked half of attention counted as work, as PaLM's (arXiv 2204.02311, appendix B) does."""
        hidden = (model_flops(self.job, masked=True) - model_flops(self.job)) / self.job.world_size
        return (self.time.causal_flops + hidden) / self.time.total / self.time.peak

    @cached_property
    def on_host(self) -> int:
        """Bytes that the ranks of a host keep in its memory."""
        if self.runs:
            return self.memory.host * sharing(self.job, self.hardware)
        return host_bytes(self.job, self.hardware.host_devices)

    @property
    def limits(self) -> Memory:
        """Bytes of a device and of a host that a run can use."""
        return usable(self.hardware)

    @property
    def fits(self) -> bool:
        return self.memory.peak.total <= self.limits.device and self.on_host <= self.limits.host

    def job_cost(self, terms: Terms) -> JobCost:
        """Return what a job of these steps takes."""
        return job_cost(terms, self.hardware.name, self.job.world_size, self.time.total, self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that a device processes per second."""
        return self.tokens / self.time.total / self.job.world_size


def figures(report: StepReport) -> tuple[str, str, str]:
    """Return the step with its error, tokens/s of a device and MFU as cells of a table of steps."""
    step = f"{seconds(report.time.total)} +-{PUBLISHED_ERRORS[published_kind(report.job)]:.0%}"
    return step, f"{report.tokens_per_second:,.0f}", f"{report.time.mfu:.2f}"


def step_report(
    config: TrainConfig, world_size: int, hardware: Hardware, data: Callable[[ModelFacts], Data]
) -> StepReport:
    """Predict a step by formulas, or else by dry runs; raise ConfigurationError as `job_of`."""
    model = trained_model(config, weights=False)
    facts = model_facts(config.model, model)
    found = data(facts)
    job = job_of(config, model, world_size, data=found)
    if not (config.lora_rank or OPTIMIZERS[config.optimizer].approximate or facts.formula_violation):
        return StepReport(job, hardware)
    if found.router_imbalance != 1:
        raise ConfigurationError("--router-imbalance: a dry run's routers choose experts evenly: remove it")
    from usp.train.dry_run import dry_run

    # The last rank of a stage has the end of the sequence: with contiguous shards, most of the attention.
    ranks = {world_size // job.dims.pp - 1, world_size - 1}
    eager = replace(config, compile=False)
    return StepReport(job, hardware, tuple(dry_run(eager, world_size, rank, found) for rank in sorted(ranks)))


def render(report: StepReport, terms: Terms) -> Group:
    """Return the tables of a report, and of the job if any is asked for, for rich to print."""
    config = report.job.config
    how = "by formula; `dry-run` counts its memory and bytes exactly"
    if report.runs:
        how = f"from a dry run, which took {sum(run.seconds for run in report.runs):.0f} s"
    asked = (
        f"{config.model} on {report.job.world_size} x {report.hardware.name} ({report.job.dims}): {report.tokens:,} "
        f"tokens per step, ZeRO-{config.zero}, activation checkpointing {config.ac}, {how}"
    )
    hardware, limits = report.hardware, report.limits
    into = f"{limits.device / GIB:.1f} GiB, the usable part of {hardware.memory_bytes / GIB:.1f} GiB"
    if report.on_host and math.isfinite(limits.host):
        into += f", and {limits.host / GIB:.0f} of a host's {hardware.host_memory_bytes / GIB:.0f} GiB"
    verdict = f"the step {'fits' if report.fits else 'does not fit'} into {into}"
    jobs = [(f"{report.job.world_size} x {hardware.name}", report.job_cost(terms))] if terms.asked else []
    of_job: list[RenderableType] = [job_grid(terms, jobs).table(), *missing_prices(jobs)] if jobs else []
    return Group(asked, _times(report).table(), _memory(report).table(), verdict, *of_job)


def report_json(report: StepReport, terms: Terms | None = None) -> dict[str, Any]:
    """Return the report, and with `terms` the job, as JSON values: seconds, bytes, fractions and hours."""
    return {
        "seconds": report.time.total,
        "parts": report.time.parts,
        "kernels": list(report.time.kernels),
        "tokens": report.tokens,
        "mfu": report.time.mfu,
        "unmasked_mfu": report.unmasked_mfu,
        "memory_bytes": report.memory.peak.total,
        "memory_parts": memory_parts(report.memory),
        "host_bytes": report.memory.host,
        "memory_limit_bytes": report.limits.device,
        "bytes_of_a_host": report.on_host,
        "host_limit_bytes": report.limits.host if math.isfinite(report.limits.host) else None,
        "fits": report.fits,
        **({"job": vars(report.job_cost(terms))} if terms and terms.asked else {}),
    }


def _times(report: StepReport) -> Grid:
    total, names = report.time.total, {"attention": f"attention by {', '.join(report.time.kernels)}"}
    slowest = sorted(report.time.parts.items(), key=lambda item: -item[1])
    rows = [(names.get(part, part), seconds(took), f"{took / total:.1%}") for part, took in slowest if took]
    kind = published_kind(report.job)
    rows.append((f"step, as published ones of {kind}", seconds(total), f"+-{PUBLISHED_ERRORS[kind]:.0%}"))
    rows.append(("tokens/s per device", f"{report.tokens_per_second:,.0f}", ""))
    rows.append(("MFU, visible half of a causal mask", f"{report.time.mfu:.1%}", ""))
    rows.append(("MFU, all of attention", f"{report.unmasked_mfu:.1%}", ""))
    return Grid("Time of a step", ("part", "time", "share"), tuple(rows))


def memory_parts(memory: Footprint) -> dict[str, int]:
    """Return the bytes at the peak by what takes them."""
    names = ("parameters", "optimizer states", "gradients", "gathered parameters and gradients", "activations")
    return dict(zip((*names, "temporary"), memory.peak[1:], strict=True))


def _memory(report: StepReport) -> Grid:
    memory, on_host = report.memory, report.on_host if report.memory.host else 0
    sizes = {**memory_parts(memory), f"peak, at: {memory.peak.name}": memory.peak.total}
    sizes |= {"in host memory": memory.host, "in host memory, all ranks of a host": on_host}
    rows = tuple((name, f"{nbytes / GIB:.2f}") for name, nbytes in sizes.items() if nbytes)
    return Grid("Memory of the rank that needs most", ("category", "GiB"), rows)
