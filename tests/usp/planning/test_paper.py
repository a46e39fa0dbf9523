"""The planner's costs of methods against Table 2 as printed in arXiv 2405.07719, and docs/cost.md, which has both."""

from __future__ import annotations

from fractions import Fraction

import pytest

from benchmarks.cost_tables import DOCUMENT, document
from usp.planning.methods import PAPER, unified_cost

# method: cost of parameters in O(d^2), of activations in O(bs L d) without 1/N (usp: `unified_cost`), P and G, OS, Act
PRINTED = {
    "ulysses": (12, 8, "P+G", "6P", "A/N"),
    "ring": (12, 4, "P+G", "6P", "A/N"),
    "dp": (12, 0, "P+G", "6P", "A/N"),
    "zero1": (12, 0, "P+G", "6P/N", "A/N"),
    "usp+zero1": (12, 0, "P+G", "6P/N", "A/N"),
    "usp+zero2": (12, 0, "P+G/N", "6P/N", "A/N"),
    "usp+zero3": (18, 0, "(P+G)/N", "6P/N", "A/N"),
    "tp": (0, 8, "(P+G)/N", "6P/N", "αA"),
    "tp-sp": (0, 10, "(P+G)/N", "6P/N", "A/N"),
    # which the table lacks: gradients of attention's 4 d^2 alone; a boundary of stages
    "ep": (4, 4, "P+G, experts' /N", "6P, experts' /N", "A/N"),
    "pp": (0, 2, "(P+G)/N", "6P/N", "A/M"),
}


@pytest.mark.parametrize("method", PAPER)
def test_the_planner_has_the_costs_of_the_table(method: str) -> None:
    parameters, activations, *states = PRINTED[method]
    assert PAPER[method][0] == 2 * parameters  # what the paper's own factors give
    assert PAPER[method][1] == activations
    assert list(PAPER[method][2]) == states


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_the_unified_bound_is_the_cost_of_a_pure_ring(ranks: int) -> None:
    costs = {u: unified_cost(u, ranks // u) for u in range(1, ranks + 1) if ranks % u == 0}
    assert max(costs.values()) == costs[1] == 4
    assert costs[ranks] == Fraction(8, ranks)


def test_grouped_queries_shrink_keys_and_values() -> None:
    assert unified_cost(8, 1, 4) == Fraction(4, 8) + Fraction(4, 8 * 4) and unified_cost(1, 8, 4) == 1


@pytest.mark.slow
def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run `python -m benchmarks.cost_tables`"
