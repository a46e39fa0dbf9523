"""The benchmark of several GPUs runs on toy sizes on gloo ranks."""

from __future__ import annotations

import torch

from benchmarks import gpus
from benchmarks.harness.checks import Check
from tests.harness.ranks import RankPool


def checks() -> list[tuple[str, Check]]:
    return gpus.run(torch.device("cpu"), tiny=True, host_ranks=2)


def test_every_measurement_runs_on_toy_sizes(ranks: RankPool) -> None:
    (first, second) = ranks.run(checks, 2)
    assert [section for section, _ in first] == [section for section, _ in second]
    assert {section for section, _ in first} == {"parity", "steps", "exposed messages", "bandwidth", "reallocation"}
    assert not [str(check) for _, check in (*first, *second) if not check.right]
