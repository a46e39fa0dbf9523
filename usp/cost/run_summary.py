"""What a run is about to do, in a few lines: parameters, memory, messages and time of a step, as predicted."""

from __future__ import annotations

import io
from collections import Counter

from rich.console import Console
from rich.table import Table

from parallel import Hardware
from usp.run.metrics import count, size

from .job import Job
from .memory.footprint import footprint
from .planner.advice import seconds
from .time.step_time import step_seconds
from .traffic.sharding import stage_units
from .traffic.step_traffic import step_traffic

WIDTH = 120


def run_summary(job: Job, memory_bytes: int | None, hardware: Hardware | None) -> list[str]:
    """Return the lines of a table for the first rank of the pipeline stage that needs most memory.

    memory_bytes: of a device; None if it is not a GPU. hardware: the node; None if it is not known.
    """
    config = job.config
    found = [(footprint(job, rank), rank) for rank in job.ranks("pp", 0)]
    memory, rank = max(found, key=lambda pair: pair[0].peak.total)
    units = [unit for stage in job.stages(rank) for unit in stage_units(job, stage).all]
    parameters = sum(unit.shard for unit in units)
    peak = memory.peak
    parts = {
        "parameters": peak.parameters,
        "gradients": peak.gradients,
        "optimizer": peak.optimizer,
        "unsharded": peak.whole,
        "activations": peak.activations + peak.transient,
    }
    sent = Counter[str]()
    for part in step_traffic(job, rank):
        sent[part.axis] += part.nbytes
    table = Table.grid(padding=(0, 2))
    of_device = f" of {size(memory_bytes)}" if memory_bytes else ""
    host = f"; {size(memory.host)} of host memory" if memory.host else ""
    shards = f"ZeRO-{config.zero} over {job.degree('fsdp')} ranks" if config.zero else "all on every rank of dp x sp"
    table.add_row("sharding", f"{shards}, {count(parameters)} of {count(job.model.numel)} parameters on a rank")
    table.add_row("memory", f"{size(peak.total)}{of_device}: {_listed(parts)}{host}")
    table.add_row("sent", f"{size(sum(sent.values()))} per step and rank: {_listed(sent)}" if sent else "nothing")
    if hardware is not None:
        step = step_seconds(job, hardware)
        tokens = config.seq_len * config.batch_size * job.dims.batch / step.total
        speed = f"{seconds(step.total)} on {hardware.name}, {count(tokens)} tokens/s, MFU {step.mfu:.0%}"
        table.add_row("step", f"{speed}, bound by {step.bound}")
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False).print(table)
    return ["predicted:", *(f"  {line.rstrip()}" for line in text.getvalue().splitlines())]


def _listed(parts: dict[str, int] | Counter[str]) -> str:
    """Name the parts of a sum, the largest first, without those below a hundredth of it."""
    total = sum(parts.values())
    return ", ".join(f"{name} {size(n)}" for name, n in sorted(parts.items(), key=lambda x: -x[1]) if 100 * n >= total)
