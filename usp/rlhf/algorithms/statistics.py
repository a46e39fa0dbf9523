"""Means and variances over all ranks of a call and, for `RunningMoments`, over steps.

In float64, so that the order of summation over ranks does not show in float32 results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from usp.rlhf.graph.calls import Reduce

SUMS = ("weight", "total", "total_square")  # state of `RunningMoments`
EPSILON = 1e-5  # added to a standard deviation: equal values that differ by rounding must not become large


@dataclass(frozen=True)
class Moments:
    """Count, mean and (biased) variance over all ranks; all 0 without numbers."""

    count: float
    mean: float
    variance: float


def moments(x: Tensor, reduce: Reduce) -> Moments:
    """Return the moments of the float64 numbers of all ranks, each of which may have none. Two all-reduces."""
    count, total = reduce(torch.stack((x.new_tensor(x.numel()), x.sum()))).tolist()
    mean = total / max(count, 1)
    deviations = reduce((x - mean).square().sum()).item()
    return Moments(count, mean, deviations / max(count, 1))


def whitened(x: Tensor, over: Moments) -> Tensor:
    """Normalize x to mean 0 and standard deviation 1."""
    return (x - over.mean) / (over.variance**0.5 + EPSILON)


@dataclass(frozen=True)
class RunningMoments:
    """Mean and standard deviation over all batches so far, which normalize the critic's targets.

    kind "exp": exponential moving average (PopArt, van Hasselt et al., arXiv 1602.07714) with bias correction. "mean":
    every number has equal weight. "none": mean 0 and standard deviation 1, which the others also start from.

    Attributes:
        beta: decay of "exp".
        epsilon: lower bound of the variance.
        weight, total, total_square: weighted sums over batches of 1, x and x^2.
    """

    kind: Literal["exp", "mean", "none"]
    beta: float = 0.99995
    epsilon: float = 1e-5
    weight: float = 0.0
    total: float = 0.0
    total_square: float = 0.0

    def updated(self, batch: Moments) -> RunningMoments:
        """Add a batch."""
        if self.kind == "none" or not batch.count:
            return self
        old, new = (self.beta, 1 - self.beta) if self.kind == "exp" else (1.0, batch.count)
        return replace(
            self,
            weight=old * self.weight + new,
            total=old * self.total + new * batch.mean,
            total_square=old * self.total_square + new * (batch.variance + batch.mean**2),
        )

    @property
    def _known(self) -> bool:
        return self.kind != "none" and self.weight > 0

    @property
    def mean(self) -> float:
        return self.total / self.weight if self._known else 0.0

    @property
    def std(self) -> float:
        if not self._known:
            return 1.0
        return max(self.total_square / self.weight - self.mean**2, self.epsilon) ** 0.5

    def normalise(self, x: Tensor) -> Tensor:
        """Convert returns to the critic's scale."""
        return (x - self.mean) / self.std

    def denormalise(self, x: Tensor) -> Tensor:
        """Convert the critic's values to returns."""
        return x * self.std + self.mean
