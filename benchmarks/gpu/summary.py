"""What the sections have found so far, and summary.md of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.expected import EXPECTED
from benchmarks.gpu.sections import Section
from benchmarks.harness.checks import Check

DONE = "done"
NEVER = "not run"


def entry_of(check: Check) -> dict[str, Any]:
    """Return a figure as JSON values, without nan and inf, which JSON does not have."""
    expected = None if math.isnan(check.expected) else check.expected
    value = check.value if math.isfinite(check.value) else str(check.value)
    limits = {} if expected is None else {"expected": expected, "least": check.least, "most": _finite(check.most)}
    return {"figure": check.what, "value": value, "unit": check.unit, **limits, "right": check.right}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def check_of_entry(entry: dict[str, Any]) -> Check:
    """Return the figure of `entry_of`."""
    expected, most = entry.get("expected"), entry.get("most")
    limits = (math.nan if expected is None else expected, entry.get("least", 0.0), math.inf if most is None else most)
    return Check(entry["figure"], float(entry["value"]), entry["unit"], *limits)


@dataclass(frozen=True)
class Result:
    """The last attempt of a section.

    outcome: `DONE`, `NEVER`, or what went wrong. attempts: so far.
    """

    section: Section
    outcome: str = NEVER
    seconds: float = 0.0
    attempts: int = 0
    entries: Sequence[dict[str, Any]] = field(default=(), repr=False)

    @property
    def checks(self) -> list[Check]:
        return [check_of_entry(entry) for entry in self.entries if "figure" in entry]

    @property
    def remarks(self) -> list[str]:
        """Notes and errors."""
        return remarks(self.entries)

    @property
    def right(self) -> bool:
        return self.outcome == DONE and all(check.right for check in self.checks)


def remarks(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Return the notes and errors among the lines of a section."""
    return [
        entry["note"] if "note" in entry else f"ERROR: {entry['error']}"
        for entry in entries
        if entry.keys() & {"note", "error"}
    ]


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a section's figures; a last one that was cut off is left out."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def replace_file(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def markdown(results: Sequence[Result]) -> str:
    """Return tables of the sections and of their figures, with the sources of what was expected."""
    lines = ["# One GPU: figures against those expected beforehand", ""]
    rows: list[tuple[str, ...]] = []
    for result in results:
        wrong = sum(not check.right for check in result.checks)
        taken = f"{result.seconds:.0f}" if result.attempts else ""
        counts = (f"{result.section.seconds:.0f}", str(len(result.checks)), str(wrong), str(result.attempts))
        rows.append((result.section.name, result.outcome, taken, *counts))
    lines += table(("section", "outcome", "seconds", "expected", "figures", "out of tolerance", "attempts"), rows)
    for result in results:
        if not result.checks and not result.remarks:
            continue
        lines += ["", f"## {result.section.name}: {result.section.what}", ""]
        if result.checks:
            rows = [(*check.cells(), source_of(check)) for check in result.checks]
            lines += table(("figure", "measured", "expected", "ratio", "verdict", "source"), rows)
            lines += [""] * bool(result.remarks)
        lines += [f"- {remark}" for remark in result.remarks]
    return "\n".join(lines) + "\n"


def source_of(check: Check) -> str:
    return EXPECTED[check.what].source if check.what in EXPECTED and not math.isnan(check.expected) else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]
