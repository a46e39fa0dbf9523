"""The report of a dry run: tables for the terminal, and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group

from usp.cost.grid import GIB, Grid
from usp.run.metrics import count
from usp.train.validate import parallel_dims

from .dry_run import DryRun


def dry_run_json(run: DryRun) -> dict[str, Any]:
    """Return all results as JSON values, sizes in bytes."""
    return asdict(run) | {"collectives": run.collectives}


def render_dry_run(run: DryRun) -> Group:
    """Return tables of memory and traffic for rich to print."""
    config = run.config
    dims = parallel_dims(config, config.ep)
    return Group(
        f"rank {run.rank} of {run.world_size} ({dims}): {config.model}, {config.batch_size} x {config.seq_len} tokens, "
        f"{config.dtype} on {config.device}, ZeRO-{config.zero}, activation checkpointing {config.ac}",
        run.kernel,
        _memory(run).table(),
        _traffic(run).table(),
        f"FLOPs of the rank: {run.flops:.4g}, of which attention {run.attention_flops:.4g}; "
        f"collectives and messages: {count(run.collectives)}",
        f"the dry run took {run.seconds:.1f} s and {run.process_bytes / GIB:.2f} GiB",
    )


def _memory(run: DryRun) -> Grid:
    sizes = {**run.by_category, "total": run.peak_bytes}
    if run.host_bytes:
        sizes["host memory"] = run.host_bytes
    rows = tuple((category, f"{nbytes / GIB:.3f}") for category, nbytes in sizes.items())
    return Grid("Peak memory of the rank", ("category", "GiB"), rows)


def _traffic(run: DryRun) -> Grid:
    rows = [
        (", ".join(sent.axes), str(len(sent.ranks)), sent.collective.strip("_"), f"{sent.calls:,}", f"{sent.nbytes:,}")
        for sent in run.sent
    ]
    rows.append(("all", "", "", f"{run.collectives:,}", f"{sum(sent.nbytes for sent in run.sent):,}"))
    return Grid("Sent by the rank", ("axes", "ranks", "collective", "calls", "bytes"), tuple(rows))
