"""The Kullback-Leibler divergence from a reference: estimates of it, and what controls its weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

MOST_ERROR = 0.2  # what the relative error of a step is clipped to
Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Token by token an estimate of KL(policy || reference), of tokens that the policy has sampled.

    k1 = log(p / ref) is unbiased and of any sign; k2 = k1^2 / 2 is biased, and its gradient is the KL's; k3 = ref / p
    - 1 - log(ref / p) is unbiased and never negative (Schulman, "Approximating KL Divergence", 2020).
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # expm1: for policies that are close, exp - 1 would have no digit left.
    return (-log_ratio).expm1() + log_ratio


@dataclass(frozen=True)
class KLControl:
    """The weight of the KL penalty, which with a target follows the divergence that is seen.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2.

    Attributes:
        coefficient: the weight now.
        target: KL of a whole response, in nats; 0: the weight is fixed.
        horizon: samples over which a relative error of 1 would double the weight, were it not clipped to 0.2. It must
            be above a fifth of a step's samples: with fewer, the paper's formula can make a weight of 0, for good, or
            a negative one, which `updated` refuses and `horizon_violation` foretells.
    """

    coefficient: float
    target: float = 0.0
    horizon: int = 10_000

    def updated(self, kl: float, samples: int) -> KLControl:
        """After a step of `samples` responses with a mean divergence of `kl`."""
        if not self.target:
            return self
        if violation := horizon_violation(self.horizon, samples):
            raise ValueError(violation)
        error = min(max(kl / self.target - 1, -MOST_ERROR), MOST_ERROR)
        return replace(self, coefficient=self.coefficient * (1 + error * samples / self.horizon))


def horizon_violation(horizon: int, samples: int) -> str:
    """Why a weight cannot follow its target in steps of so many samples; "" if it can."""
    if horizon > MOST_ERROR * samples:
        return ""
    return (
        f"kl_horizon={horizon} must be above {MOST_ERROR:g} times the {samples} samples of a step, or the weight of "
        f"the KL penalty could fall to 0 or below in one step"
    )
