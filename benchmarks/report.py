"""Generate docs/benchmarks.md, the tables in docs/benchmarks and plots from benchmarks/results.

python -m benchmarks.report
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.plots import plot_learning, plot_memory
from benchmarks.harness.record import RESULTS, ROOT, Record

DOCUMENT, TABLES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks"
SECTIONS = {
    "Attention and memory": ("attention", "attention_cluster", "host_time", "memory", "throughput", "experts"),
    "Data": ("data",),
    "Predictions": ("published", "planner", "tune"),
    "RLHF": ("learning", "real_figure"),
}
PLOTS: dict[str, Callable[[Record, Path], None]] = {"learning": plot_learning, "memory": plot_memory}
GUIDE = """# Benchmarks

What each benchmark answers, the command that reproduces it, and its table. Peers are measured in the same run on the
same ranks, alternating call by call, so ratios are more reliable than absolute times, which come from one machine on
one day. Times are medians after two warm-up rounds. Bytes are counted in torch's dispatcher, below every library alike.
The patches that a peer needed are named below its table.

Written by `python -m benchmarks.report` from `benchmarks/results`.
"""


def document(records: Mapping[str, Record]) -> str:
    """Return docs/benchmarks.md: questions and answers by section."""
    sections = (
        "\n".join([f"## {title}\n", *(_paragraph(records[name]) for name in names)])
        for title, names in SECTIONS.items()
    )
    return "\n".join([GUIDE, *sections])


def _paragraph(record: Record) -> str:
    figures = "table and plot" if record.name in PLOTS else "table"
    sources = f"([{figures}](benchmarks/{record.name}.md), `{record.command}`)"
    said = f"**{record.question}** {record.answer} {sources}"
    return textwrap.fill(said, 120, break_on_hyphens=False, break_long_words=False) + "\n"


def table(record: Record) -> str:
    """Return the document of one benchmark."""
    machine = ", ".join(f"{name} {value}" for name, value in record.machine.items())
    lines = [
        f"# {record.question}",
        "",
        textwrap.fill(record.answer, 120, break_on_hyphens=False, break_long_words=False),
        "",
        f"`{record.command}` ({machine}). [All benchmarks](../benchmarks.md)",
        "",
        _row(record.columns),
        _row(["---"] * len(record.columns)),
        *map(_row, record.rows),
        *(["", *(f"- {note}" for note in record.notes)] if record.notes else []),
        *(["", f"![{record.question}](../images/{record.name}.png)"] if record.name in PLOTS else []),
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def load() -> dict[str, Record]:
    """Return the records by name."""
    return {path.stem: Record.load(path) for path in sorted(RESULTS.glob("*.json"))}


def main() -> None:
    records = load()
    TABLES.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(records))
    for name, record in records.items():
        (TABLES / f"{name}.md").write_text(table(record))
        if name in PLOTS:
            PLOTS[name](record, DOCUMENT.parent / "images" / f"{name}.png")
    print(f"{DOCUMENT}: {len(records)} benchmarks")


if __name__ == "__main__":
    main()
