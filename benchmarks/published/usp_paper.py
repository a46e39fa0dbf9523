"""Tables 6 and 7 of the USP paper with the plain node file, and how well the order of Table 6 is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.baselines.paper_rows import ROWS, job
from benchmarks.baselines.paper_rows import Row as PaperRow
from benchmarks.paper_tables import kendall_tau, predict
from usp.parallel import load_hardware

from .row import Row, Source

CHOSEN = tuple(row for row in ROWS if row.table in ("Table 6", "Table 7"))
WHY = (
    "USP, Table 6: tp 2 alone breaks the order, and is lowest at every length. From tp 1 to 2 to 4 the traffic of tp "
    "grows by 1 and 2 parts, that of Ulysses shrinks by 1 and 2, that of parameters by 2 and 1, and the ring's stays: "
    "no sum of them is largest at 2. What tp 2 x ulysses 4 x ring 2 takes beyond its prediction shrinks with the "
    "length, while traffic and compute grow. Memory is no cause, for tp 1 needs more of it and is on time. The paper "
    "does not say why."
)


def tau(rows: Iterable[PaperRow], predicted: dict[PaperRow, float]) -> float:
    return kendall_tau([(row.measured, predicted[row]) for row in rows])


def source() -> Source:
    node = load_hardware("a800")
    predicted = {row: predict(row, job(row), node) for row in CHOSEN}
    rows = tuple(Row(row.name, "TFLOP/s", row.measured, predicted[row]) for row in CHOSEN)
    notes = (_order(predicted), WHY)
    return Source("USP, Llama3-8B on 16 x A800", "arXiv 2405.07719v5, Tables 6 and 7", rows, notes)


def _order(predicted: dict[PaperRow, float]) -> str:
    six = [row for row in CHOSEN if row.table == "Table 6"]
    parts: tuple[tuple[str, Callable[[PaperRow], bool]], ...] = (
        ("all rows", lambda row: True),
        ("without tp 2", lambda row: row.tp != 2),
        ("tp 1", lambda row: row.tp == 1),
        ("tp above 2", lambda row: row.tp > 2),
    )
    taus = ", ".join(f"{name} {tau(filter(chosen, six), predicted):.2f}" for name, chosen in parts)
    return f"USP, Table 6's order, Kendall's tau of measured and predicted: {taus}."
