"""The benchmark of the host's time runs, and its counts of launches stay where they are."""

from __future__ import annotations

from benchmarks.host_time import CASES, measure, measure_decoding

MOST = {  # operators besides attention kernels, in a forward, and in a forward and backward
    "ring 1": (0, 0),
    "ring 2": (10, 23),
    "ring 8": (46, 86),
    "ulysses 8": (2, 7),
}


def test_launches_of_a_call() -> None:
    for case in CASES:
        ours = measure(case, rounds=1, repeats=1)["systems"]["ours"]["launches"]
        forward, both = MOST[case.name]
        assert ours["forward"] <= forward and ours["both"] <= both, case


def test_launches_of_a_decode_step() -> None:
    """The cache takes two, attention one; merging over ranks eight."""
    found = [measure_decoding(ranks, rounds=1, repeats=1)["systems"]["ours"]["launches"] for ranks in (1, 2)]
    assert [each["forward"] for each in found] == [3, 11]
