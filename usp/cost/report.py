"""A comparison as tables for the terminal and Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from usp.metrics import size

from .comparison import OVERLAP, Compared, total
from .sent import Sent


@dataclass(frozen=True)
class Grid:
    """A table: titles of columns, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def show(self, console: Console) -> None:
        table = Table(*self.columns, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)


def grids(found: Sequence[Compared]) -> list[Grid]:
    """Communication on the wire and as the paper counts, memory, who overlaps, and what cannot run and why."""
    feasible = [one for one in found if not one.problem]
    grids = [_communication(feasible), _memory(feasible), _overlap(feasible)] if feasible else []
    refused = tuple((one.method, one.problem) for one in found if one.problem)
    return [*grids, Grid("Not possible", ("method", "why"), refused)] if refused else grids


def _communication(found: Sequence[Compared]) -> Grid:
    columns = ("method", "degrees", "block: activations", "paper", "block: parameters", "paper: printed, by factors")
    rows = []
    for one in found:
        activations = "" if one.paper is None else size(one.paper.activations)
        parameters = "" if one.paper is None else f"{size(one.paper.parameters_printed)}, {size(one.paper.parameters)}"
        rows.append(
            (
                one.method,
                one.degrees,
                _sent(one.block_activations),
                activations,
                _sent(one.block_parameters),
                parameters,
                size(one.sent),
            )
        )
    return Grid("Sent by one rank in a step", (*columns, "whole step"), tuple(rows))


def _memory(found: Sequence[Compared]) -> Grid:
    columns = ("method", "parameters", "gradients", "optimizer", "activations", "on the host", "peak", "at")
    rows = []
    for one in found:
        memory = one.memory
        assert memory is not None
        parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.host)
        states = ", ".join(one.paper.states) if one.paper else ""
        rows.append((one.method, *map(size, parts), size(memory.peak.total), memory.peak.name, states))
    return Grid("Memory of one rank", (*columns, "paper: P and G, OS, Act"), tuple(rows))


def _overlap(found: Sequence[Compared]) -> Grid:
    axes = sorted({sent.axis for one in found for sent in one.step if sent.nbytes > 1024})
    return Grid("Who waits", ("axis", "messages"), tuple((axis, OVERLAP[axis]) for axis in axes))


def _sent(parts: Sequence[Sent]) -> str:
    """`1.0 MiB ring send` for each axis and collective."""
    found = [f"{size(part.nbytes)} {part.axis} {part.collective.strip('_')} x{part.calls}" for part in parts]
    return " + ".join(found) or "0 B"


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
