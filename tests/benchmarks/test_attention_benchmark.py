"""The attention benchmark, run once on toy lengths without yunchang."""

from __future__ import annotations

import pytest

from benchmarks.attention import COLUMNS, Case, answer, cells, measure, summarise
from tests.harness.ranks import RankPool


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (1, 4)])
@pytest.mark.slow(but=1)
def test_a_case_is_exact_and_sends_the_predicted_bytes(ranks: RankPool, ulysses: int, ring: int) -> None:
    case = Case(ulysses, ring, seq_len=64, kv_heads=2)
    row = summarise(case, ranks.run(measure, 4, case, 0, 2, False))
    assert row["sent_as_predicted"]
    assert row["difference"]["ours"] < 1e-5
    assert row["peak_bytes"]["ours"] > 4 * 64 * 8 * 64 // 4  # at least this rank's out
    assert set(row["milliseconds"]) == {"ours", "one process"}
    assert len(cells(row)) == len(COLUMNS)
    assert "in 1 of 1 cases" in answer([{**row, "kv_heads": 8}])
