"""Write docs/benchmarks.md, its plots and the README's table from the JSON files in benchmarks/results.

python -m benchmarks.report
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.plots import plot_learning, plot_memory
from benchmarks.harness.record import RESULTS, Record

ROOT = Path(__file__).parents[1]
DOCUMENT, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
PLOTS = {"learning": plot_learning, "memory": plot_memory}
MEASURED = "## Measured\n"
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
        *(["", f"![{record.question}](images/{record.name}.png)"] if record.name in PLOTS else []),
    ]
    return "\n".join(lines) + "\n"


def document(records: Sequence[Record]) -> str:
    return "\n".join([GUIDE, *map(section, records)])


def readme(text: str, attention: Record) -> str:
    """The README with its section on measurements written anew."""
    before, after = text.split(MEASURED)
    following = after[after.index("\n## ") :]
    return before + MEASURED + "\n" + measured(attention) + following


def measured(attention: Record) -> str:
    """The standard cases of the attention benchmark."""
    columns = ("u x r", "tokens", "forward ms", "fwd + bwd ms", "of yunchang", "of 1 process", "units sent")
    chosen = {"layout": "zigzag", "dtype": "float32", "heads": "8/8"}
    rows = [dict(zip(attention.columns, row, strict=True)) for row in attention.rows]
    standard = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
    fours = [row for row in standard if row["u x r"] in ("4 x 1", "2 x 2", "1 x 4")]
    machine = attention.machine
    lines = [
        "Attention on 4 CPU ranks, causal, zigzag, float32, 8 heads of 64. Times and bytes are ours / yunchang 0.6.4",
        "(patched to run on CPU, in the same run, taking turns) / one process with a thread per core, the limit.",
        "",
        _row(columns),
        _row(["---"] * len(columns)),
        *(_row([row[name] for name in columns]) for row in fours),
        "",
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}. One unit is "
        "the bytes of one activation",
        "of the whole sequence, per rank. All cases: [docs/benchmarks.md](docs/benchmarks.md).",
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    records = [Record.load(path) for path in sorted(RESULTS.glob("*.json"))]
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(records))
    for record in records:
        if record.name in PLOTS:
            PLOTS[record.name](record, DOCUMENT.parent / "images" / f"{record.name}.png")
        if record.name == "attention":
            README.write_text(readme(README.read_text(), record))
    print(f"{DOCUMENT}: {len(records)} benchmarks")


if __name__ == "__main__":
    main()
