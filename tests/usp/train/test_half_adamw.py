"""AdamW with moments in bfloat16: torch's update between roundings, on every layout, in half the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.ranks import RankPool
from tests.usp.train.test_resume import RUN, SAVED_ON, metrics_of, run
from usp import optimizers
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.optimizers import AdamW, HalfAdamW
from usp.predict.memory import footprint
from usp.predict.meter import OPTIMIZER
from usp.train.checkpoints import CHECKPOINTS
from usp.train.dry_run import dry_run
from usp.train.resolve import job_of
from usp.train.validate import violations

HALF = replace(RUN, optimizer="adamw-bf16")


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (9,), (), (4, 3), (0, 2))]


def trained(rule: AdamW, rounded: bool) -> list[Tensor]:
    """Return the weights after a few steps, in which one has no gradient. rounded: round the moments after each."""
    found = weights()
    optimizer = rule.over(found)
    for step in range(5):
        for number, weight in enumerate(found):
            gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + number))
            weight.grad = gradient if number != step else None
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        optimizer.step()
        for state in optimizer.state.values() if rounded else ():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
    return [weight.detach() for weight in found]


@pytest.mark.parametrize("at_once", [2**22, 10, 1])
def test_steps_are_torchs_with_moments_that_are_rounded(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_AT_ONCE", at_once)
    found = trained(HalfAdamW(0.1), rounded=False)
    wanted, exact = (trained(AdamW(0.1), rounded=rounded) for rounded in (True, False))
    assert all(map(torch.equal, found, wanted))
    errors = [(a - b).norm() / (b - c).norm() for a, b, c in zip(found, exact, weights(), strict=True) if a.numel()]
    assert min(errors) > 0 and max(errors) < 5e-3


@pytest.mark.exhaustive  # of other states: tests/usp/train/test_resume.py
def test_a_run_goes_on_on_another_layout(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(run, 4, replace(HALF, **SAVED_ON, output=str(tmp_path / "whole")))
    again: list[tuple[int, dict[str, Any]]] = [
        (4, SAVED_ON),
        (4, {"tp": 2, "pp": 2, "batch_size": 4, "micro_batches": 2}),
        (1, {"batch_size": 4, "optim_offload": True}),
    ]
    wanted = metrics_of(tmp_path / "whole")[2:]
    for number, (size, layout) in enumerate(again):
        resume, output = tmp_path / "whole" / CHECKPOINTS / "step-00000002", tmp_path / str(number)
        ranks.run(run, size, replace(HALF, **layout, output=str(output), resume=str(resume)))
        assert (metrics_of(output) / wanted - 1).abs().max() <= (1e-4 if number else 0), layout


@pytest.mark.slow
def test_predictions_and_the_dry_run_know_half_the_memory() -> None:
    config = TrainConfig(seq_len=256, device="cpu", optimizer="adamw-bf16")
    run = dry_run(config, 2)
    memory = footprint(job_of(config, load_model_config("tiny"), 2), 0)
    assert memory.optimizer == memory.gradients  # 2 + 2 and 4 bytes of each parameter
    assert run.by_category[OPTIMIZER] == pytest.approx(memory.optimizer, rel=1e-2)
    assert run.peak_bytes == pytest.approx(memory.peak.total, rel=0.05)


def test_changes_that_bfloat16_rounds_away_are_refused() -> None:
    config = TrainConfig(optimizer="adamw-bf16", adam_beta2=0.999)
    assert violations(config, 1, None) == [
        "--adam-beta2 = 0.999 must be at most 0.99 with --optimizer adamw-bf16, because bfloat16 rounds smaller "
        "changes of a moment away: lower it, or use adamw"
    ]
    assert not violations(replace(config, adam_beta2=0.99), 1, None)
