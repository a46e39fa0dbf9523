"""The reallocation benchmark, run once on a toy model, and its model of ReaL's broadcast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.realloc import (
    APART,
    CLUSTER_COLUMNS,
    COLUMNS,
    ON_TWO_HOSTS,
    OURS,
    RAW,
    Case,
    Layout,
    broadcast_bytes,
    cells,
    cluster_cells,
    cluster_notes,
    measure,
    notes,
    summarise,
)
from tests.harness.ranks import RankPool


@pytest.mark.slow
def test_a_case_moves_the_weights_and_makes_a_row(ranks: RankPool) -> None:
    case = Case(4, Layout(1, 4, 1, zero=True), Layout(1, 2, 2), hidden=48, bucket_bytes=100_000)
    row = summarise(case, ranks.run(measure, 4, case, 0, 2))
    assert row["bytes"] == row["minimum_bytes"] and row["rounds"] > 1
    assert set(row["milliseconds"]) == {OURS, RAW} and row["of_raw"] > 0
    assert len(cells(row)) == len(COLUMNS)
    assert "geometric mean" in notes([row])[1]


@pytest.mark.slow
def test_on_two_hosts_every_byte_crosses_once(ranks: RankPool) -> None:
    case = replace(ON_TWO_HOSTS[0], hidden=48, bucket_bytes=100_000)
    row = summarise(case, ranks.run(measure, 8, case, 0, 1))
    assert set(row["milliseconds"]) == {OURS, RAW, APART}
    assert row["tier_bytes"] == row["minimum_tier_bytes"] and row["bytes"] == row["minimum_bytes"]
    assert row["between_apart"] == 4 * row["tier_bytes"]["between"]
    assert len(cluster_cells(row)) == len(CLUSTER_COLUMNS) and "geometric mean" in cluster_notes([row])[-1]
    for case in ON_TWO_HOSTS:  # all that hold a matrix's part are on one host, so none is nearer
        plan = replace(case, hidden=48).plan()
        for boxes in (boxes for name, boxes in plan.src.boxes.items() if len(plan.src.parameters[name].shape) > 1):
            hosts_of: dict[object, set[int]] = {}
            for rank, box in boxes.items():
                hosts_of.setdefault(box, set()).add(plan.host(rank))
            assert all(len(hosts) == 1 for hosts in hosts_of.values()), (case.src, case.dst)


def test_the_broadcast_sends_bytes_that_ranks_already_hold() -> None:
    plan = Case(8, Layout(2, 2, 2), Layout(1, 8, 1), hidden=48).plan()
    model = sum(plan.dst.boxes[name][0].numel * kind.dtype.itemsize for name, kind in plan.dst.parameters.items())
    assert broadcast_bytes(plan) == 7 * model  # to all but the sender
    assert plan.minimum_bytes < 6.1 * model
    apart = Case(8, Layout(1, 2, 2), Layout(1, 2, 2, first=4), hidden=48).plan()
    assert broadcast_bytes(apart) == apart.minimum_bytes
