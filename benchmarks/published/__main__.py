"""Predict every published measurement.

python -m benchmarks.published            # seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.record import Record, finish

from . import alst, magi, megatron, torchtitan, trl, usp_paper
from .row import Row, Source, mean_error

QUESTION = "The time and memory models against published measurements, with nothing fitted"


def record(sources: Sequence[Source]) -> Record:
    cells = [
        (source.title, row.name, _number(row, row.measured), _number(row, row.predicted), f"{row.error:+.1%}")
        for source in sources
        for row in source.rows
    ]
    data = [{"source": source.title, **asdict(row), "error": row.error} for source in sources for row in source.rows]
    columns = ("source", "row", "measured", "predicted", "error")
    return Record.of("published", QUESTION, columns, cells, [*_means(sources), *_notes(sources)], data)


def _number(row: Row, value: float) -> str:
    return f"{value:,.0f} {row.unit}" if value >= 100 or row.unit == "tokens" else f"{value:.1f} {row.unit}"


def _means(sources: Sequence[Source]) -> Iterator[str]:
    eager = [row for source in sources for row in source.rows if row.eager]
    yield f"Mean absolute error of all {len(eager)} bfloat16 rows without compiler: {mean_error(eager):.1%}."
    for source in sources:
        if rows := [row for row in source.rows if row.eager]:
            beyond = sum(abs(row.error) > 0.1 for row in rows)
            yield f"{source.title}: mean {mean_error(rows):.1%}, {beyond} of {len(rows)} beyond 10%."


def _notes(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        yield f"{source.title}: {source.reference}."
        yield from source.notes


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    args = parser.parse_args()
    finish(record([module.source() for module in (torchtitan, usp_paper, magi, trl, megatron, alst)]), args.output)


if __name__ == "__main__":
    main()
