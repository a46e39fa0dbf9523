"""Table 2 as printed in arXiv 2405.07719, against the costs computed from its collectives."""

from __future__ import annotations

from fractions import Fraction

import pytest

from benchmarks.cost_tables import (
    DOCUMENT,
    EXPERTS,
    PIPELINE,
    TABLE_2,
    Row,
    document,
    expression,
    grouped_rows,
    markdown,
)
from usp.planning.methods import PAPER, unified_cost

# method: parameters' collectives and cost in O(d^2), activations' and cost in O(bs L d), split, P and G, OS, Act
PRINTED = {
    "SP-Ulysses": ("allreduce", 12, "8*all2all", "8/N", "hc/L", "P+G", "6P", "A/N"),
    "SP-Ring": ("allreduce", 12, "P2P", "4", "L/L", "P+G", "6P", "A/N"),
    "DP": ("allreduce", 12, "", "0", "bs/bs", "P+G", "6P", "A/N"),
    "ZeRO1": ("allgather+reducescatter", 12, "", "0", "hc/L", "P+G", "6P/N", "A/N"),
    "SP-Unified+ZeRO1": ("allgather+reducescatter", 12, "P2P+8*all2all", "≤4", "hc/L", "P+G", "6P/N", "A/N"),
    "SP-Unified+ZeRO2": ("allgather+reducescatter", 12, "P2P+8*all2all", "≤4", "hc/L", "P+G/N", "6P/N", "A/N"),
    "SP-Unified+ZeRO3": ("2*allgather+reducescatter", 18, "P2P+8*all2all", "≤4", "hc/L", "(P+G)/N", "6P/N", "A/N"),
    "TP": ("", 0, "4*allreduce", "8", "hc/d", "(P+G)/N", "6P/N", "αA"),
    "TP-sp": ("", 0, "6*allgather+4*reducescatter", "10", "hc/d", "(P+G)/N", "6P/N", "A/N"),
}


def test_the_table_has_the_printed_rows() -> None:
    assert [row.method for row in TABLE_2] == list(PRINTED)


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: row.method)
def test_a_row_is_as_printed(row: Row) -> None:
    parameters, cost, activations, activation_cost, split, *states = PRINTED[row.method]
    assert "+".join(map(str, row.parameters)) == parameters
    assert row.printed_parameter_cost() == cost
    assert row.parameter_cost() == 2 * cost  # what the paper's own factors give
    assert "+".join(map(str, row.activations)) == activations
    assert expression(row) == activation_cost
    assert row.split == split
    assert list(PAPER[row.key][2]) == states


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_the_unified_bound_is_the_cost_of_a_pure_ring(ranks: int) -> None:
    costs = {u: unified_cost(u, ranks // u) for u in range(1, ranks + 1) if ranks % u == 0}
    assert max(costs.values()) == costs[1] == 4
    assert costs[ranks] == Fraction(8, ranks)


def test_grouped_queries_shrink_keys_and_values() -> None:
    ulysses, ring = grouped_rows(4)
    assert ulysses.activation_cost(8) == Fraction(4, 8) + Fraction(4, 8 * 4)
    assert ring.activation_cost(8) == 1
    assert (unified_cost(8, 1, 4), unified_cost(1, 8, 4)) == (ulysses.activation_cost(8), ring.activation_cost(8))


def test_rows_that_the_table_lacks() -> None:
    assert EXPERTS.activation_cost(8) == 1
    assert EXPERTS.printed_parameter_cost() == 4
    assert PIPELINE.activation_cost(8) == 2
    assert "| PP | 0 | 0 | 0 | P2P | 2 O(bs L d) |" in markdown((PIPELINE,))


@pytest.mark.parametrize("row", [*TABLE_2, EXPERTS, PIPELINE], ids=lambda row: row.method)
def test_the_planner_has_the_costs_of_the_table(row: Row) -> None:
    parameters, activations, _ = PAPER[row.key]
    assert parameters == row.parameter_cost()
    if not row.bound:
        assert activations * (2 if row.key == "ep" else 1) == row.activation_cost(1)


@pytest.mark.slow
def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run `python -m benchmarks.cost_tables`"
