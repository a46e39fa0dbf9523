"""The benchmark of reading large files, run once on small ones, and its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.data import BOUND, COLUMNS, FILES, cells, notes, run
from usp.data.tokenizer import BYTES


@pytest.mark.slow
def test_ranks_measure_what_they_read(tmp_path: Path) -> None:
    rows = list(run(tmp_path, 200_000, tokenizers=[BYTES]))
    assert [row["file"] for row in rows] == list(FILES)
    assert [row["ranks"][0]["documents"] for row in rows] == [1, 1, 100, 2000]
    for row in rows:
        assert len(row["ranks"]) == 4 and all(rank["tokens"] >= 200_000 for rank in row["ranks"])
        assert len(cells(row)) == len(COLUMNS)
    assert not list(tmp_path.glob("*.txt")) and not list(tmp_path.glob("*.parquet"))


def test_a_rank_that_grows_too_much_is_reported() -> None:
    def row(mebibytes: int) -> dict[str, Any]:
        return {"bytes": 10**6, "ranks": [{"peak": 2**20}, {"peak": mebibytes * 2**20}]}

    assert f"is {BOUND - 1} MiB, less than" in notes([row(3), row(BOUND - 1)])[-1]
    assert f"is {BOUND} MiB, MORE than" in notes([row(3), row(BOUND)])[-1]
