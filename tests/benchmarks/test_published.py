"""Published measurements: the rows are whole, what they assume holds, and every error is printed."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.published import foundry, magi, torchtitan, unseen, usp_paper
from benchmarks.published.__main__ import record
from benchmarks.published.row import Row, Source, mean_error
from usp.parallel import load_hardware
from usp.predict.seconds import PUBLISHED_ERRORS


def test_partial_recomputation_lies_between_none_and_full() -> None:
    a100 = load_hardware("a100")
    by_kind = [
        torchtitan._seconds(a100, "llama3-8b", 64, kind, seq_len=8192, batch_size=1)
        for kind in ("none", "selective op", "full")
    ]
    assert by_kind == sorted(set(by_kind))


@pytest.mark.slow
def test_tables_6_and_7_are_whole() -> None:
    assert Counter(row.name.split(",")[0] for row in usp_paper.source().rows) == {"Table 6": 26, "Table 7": 5}


@pytest.mark.slow
def test_the_errors_that_tables_print_are_those_of_unseen_rows() -> None:
    found = {kind: mean_error(rows) for kind, rows in unseen.by_kind().items()}
    assert found == {kind: pytest.approx(error, abs=0.006) for kind, error in PUBLISHED_ERRORS.items()}


def test_every_system_of_the_study_has_all_its_rows() -> None:
    assert all(len(values) == len(magi.DEVICES) for pair in magi.MEASURED.values() for values in pair)


def test_every_error_is_printed_and_other_rows_leave_the_mean_alone() -> None:
    rows = (Row("a", "s", 10.0, 10.5), Row("b", "s", 100.0, 80.0), Row("c", "tokens", 1e6, 0.0, timed=False))
    made = record([Source("us", "there", rows, ("A note.",))])
    assert [row[-1] for row in made.rows] == ["+5.0%", "-20.0%", "-100.0%"]
    words = "mean absolute error 12.5%, mean -7.5%, worst 20.0%, 1 of 2 beyond 10%."
    assert made.notes == (
        f"All bfloat16 rows: {words}",
        f"All from 2024 on: {words}",
        "From 2024 on beyond 15%, each explained below: us, b (-20%); us, c (-100%).",
        f"us: {words}",
        "us: there.",
        "A note.",
    )
    assert made.answer.startswith("2 measurements that others published are predicted within 12.5% on average")


def test_a_row_of_foundry_has_the_weights_and_the_tokens_of_its_table() -> None:
    h100, a100 = foundry.MEASURED.values()
    assert len({tuple(row[:6]) for row in h100}) == len(h100) == 43 and len(a100) == 25
    hardware = load_hardware("h100")
    none, full = (foundry._seconds(hardware, "1b", 2048, 8, 14, 1, again) for again in (False, True))
    assert none < full < 1.5 * none
