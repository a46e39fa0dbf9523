"""Write docs/benchmarks.md from the JSON files in benchmarks/results.

python -m benchmarks.report
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import RESULTS, Record

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
GUIDE = """# Benchmarks

Written by `python -m benchmarks.report` from `benchmarks/results`; every section names the command that repeats it.

How to read them: a peer is measured in the same run on the same ranks, taking turns call by call, so the ratios mean
more than the times, which are those of one machine on one day. Patches that a peer needed to run are named below its
table. Times are medians after two rounds of warm-up; bytes are counted where collectives pass torch's dispatcher,
below every library alike.
"""


def section(record: Record) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in record.machine.items())
    lines = [
        f"## {record.question}",
        "",
        f"`{record.command}` ({machine})",
        "",
        _row(record.columns),
        _row(["---"] * len(record.columns)),
        *map(_row, record.rows),
        "",
        *(f"- {note}" for note in record.notes),
    ]
    return "\n".join(lines) + "\n"


def document(records: Sequence[Record]) -> str:
    return "\n".join([GUIDE, *map(section, records)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    records = [Record.load(path) for path in sorted(RESULTS.glob("*.json"))]
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(records))
    print(f"{DOCUMENT}: {len(records)} benchmarks")


if __name__ == "__main__":
    main()
