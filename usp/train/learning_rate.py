"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from usp.config import ScheduleConfig


@dataclass(frozen=True)
class LearningRate:
    """A linear warmup, then a decay that ends at the last step.

    Args:
        kind: cosine and linear decay from the end of the warmup on; constant does not; wsd (warmup, stable, decay:
            MiniCPM, arXiv 2404.06395, section 4) is constant, and decays linearly over the last `decay_steps`.
        steps: steps of the run, including `warmup_steps` and `decay_steps`.
        final: rate of the last step, as a fraction of the peak.
    """

    kind: str
    steps: int
    warmup_steps: int
    decay_steps: int
    final: float

    @classmethod
    def of(cls, config: ScheduleConfig, steps: int, warmup_steps: int) -> LearningRate:
        decay_steps = math.ceil(steps / 10) if config.lr_decay_steps < 0 else config.lr_decay_steps
        return cls(config.lr_schedule, steps, warmup_steps, decay_steps, config.lr_final)

    def at(self, step: int) -> float:
        """Return the rate of step 1, 2, ... as a fraction of the peak."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        begin = max(self.warmup_steps, self.steps - self.decay_steps) if self.kind == "wsd" else self.warmup_steps
        done = max(0, step - begin) / max(1, self.steps - begin)
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.final + (1 - self.final) * left

    def __str__(self) -> str:
        """Describe the schedule, as `after 10 warmup steps, cosine decay to 10%`."""
        after = f"after {self.warmup_steps} warmup steps"
        if self.kind == "constant":
            return f"{after}, constant"
        if self.kind == "wsd":
            return f"{after}, constant until a linear decay to {self.final:.0%} in the last {self.decay_steps} steps"
        return f"{after}, {self.kind} decay to {self.final:.0%}"
