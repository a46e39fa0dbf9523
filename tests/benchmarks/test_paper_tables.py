"""The paper's tables as data, and the comparison of predictions with them."""

from __future__ import annotations

from collections import Counter

from benchmarks.baselines.paper_rows import ROWS, TABLES, calibrated, job
from benchmarks.paper_tables import COLUMNS, START, errors, fit, kendall_tau, summary


def test_the_tables_are_whole_and_a_third_of_each_is_fitted() -> None:
    assert Counter(row.table for row in ROWS) == dict(zip(TABLES, (24, 16, 9, 26, 5), strict=True))
    assert Counter(row.table for row in ROWS if calibrated(row)) == {
        table: -(-sum(row.table == table for row in ROWS) // 3) for table in TABLES
    }


def test_a_row_is_predicted() -> None:
    rows = [ROWS[0], next(row for row in ROWS if row.table == "Table 6")]
    found = errors(rows, {row: job(row) for row in rows}, START)
    assert len(found) == 2 and all(-1 < error < 3 for error in found)
    data = [
        {"table": "Table 6", "calibrated": number < 1, "error": error, "measured": number, "predicted": number}
        for number, error in enumerate((0.5, 0.2, -0.05))
    ]
    cells = summary("Table 6", data)
    assert len(cells) == len(COLUMNS)
    assert cells[1:] == ("3", "1", "12.5%", "25.0%", "1.00", "1.00", "1 of 2")


def test_kendall_tau() -> None:
    assert kendall_tau([(1, 1), (2, 2), (3, 3)]) == 1
    assert kendall_tau([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall_tau([(1, 1), (2, 3), (3, 2)]) == 1 / 3


def test_the_fit_finds_what_made_the_data() -> None:
    found = fit(lambda x: abs(x["matmul"] - 0.5) + abs(x["links"] - 0.9), dict(START), ("matmul", "links"))
    assert abs(found["matmul"] - 0.5) < 0.01 and abs(found["links"] - 0.9) < 0.01
