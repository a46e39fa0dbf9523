"""The benchmark of expert messages averages over ranks, and says whether losses are equal."""

from __future__ import annotations

from benchmarks.experts import CHUNKS, answer, cells, rows_of


def of_rank(exposed: float, loss: float = 1.5) -> dict[int, dict[str, list[float]]]:
    figures = {"seconds": [2.0, 4.0, 3.0], "loss": [loss, 1.25], "norm": [0.5, 0.25]}
    return {chunks: {**figures, "exposed": [exposed / chunks] * 3} for chunks in CHUNKS}


def test_figures_are_medians_of_means_over_ranks() -> None:
    rows = rows_of([of_rank(0.2), of_rank(0.6)])
    assert cells(rows[2], rows) == ("4", "3000", "100", "0.25", "1.250000", "0.25000")
    assert answer(rows) == (
        "Of the time in which ranks wait for them with one chunk, 0.50 with 2, 0.25 with 4 chunks. "
        "Losses and norms are equal in every bit."
    )
    rows[1]["loss"] = [1.5, 1.2500001]
    assert answer(rows).endswith("NOT EQUAL.")
