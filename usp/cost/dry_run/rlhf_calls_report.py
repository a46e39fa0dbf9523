"""The report of an RLHF step's dry run: tables for the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group

from usp.cost.grid import GIB, Grid

from .live_memory import CATEGORIES
from .rlhf_calls import KV_CACHE, CallRun

OTHERS = "other calls"


def calls_json(calls: Sequence[CallRun]) -> list[dict[str, Any]]:
    """Return all results as JSON values, sizes in bytes."""
    return [asdict(call) | {"peak_bytes": call.peak_bytes} for call in calls]


def render_calls(calls: Sequence[CallRun]) -> Group:
    """Return tables of the calls, their memory and their traffic for rich to print."""
    rows = [
        (call.call, call.layout, f"{call.samples} x {call.tokens:,}", str(call.micro_batches or "")) for call in calls
    ]
    layouts = Grid("Calls of the rank", ("call", "layout", "samples x tokens", "micro-batches"), tuple(rows))
    return Group(layouts.table(), _memory(calls).table(), _traffic(calls).table())


def _memory(calls: Sequence[CallRun]) -> Grid:
    shown = [name for name in (*CATEGORIES, KV_CACHE) if any(call.by_category.get(name) for call in calls)]
    columns = {name: [call.by_category.get(name, 0) for call in calls] for name in shown}
    columns[OTHERS] = [call.others_bytes for call in calls]
    columns["total"] = [call.peak_bytes for call in calls]
    if any(call.host_bytes for call in calls):
        columns["host memory"] = [call.host_bytes for call in calls]
    rows = tuple((name, *(f"{nbytes / GIB:.3f}" for nbytes in sizes)) for name, sizes in columns.items())
    return Grid("Peak memory of the rank in each call, GiB", ("category", *(call.call for call in calls)), rows)


def _traffic(calls: Sequence[CallRun]) -> Grid:
    rows = [
        (call.call, ", ".join(sent.axes), sent.collective.strip("_"), f"{sent.calls:,}", f"{sent.nbytes:,}")
        for call in calls
        for sent in call.sent
    ]
    return Grid("Sent by the rank, per mini-batch", ("call", "axes", "collective", "calls", "bytes"), tuple(rows))
