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
    rows = []
    for call in calls:
        parts = {name: call.by_category.get(name, 0) for name in (*CATEGORIES, KV_CACHE)}
        sizes = {**parts, OTHERS: call.others_bytes, "total": call.peak_bytes, "host memory": call.host_bytes}
        found = [(name, f"{nbytes / GIB:.3f}") for name, nbytes in sizes.items() if nbytes]
        rows += [(call.call if number == 0 else "", *line) for number, line in enumerate(found)]
    return Grid("Peak memory of the rank", ("call", "category", "GiB"), tuple(rows))


def _traffic(calls: Sequence[CallRun]) -> Grid:
    rows = [
        (call.call if number == 0 else "", ", ".join(sent.axes), sent.collective.strip("_"), f"{sent.nbytes:,}")
        for call in calls
        for number, sent in enumerate(call.sent)
    ]
    return Grid("Sent by the rank, per mini-batch", ("call", "axes", "collective", "bytes"), tuple(rows))
