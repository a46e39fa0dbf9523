"""Predict every published measurement.

python -m benchmarks.published            # seconds
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.harness.record import Record, finish, parser_of

from . import foundry, magi, suites, torchtitan, trl, unseen, usp_paper
from .row import Row, Source, mean_error

MISS, RECENT = 0.15, 2024
QUESTION = "How far are predictions from what others measured, with nothing fitted?"


def record(sources: Sequence[Source]) -> Record:
    cells = [
        (source.title, row.name, _number(row, row.measured), _number(row, row.predicted), f"{row.error:+.1%}")
        for source in sources
        for row in source.rows
    ]
    columns = ("source", "row", "measured", "predicted", "error")
    return Record.of("published", QUESTION, _answer(sources), columns, cells, [*_means(sources), *_notes(sources)])


def _answer(sources: Sequence[Source]) -> str:
    def mean(*some: Source) -> str:
        return f"{mean_error([row for source in some for row in source.rows if row.timed]):.1%}"

    timed = [source for source in sources if any(row.timed for row in source.rows)]
    recent = [source for source in timed if source.year >= RECENT] or timed
    return (
        f"{sum(row.timed for source in timed for row in source.rows)} measurements that others published are predicted "
        f"within {mean(*timed)} on average, those from {RECENT} on within {mean(*recent)} "
        f"({'; '.join(f'{source.title}: {mean(source)}' for source in timed)})."
        f"{''.join(f' {source.summary}' for source in sources if source.summary)}"
    )


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
    recent = [source for source in sources if source.year >= RECENT]
    yield from mean(recent, f"All from {RECENT} on")
    beyond = (f"{s.title}, {row.name} ({row.error:+.0%})" for s in recent for row in s.rows if abs(row.error) > MISS)
    yield f"From {RECENT} on beyond {MISS:.0%}, each explained below: {'; '.join(beyond)}."
    for source in sources:
        yield from mean([source], source.title)


def _notes(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        yield f"{source.title}: {source.reference}."
        yield from (*source.notes, *filter(None, (source.summary,)))


def main() -> None:
    args = parser_of(QUESTION).parse_args()
    sources = [module.source() for module in (torchtitan, usp_paper, magi, trl, suites, unseen)]
    finish(record([*sources, *foundry.sources()]), args)


if __name__ == "__main__":
    main()
