"""Means and variances over all ranks of a call and, where they are kept, over steps.

In float64, so that the order in which ranks are summed is not seen in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from usp.rlhf.graph.calls import Reduce

SUMS = ("weight", "total", "total_square")  # what `RunningMoments` remembers
EPSILON = 1e-5  # beside a standard deviation: equal values that differ by rounding must not become large


@dataclass(frozen=True)
class Moments:
    """Of all numbers on all ranks: how many, their mean, and their variance (divided by `count`); 0 without any."""

    count: float
    mean: float
    variance: float


def moments(x: Tensor, reduce: Reduce) -> Moments:
    """Of the float64 numbers that each rank gives, maybe none. Two sums over ranks: deviations are from the mean."""
    count, total = reduce(torch.stack((x.new_tensor(x.numel()), x.sum()))).tolist()
    mean = total / max(count, 1)
    deviations = reduce((x - mean).square().sum()).item()
    return Moments(count, mean, deviations / max(count, 1))


def whitened(x: Tensor, over: Moments) -> Tensor:
    """x with mean 0 and standard deviation 1."""
    return (x - over.mean) / (over.variance**0.5 + EPSILON)


@dataclass(frozen=True)
class RunningMoments:
    """Mean and standard deviation of all batches so far: what a critic learns is normalised by them.

    "exp": a batch counts beta times as much as the next one (PopArt's statistics, van Hasselt et al., arXiv
    1602.07714, without the bias towards the start). "mean": every number counts alike. "none": mean 0 and
    standard deviation 1, which hold for the others too until there is a batch.

    Attributes:
        beta: of "exp".
        epsilon: the smallest variance.
        weight, total, total_square: sums over batches, of 1, x and x^2, each times what it counts.
    """

    kind: Literal["exp", "mean", "none"]
    beta: float = 0.99995
    epsilon: float = 1e-5
    weight: float = 0.0
    total: float = 0.0
    total_square: float = 0.0

    def updated(self, batch: Moments) -> RunningMoments:
        """With one batch more."""
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
        """What the critic should say of x."""
        return (x - self.mean) / self.std

    def denormalise(self, x: Tensor) -> Tensor:
        """What the critic means by x."""
        return x * self.std + self.mean
