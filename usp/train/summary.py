"""What a step of a run sends, needs and takes, as predicted: a few lines before the first step."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from rich.console import Console
from rich.table import Table

from usp.config import TrainConfig
from usp.parallel import Hardware
from usp.predict.devices import hardware_here
from usp.predict.job import Job
from usp.predict.memory import largest_footprint
from usp.predict.seconds import step_seconds
from usp.predict.traffic import stage_units, step_traffic
from usp.run.failures import ConfigurationError
from usp.run.metrics import count, seconds, size

from .prepare import PreparedRun
from .resolve import job_of

WIDTH = 120


def predicted_job(config: TrainConfig, prepared: PreparedRun) -> Job | None:
    """Return the step of a stage for the formulas; None where they do not apply."""
    try:
        return job_of(config, prepared.model_config, prepared.launch.world_size, prepared.shape)
    except ConfigurationError:
        return None


def predicted_lines(job: Job, prepared: PreparedRun) -> list[str]:
    """Return the summary of a step on this machine; empty for a model without formulas."""
    device = prepared.device
    if job.model.facts.formula_violation:
        return []
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    try:
        hardware = hardware_here("auto", device, prepared.launch)
    except ValueError:  # unknown: `usp calibrate` measures it
        hardware = None
    return run_summary(job, memory, hardware)


def run_summary(job: Job, memory_bytes: int | None, hardware: Hardware | None) -> list[str]:
    """Return the lines of a table for the first rank of the pipeline stage that needs the most memory.

    memory_bytes: of a device; None if it is not a GPU. hardware: the node; None if it is not known.
    """
    table = Table.grid(padding=(0, 2))
    for row in _rows(job, memory_bytes, hardware):
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False).print(table)
    return ["predicted:", *(f"  {line.rstrip()}" for line in text.getvalue().splitlines())]


def _rows(job: Job, memory_bytes: int | None, hardware: Hardware | None) -> Iterator[tuple[str, str]]:
    config = job.config
    memory, rank = largest_footprint(job)
    if job.world_size > 1:
        over = f"ZeRO-{config.zero} over {job.degree('fsdp')} ranks" if config.zero else "all on every rank of dp x sp"
        parameters = sum(stage_units(job, stage).shard for stage in job.stages(rank))
        yield "sharding", f"{over}, {count(parameters)} of {count(job.model.numel)} parameters on a rank"
    peak = memory.peak
    parts = {"parameters": peak.parameters, "gradients": peak.gradients, "optimizer": peak.optimizer}
    parts |= {"unsharded": peak.whole, "activations": peak.activations + peak.transient}
    of_device = f" of {size(memory_bytes)}" if memory_bytes else ""
    host = f"; {size(memory.host)} of host memory" if memory.host else ""
    yield "memory", f"{size(peak.total)}{of_device}: {_listed(parts)}{host}"
    sent = Counter[str]()
    for part in step_traffic(job, rank):
        sent[part.axis] += part.nbytes
    if sent:
        yield "sent", f"{size(sent.total())} per step and rank: {_listed(sent)}"
    if hardware is not None:
        step = step_seconds(job, hardware)
        tokens = config.seq_len * config.batch_size * job.dims.batch / step.total
        speed = f"{seconds(step.total)} on {hardware.name}, {count(tokens)} tokens/s, MFU {step.mfu:.0%}"
        yield "step", f"{speed}, bound by {step.bound}"


def _listed(parts: Mapping[str, int]) -> str:
    total = sum(parts.values())
    return ", ".join(f"{name} {size(n)}" for name, n in sorted(parts.items(), key=lambda x: -x[1]) if 100 * n >= total)
