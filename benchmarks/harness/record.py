"""The result of a benchmark: a table on the screen and a JSON file, from which benchmarks/report.py writes the docs."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "transformers", "yunchang", "deepspeed", "flash-attn", "numpy")


@dataclass(frozen=True)
class Record:
    """The result of one benchmark.

    Attributes:
        question, answer: a user's question, and a sentence or two with the figures that answer it.
        command: reproduces the benchmark.
        rows: of a table with `columns`, below which `notes` stand.
        data: what a plot shows.
    """

    name: str
    question: str
    answer: str
    command: str
    machine: dict[str, str]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    data: list[dict[str, Any]] = field(default_factory=list)

    def print(self) -> None:
        table = Table(*self.columns, title=self.question, box=box.SIMPLE_HEAD)
        for row in self.rows:
            table.add_row(*row)
        console = Console()
        console = Console(width=max(console.width, 150))  # log files report 80 columns
        console.print(table)
        console.print(self.answer)
        for note in self.notes:
            console.print(f"- {note}")

    def save(self, path: Path) -> None:
        """Write JSON with a line for each row, note and element of data."""
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = [f"{json.dumps(name)}: {_lines(value)}" for name, value in asdict(self).items() if value]
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n")

    @staticmethod
    def of(
        name: str,
        question: str,
        answer: str,
        columns: tuple[str, ...],
        rows: Iterable[tuple[str, ...]],
        notes: Iterable[str] = (),
        data: Sequence[dict[str, Any]] = (),
        *,
        command: str = "",
        extra: Sequence[tuple[str, str]] = (),
    ) -> Record:
        """Make a record of this machine, today.

        Args:
            command: by default `python -m benchmarks.NAME`.
            extra: further facts about the machine, such as the name of its GPU.
        """
        command = command or f"python -m benchmarks.{name}"
        return Record(name, question, answer, command, machine(extra), columns, tuple(rows), tuple(notes), list(data))

    @staticmethod
    def load(path: Path) -> Record:
        fields = json.loads(path.read_text())
        for name in ("columns", "notes"):
            fields[name] = tuple(fields.get(name, ()))
        return Record(**{**fields, "rows": tuple(map(tuple, fields["rows"]))})


def _lines(value: Any) -> str:
    whole = json.dumps(value)
    nested = isinstance(value, list | tuple) and len(whole) > 100
    return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]" if nested else whole


def parser_of(description: str, quick: str = "") -> argparse.ArgumentParser:
    """Return a parser with the flags of all benchmarks; quick: what --quick measures, which then exists."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="path of the JSON file")
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}; saves nothing without --output")
    return parser


def finish(record: Record, options: argparse.Namespace) -> None:
    """Print a record, and save it at --output; without it under its name in `RESULTS`, but for --quick."""
    record.print()
    path = options.output or (None if getattr(options, "quick", False) else RESULTS / f"{record.name}.json")
    if path:
        record.save(path)


def machine(extra: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Return date, processor and versions, with `extra` facts between them."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        **dict(extra),
        "system": platform.system(),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
