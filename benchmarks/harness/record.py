"""The result of a benchmark: a table on the screen and a JSON file, from which benchmarks/report.py writes the docs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("torch", "transformers", "yunchang", "deepspeed", "flash-attn", "numpy")


@dataclass(frozen=True)
class Record:
    """The result of one benchmark: a table of `rows` with `notes` below, for reading, and `data` for computing."""

    name: str
    question: str
    command: str
    machine: dict[str, str]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    data: list[dict[str, Any]]

    def print(self) -> None:
        table = Table(*self.columns, title=self.question, box=box.SIMPLE_HEAD)
        for row in self.rows:
            table.add_row(*row)
        console = Console()
        console = Console(width=max(console.width, 150))  # log files report 80 columns
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}")

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def of(
        name: str,
        question: str,
        columns: tuple[str, ...],
        rows: Iterable[tuple[str, ...]],
        notes: Iterable[str],
        data: list[dict[str, Any]],
        *,
        command: str = "",
        extra: Sequence[tuple[str, str]] = (),
    ) -> Record:
        """Make a record of this machine, today.

        Args:
            command: reproduces the benchmark; by default `python -m benchmarks.NAME`.
            extra: further facts about the machine, such as the name of its GPU.
        """
        command = command or f"python -m benchmarks.{name}"
        return Record(name, question, command, machine(extra), columns, tuple(rows), tuple(notes), data)

    @staticmethod
    def load(path: Path) -> Record:
        fields = json.loads(path.read_text())
        rows = tuple(tuple(row) for row in fields.pop("rows"))
        columns, notes = tuple(fields.pop("columns")), tuple(fields.pop("notes"))
        return Record(**fields, columns=columns, notes=notes, rows=rows)


def finish(record: Record, output: Path | None = None, *, save: bool = True) -> None:
    """Print a record, and save it at `output`; without `output`, under its name in `RESULTS` if `save` is set."""
    record.print()
    path = output or (RESULTS / f"{record.name}.json" if save else None)
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
