"""A dry run for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from usp.config import config_to_mapping
from usp.run.metrics import count
from usp.train.validate import parallel_dims

from .dry_run import DryRun

GIB = 2**30


def to_json(run: DryRun) -> dict[str, Any]:
    """Everything that a dry run found, as JSON knows it; sizes in bytes."""
    found = asdict(run)
    return found | {
        "config": config_to_mapping(run.config),
        "sent": [asdict(sent) for sent in run.sent],
        "collectives": run.collectives,
    }


def report(run: DryRun) -> Group:
    """Tables of memory and traffic, for rich to print."""
    config = run.config
    dims = parallel_dims(config, config.ep)
    return Group(
        f"rank {run.rank} of {run.world_size} ({dims}): {config.model}, {config.batch_size} x {config.seq_len} tokens, "
        f"{config.dtype} as on {config.device}, ZeRO {config.zero}, recomputation {config.ac}",
        run.kernel,
        _memory(run),
        _traffic(run),
        f"FLOPs of the rank: {run.flops:.4g}, of which attention {run.attention_flops:.4g}; "
        f"collectives and messages: {count(run.collectives)}",
        f"dry run: {run.seconds:.1f} s, {run.process_bytes / GIB:.2f} GiB",
    )


def _memory(run: DryRun) -> Table:
    table = Table("at the peak", "GiB", title="memory of the rank's device", title_justify="left")
    table.columns[1].justify = "right"
    for category, nbytes in run.by_category.items():
        table.add_row(category, f"{nbytes / GIB:.3f}")
    table.add_row("peak", f"{run.peak_bytes / GIB:.3f}", style="bold")
    if run.host_bytes:
        table.add_row("in the host's memory", f"{run.host_bytes / GIB:.3f}")
    return table


def _traffic(run: DryRun) -> Table:
    table = Table("axes", "ranks", "collective", "calls", "bytes", title="sent by the rank", title_justify="left")
    for column in (1, 3, 4):
        table.columns[column].justify = "right"
    for row in _rows(run):
        table.add_row(*row)
    return table


def _rows(run: DryRun) -> Iterator[tuple[str, ...]]:
    for sent in run.sent:
        name = sent.collective.strip("_")
        yield ", ".join(sent.axes), str(len(sent.ranks)), name, f"{sent.calls:,}", f"{sent.nbytes:,}"
    yield "all", "", "", f"{run.collectives:,}", f"{sum(sent.nbytes for sent in run.sent):,}"
