"""A comparison as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from usp.cost.grid import AND, GIB, Grid
from usp.cost.time.transfers import exposure
from usp.cost.traffic.sent import Sent
from usp.run.metrics import size

from .comparison import Compared

_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")


def comparison_tables(found: Sequence[Compared]) -> list[Grid]:
    """Return tables of traffic on the wire, memory, the paper's costs, overlap, and infeasible methods."""
    feasible = [one for one in found if not one.problem]
    tables = [_communication(feasible), _memory(feasible), _paper(feasible), _overlap(feasible)] if feasible else []
    infeasible = tuple((one.method, one.problem) for one in found if one.problem)
    return [table for table in (*tables, Grid("Not feasible", ("method", "reason"), infeasible)) if table.rows]


def _communication(found: Sequence[Compared]) -> Grid:
    columns = ("method", "degrees", "activations per block", "parameters per block", "whole step")
    rows = tuple(
        (one.method, one.degrees, _sent(one.block_activations), _sent(one.block_parameters), size(one.sent))
        for one in found
    )
    return Grid("Sent in a step by the busiest rank, on the wire", columns, rows)


def _memory(found: Sequence[Compared]) -> Grid:
    kept = [(one.method, one.memory) for one in found if one.memory is not None]
    unit, name = (GIB, "GiB") if max(memory.peak.total for _, memory in kept) >= GIB else (2**20, "MiB")
    rows = []
    for method, memory in kept:
        parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.host)
        rows.append((method, *(f"{part / unit:.1f}" for part in (*parts, memory.peak.total)), memory.peak.name))
    columns = ("method", "params", "grads", "optim", "activ", "host", "peak", "at")
    return Grid(f"Memory of the rank that needs most, {name}", columns, tuple(rows))


def _paper(found: Sequence[Compared]) -> Grid:
    columns = ("method", "activations", "parameters: as printed", "by its own factors", "P and G", "OS", "Act")
    rows = tuple(
        (one.method, *map(size, (paper.activations, paper.parameters_printed, paper.parameters)), *paper.states)
        for one in found
        if (paper := one.paper) is not None
    )
    return Grid("As the paper counts: sent per rank and block, and memory", columns, rows)


def _overlap(found: Sequence[Compared]) -> Grid:
    axes = sorted({sent.axis for one in found for sent in one.step if sent.nbytes > 1024})
    return Grid("Overlap of communication", ("axis", "communication"), tuple((axis, exposure(axis)) for axis in axes))


def _sent(parts: Sequence[Sent]) -> str:
    """Return `1.0 MiB ring send x3` for each axis and collective."""
    found = [f"{size(part.nbytes)} {part.axis} {_collective_name(part.collective)} x{part.calls}" for part in parts]
    return AND.join(found) or "0 B"


def _collective_name(collective: str) -> str:
    """Return the usual name of a c10d operator: `all-to-all` for `alltoall_base_`."""
    letters = collective.replace("_", "")
    return next((name for name in _COLLECTIVES if letters.startswith(name.replace("-", ""))), collective)


def comparison_json(found: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return everything as JSON values, sizes in bytes."""
    lines: list[dict[str, Any]] = []
    for one in found:
        line = asdict(replace(one, job=None))
        if one.memory is None:
            line = {"method": one.method, "problem": line["problem"]}
        else:
            del line["problem"], line["job"]
            moments = [moment._asdict() for moment in one.memory.moments]
            line |= {"sent": one.sent, "memory": line["memory"] | {"moments": moments, "peak": one.memory.peak.total}}
        lines.append(line)
    return lines
