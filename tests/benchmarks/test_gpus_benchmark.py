"""The benchmark of several GPUs runs on toy sizes on gloo ranks."""

from __future__ import annotations

import torch

from benchmarks import gpus
from benchmarks.harness.checks import Check
from tests.harness.ranks import RankPool


def checks() -> list[Check]:
    return gpus.run(torch.device("cpu"), tiny=True)


def test_every_measurement_runs_on_toy_sizes(ranks: RankPool) -> None:
    first, second = ranks.run(checks, 2)
    assert len(first) == len(second) == 9
    assert all(check.right for check in (*first, *second))
