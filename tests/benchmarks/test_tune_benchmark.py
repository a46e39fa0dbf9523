"""The benchmark of tuned layouts compares what stays with the fastest candidate alone."""

from __future__ import annotations

from typing import Any

from benchmarks.tune import answer, cells


def test_the_layout_that_stays_is_compared_with_the_fastest() -> None:
    times = {"a": 0.5, "b": 0.4, "c": 1.0}
    found = [{"layout": name, "alone": seconds, "chosen": name == "a"} for name, seconds in times.items()]
    row: dict[str, Any] = {"candidates": found, "chosen": 0.5, "cost": 4.25, "differs": 2e-7}
    assert cells("dense", row) == ("dense", "3", "500", "400", "1.25", "4.2", "2e-07")
    near = row | {"chosen": 0.41}
    assert answer({"x": row, "y": near}) == (
        "Within 3% of the fastest in 1 of 2 jobs, and at most 25% slower. "
        "The races cost 4, 4 steps of the chosen layout."
    )
