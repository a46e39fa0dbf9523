"""The learning-rate schedule: linear warm-up, then a cosine."""

from __future__ import annotations

import math
from typing import Protocol

FINAL = 0.1  # of the peak


class Schedule(Protocol):
    """The fields of a configuration that a learning rate depends on."""

    @property
    def learning_rate(self) -> float: ...

    @property
    def warmup_steps(self) -> int: ...

    @property
    def steps(self) -> int: ...


def learning_rate(step: int, config: Schedule) -> float:
    """Return the rate of step 1, 2, ...: linear to the peak over warmup_steps, then a cosine to a tenth of it."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (FINAL + (1 - FINAL) * cosine)
