"""A comparison as tables for the terminal and Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from usp.cost.traffic.sent import Sent
from usp.run.metrics import size

from .comparison import OVERLAP, Compared, total

AND = " + "  # between the parts of a cell


@dataclass(frozen=True)
class Grid:
    """A table: titles of columns, and rows of text; parts of a cell are joined by `AND`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column, *cells in zip(self.columns, *self.rows, strict=True):
            numbers = all(cell.replace(".", "").isdigit() for cell in cells)
            table.add_column(column, overflow="fold", no_wrap=numbers, justify="right" if numbers else "left")
        for row in self.rows:
            table.add_row(*(cell.replace(AND, "\n") for cell in row))
        console.print(table)


def grids(found: Sequence[Compared]) -> list[Grid]:
    """Communication on the wire, memory, both as the paper counts, who overlaps, and what cannot run and why."""
    feasible = [one for one in found if not one.problem]
    grids = [_communication(feasible), _memory(feasible), _paper(feasible), _overlap(feasible)] if feasible else []
    refused = tuple((one.method, one.problem) for one in found if one.problem)
    return [*grids, Grid("Not possible", ("method", "why"), refused)] if refused else grids


def _communication(found: Sequence[Compared]) -> Grid:
    columns = ("method", "degrees", "a block: activations", "a block: parameters", "whole step")
    rows = tuple(
        (one.method, one.degrees, _sent(one.block_activations), _sent(one.block_parameters), size(one.sent))
        for one in found
    )
    return Grid("Sent by one rank in a step, on the wire", columns, rows)


def _memory(found: Sequence[Compared]) -> Grid:
    kept = [(one.method, one.memory) for one in found if one.memory is not None]
    unit, name = (2**30, "GiB") if max(memory.peak.total for _, memory in kept) >= 2**30 else (2**20, "MiB")
    rows = []
    for method, memory in kept:
        parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.host)
        rows.append((method, *(f"{part / unit:.1f}" for part in (*parts, memory.peak.total)), memory.peak.name))
    columns = ("method", "params", "grads", "optim", "activ", "host", "peak", "at")
    return Grid(f"Memory of one rank, {name}", columns, tuple(rows))


def _paper(found: Sequence[Compared]) -> Grid:
    columns = ("method", "activations", "parameters: as printed", "by its own factors", "P and G", "OS", "Act")
    rows = tuple(
        (one.method, *map(size, (paper.activations, paper.parameters_printed, paper.parameters)), *paper.states)
        for one in found
        if (paper := one.paper) is not None
    )
    return Grid("As the paper counts: sent by one rank for a block, and what it keeps", columns, rows)


def _overlap(found: Sequence[Compared]) -> Grid:
    axes = sorted({sent.axis for one in found for sent in one.step if sent.nbytes > 1024})
    return Grid("Who waits", ("axis", "messages"), tuple((axis, OVERLAP[axis]) for axis in axes))


def _sent(parts: Sequence[Sent]) -> str:
    """`1.0 MiB ring send` for each axis and collective."""
    found = [f"{size(part.nbytes)} {part.axis} {_spoken(part.collective)} x{part.calls}" for part in parts]
    return AND.join(found) or "0 B"


def _spoken(collective: str) -> str:
    """The field's name of one of torch's operators: all-to-all for `alltoall_base_`."""
    letters = collective.replace("_", "")
    names = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
    return next((name for name in names if letters.startswith(name.replace("-", ""))), collective)


def as_json(found: Sequence[Compared]) -> list[dict[str, Any]]:
    """Everything in bytes."""
    lines = []
    for one in found:
        line: dict[str, Any] = {"method": one.method}
        if one.problem:
            lines.append({**line, "problem": one.problem})
            continue
        assert one.memory is not None
        line |= {name: getattr(one, name) for name in ("degrees", "rank")}
        for name in ("block_parameters", "block_activations", "step"):
            line[name] = [asdict(sent) for sent in getattr(one, name)]
        line["sent"] = total(one.step)
        line["memory"] = {**asdict(one.memory), "peak": one.memory.peak.total}
        lines.append({**line, "paper": None if one.paper is None else asdict(one.paper)})
    return lines
