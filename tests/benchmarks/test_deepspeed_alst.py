"""The DeepSpeed baseline computes the same training step as a single process."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from benchmarks.baselines.deepspeed_alst import on_one_process, on_ranks
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="the package deepspeed is not installed: pip install -e '.[deepspeed]'"
)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.slow(but=1)
def test_two_steps_match_one_process(zero: int) -> None:
    found, wanted = run_ranks(on_ranks, 2, zero, 2), on_one_process(2)
    difference = torch.tensor(found, dtype=torch.float64) / torch.tensor(wanted, dtype=torch.float64) - 1
    assert (difference.abs() <= 1e-5).all()
