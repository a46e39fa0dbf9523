"""Generate docs/benchmarks.md, the tables in docs/benchmarks, plots and the README's table from benchmarks/results.

python -m benchmarks.report
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.plots import plot_learning, plot_memory
from benchmarks.harness.record import RESULTS, ROOT, Record

DOCUMENT, README, TABLES = ROOT / "docs" / "benchmarks.md", ROOT / "README.md", ROOT / "docs" / "benchmarks"
SECTIONS = {
    "Attention and memory": ("attention", "attention_cluster", "host_time", "memory", "throughput"),
    "Data": ("data",),
    "Predictions": ("published", "planner"),
    "RLHF": ("learning", "real_figure"),
}
PLOTS: dict[str, Callable[[Record, Path], None]] = {"learning": plot_learning, "memory": plot_memory}
BENCHMARKS = "## Benchmarks\n"
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


def readme(text: str, attention: Record) -> str:
    """Return the README with its section on benchmarks replaced."""
    before, after = text.split(BENCHMARKS)
    following = after[after.index("\n## ") :]
    return before + BENCHMARKS + "\n" + summary(attention) + following


def summary(attention: Record) -> str:
    """Return the README's section: the standard cases of the attention benchmark."""
    columns = ("u x r", "tokens", "forward ms", "fwd + bwd ms", "of yunchang", "of 1 process", "units sent")
    chosen = {"layout": "zigzag", "dtype": "float32", "heads": "8/8"}
    rows = [dict(zip(attention.columns, row, strict=True)) for row in attention.rows]
    standard = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
    fours = [row for row in standard if row["u x r"] in ("4 x 1", "2 x 2", "1 x 4")]
    machine = attention.machine
    lines = [
        "Attention on 4 CPU ranks: causal, zigzag, float32, 8 heads of dimension 64. Times and bytes are ours /",
        "yunchang 0.6.4 (patched to run on CPU; same run, alternating calls) / one process with a thread per core.",
        "",
        _row(columns),
        _row(["---"] * len(columns)),
        *(_row([row[name] for name in columns]) for row in fours),
        "",
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}. One unit is "
        "the size of one activation",
        "of the whole sequence, per rank. [All cases](docs/benchmarks/attention.md).",
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
    README.write_text(readme(README.read_text(), records["attention"]))
    for name, record in records.items():
        (TABLES / f"{name}.md").write_text(table(record))
        if name in PLOTS:
            PLOTS[name](record, DOCUMENT.parent / "images" / f"{name}.png")
    print(f"{DOCUMENT}: {len(records)} benchmarks")


if __name__ == "__main__":
    main()
