"""The footprint benchmark runs, and its cases are distinct and valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.footprint import COLUMNS, cases, cells, main, notes
from benchmarks.harness.record import Record
from usp.hf.models import load_model_config
from usp.train.resolve import job_of


@pytest.mark.slow
def test_the_quick_path_compares_and_keeps_dry_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "footprint.json"
    main(["--quick", "--output", str(path)])
    record = Record.load(path)
    assert len(record.rows) == 2 and all(len(row) == len(COLUMNS) for row in record.rows)
    assert all(row["formula"] == pytest.approx(row["dry_run"], rel=0.05) for row in record.data)
    record.data[0]["dry_run"] //= 2
    record.save(path)
    main(["--quick", "--keep", "--output", str(path)])
    assert Record.load(path).data[0]["dry_run"] == record.data[0]["dry_run"]
    assert "Within 5%: 1 of 2. Beyond: tiny 32K" in capsys.readouterr().out.replace("\n", " ")


def test_cases_differ_and_all_can_be_counted() -> None:
    asked = cases(quick=False)
    assert len({case.key for case in asked}) == len(asked) >= 26
    for case in asked:
        job_of(case.config, load_model_config(case.config.model), case.world_size)


def test_a_miss_is_named() -> None:
    row = {"model": "tiny", "tokens": 32768, "ranks": 8, "options": "ring=8", "formula": 2**30}
    rows = [{**row, "dry_run": 2**30}, {**row, "dry_run": 2**30 * 10 // 8}]
    worst, within, _ = notes(rows)
    assert "over 2 cases: 10.00%, worst 20.00% (tiny 32K 8 ring=8)" in worst
    assert within == "Within 5%: 1 of 2. Beyond: tiny 32K 8 ring=8: -20.0%."
    assert cells(rows[0])[-1] == "+0.00%"
