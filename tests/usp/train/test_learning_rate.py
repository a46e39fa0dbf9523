"""Schedules of the learning rate against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from usp.config import LR_SCHEDULES, CommonConfig, TrainConfig
from usp.rlhf.config import RlhfConfig
from usp.rlhf.config import violations as rlhf_violations
from usp.train.step import LearningRate
from usp.train.validate import violations as train_violations

STEPS, WARMUP, DECAY = 20, 4, 6
THEIRS = {
    "cosine": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "linear": ("linear", {}),
    "constant": ("constant_with_warmup", {}),
    "wsd": ("warmup_stable_decay", {"num_decay_steps": DECAY, "decay_type": "linear"}),
}


@pytest.mark.parametrize("kind", LR_SCHEDULES)
def test_rates_are_those_of_transformers(kind: str) -> None:
    schedule = LearningRate(kind, STEPS, WARMUP, DECAY, final=0.1 if kind == "cosine" else 0.0)
    name, options = THEIRS[kind]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(name, optimizer, WARMUP, STEPS, scheduler_specific_kwargs=options)
    for step in range(1, STEPS + 1):
        optimizer.step()
        theirs.step()
        assert schedule.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"lr_schedule": "wds"}, "--lr-schedule = 'wds' must be one of cosine, linear, constant, wsd"),
        ({"lr_schedule": "constant", "lr_final": 0.0}, "--lr-final = 0.0 ends a decay, and --lr-schedule is constant"),
        ({"lr_decay_steps": 5}, "--lr-decay-steps = 5 is an option of --lr-schedule wsd"),
        ({"lr_schedule": "wsd", "lr_decay_steps": 101}, "--lr-decay-steps = 101 must be at most --steps = 100"),
        ({"lr_final": 1.5}, "--lr-final = 1.5 must be from 0 to 1"),
    ],
)
def test_options_without_effect_are_refused(flags: dict[str, Any], text: str) -> None:
    for found in (train_violations(TrainConfig(**flags), 1, None), rlhf_violations(RlhfConfig(**flags, steps=100), {})):
        assert any(text in message for message in found)


def test_the_ends_of_a_schedule() -> None:
    for kind in LR_SCHEDULES:
        rates = [LearningRate(kind, STEPS, WARMUP, DECAY, final=0.25).at(step) for step in range(1, STEPS + 1)]
        assert rates[:WARMUP] == [0.25, 0.5, 0.75, 1.0] and rates[-1] == (1.0 if kind == "constant" else 0.25)
        assert rates[STEPS - DECAY - 1] == 1.0 or kind in ("cosine", "linear")
    assert LearningRate("cosine", STEPS, 0, 0, final=0.1).at(1) < 1.0
    assert LearningRate.of(CommonConfig(lr_schedule="wsd"), 25, 5).decay_steps == 3
    assert "constant until a linear decay to 10% in the last 3 steps" in str(LearningRate("wsd", 25, 5, 3, 0.1))
    assert str(LearningRate("cosine", 4, 10, 0, 0.1)) == "40% of it in the last of 4 steps, fewer than 10 of warmup"
    assert "after 4 warmup steps" in str(LearningRate("cosine", 4, 4, 0, 0.1))
