"""The benchmark of reading large files, run once on small ones, and its verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data import FILES, answer, memory
from usp.data.tokenizer import BYTES


@pytest.mark.slow
def test_ranks_measure_what_they_read(tmp_path: Path) -> None:
    rows = list(memory(tmp_path, 200_000, tokenizers=[BYTES]))
    assert [name.split(f", {BYTES}:")[0] for name, _ in rows] == list(FILES)
    assert all(float(peak) >= 0 for _, cell in rows for peak in cell.split(", "))
    assert not list(tmp_path.glob("file.*"))


def test_the_largest_rank_is_reported() -> None:
    rows = [("tokenize / tokenizers alone", "1.10"), ("waiting for data, % of a step", "0.20")]
    rows += [
        (f"{kind}: MiB of the rank that tokenizes, of others", cell) for kind, cell in (("a", "3, 9"), ("b", "7, 2"))
    ]
    assert answer(rows).endswith("takes at most 7 MiB on a rank.")
