"""The benchmark of calibrations: how far repeated ones lie apart, and whether they say so."""

from __future__ import annotations

from benchmarks.calibration.agreement import COLUMNS, cells, row
from usp.predict.calibrate import CallTimes


def test_times_that_differ_are_counted_and_found_in_the_warnings() -> None:
    slow = [{"a": [1.0] * 8, "b": [1.0] * 7 + [9.0]}, {"a": [2.0] * 8, "b": [1.1] * 8}]
    measured = [CallTimes(turns, {}, {}, [], other_load=0.05) for turns in slow]
    silent, told = row("x", measured, [[], []]), row("x", measured, [[], ["times differ: a (90%)"]])
    assert silent["far"] == {"a": 1.0} and (silent["told"], told["told"]) == ([], ["a"])
    assert row("x", measured, [["refused: b"], []])["told"] == ["a"]
    assert len(cells(told)) == len(COLUMNS) and cells(told)[1] == "5% / 5%" and cells(told)[-2:] == ("1", "1")
