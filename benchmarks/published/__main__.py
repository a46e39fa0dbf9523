"""Predict every published measurement.

python -m benchmarks.published            # seconds
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.record import Record, finish

from . import alst, foundry, magi, megatron, suites, torchtitan, trl, usp_paper
from .row import Row, Source, mean_error

MISS = 0.15
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
    def mean(sources: Sequence[Source], of: str) -> Iterator[str]:
        if rows := [row for source in sources for row in source.rows if row.timed]:
            bias, beyond = statistics.mean(row.error for row in rows), sum(abs(row.error) > 0.1 for row in rows)
            worst = max(abs(row.error) for row in rows)
            yield (
                f"{of}: mean absolute error {mean_error(rows):.1%}, mean {bias:+.1%}, worst {worst:.1%}, {beyond} of "
                f"{len(rows)} beyond 10%."
            )

    yield from mean(sources, "All bfloat16 rows")
    recent = [source for source in sources if source.year >= 2024]
    yield from mean(recent, "All from 2024 on")
    beyond = (f"{s.title}, {row.name} ({row.error:+.0%})" for s in recent for row in s.rows if abs(row.error) > MISS)
    yield f"From 2024 on beyond {MISS:.0%}, each explained below: {'; '.join(beyond)}."
    for source in sources:
        yield from mean([source], source.title)


def _notes(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        yield f"{source.title}: {source.reference}."
        yield from source.notes


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    args = parser.parse_args()
    sources = [module.source() for module in (torchtitan, usp_paper, magi, trl, suites, megatron, alst)]
    finish(record([*sources, *foundry.sources()]), args.output)


if __name__ == "__main__":
    main()
