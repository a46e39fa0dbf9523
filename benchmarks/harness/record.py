"""What a benchmark leaves behind: one table on the screen and one JSON, which benchmarks/report.py turns into docs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
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
    """The answer to one question: `rows` of `columns` to read, `notes` below them, `data` to compute with."""

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
        console = Console(width=max(console.width, 150))  # a log file is wider than the 80 columns it claims
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}")

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Record:
        fields = json.loads(path.read_text())
        rows = tuple(tuple(row) for row in fields.pop("rows"))
        columns, notes = tuple(fields.pop("columns")), tuple(fields.pop("notes"))
        return Record(**fields, columns=columns, notes=notes, rows=rows)


def machine(extra: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Processor, versions and date, with what the caller knows besides (a GPU's name, say)."""
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
