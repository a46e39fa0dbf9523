"""Response tokens as padded rows; means, variances and whitening over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from usp.rlhf.graph import Reduce


@dataclass(frozen=True, eq=False)
class Responses:
    """Conversion between per-token values of samples and rows. masks: one per sample, (tokens,)."""

    masks: Sequence[Tensor]

    @cached_property
    def lengths_N(self) -> Tensor:
        """Number of response tokens per sample, int64."""
        return torch.tensor([int(mask.count_nonzero()) for mask in self.masks], dtype=torch.int64)

    @cached_property
    def inside_NR(self) -> Tensor:
        """Bool mask of the row entries that hold a token."""
        longest = int(self.lengths_N.max()) if len(self.masks) else 0
        return torch.arange(longest) < self.lengths_N[:, None]

    def rows(self, values: Sequence[Tensor]) -> Tensor:
        """Gather per-token values into (N, R) float64 rows, padded with 0."""
        if not self.masks:
            return torch.zeros(0, 0, dtype=torch.float64)
        chosen = [value[mask != 0].double() for value, mask in zip(values, self.masks, strict=True)]
        return pad_sequence(chosen, batch_first=True)

    def per_token(self, rows_NR: Tensor) -> list[Tensor]:
        """Scatter rows back to float32 per-token values, 0 outside the mask."""
        values = []
        for row_R, mask in zip(rows_NR, self.masks, strict=True):
            value = torch.zeros(mask.shape, dtype=torch.float32)
            chosen = mask != 0
            value[chosen] = row_R[: int(chosen.count_nonzero())].float()
            values.append(value)
        return values


def discounted_sums(x_NR: Tensor, factor: float | Tensor) -> Tensor:
    """Return y[t] = x[t] + factor[t] * y[t + 1] in log2(R) steps (Hillis and Steele, "Data parallel algorithms", 1986).

    factor: for all entries, or (N, R) of each.
    """
    reach = 1
    while reach < x_NR.shape[1]:
        x_NR = x_NR + factor * pad(x_NR[:, reach:], (0, reach))
        factor = factor * (pad(factor[:, reach:], (0, reach)) if isinstance(factor, Tensor) else factor)
        reach = 2 * reach
    return x_NR


def scalars(values: Sequence[Tensor]) -> Tensor:
    """Stack one number per sample into (N,) float64; N may be 0."""
    return torch.stack([value.double() for value in values]) if len(values) else torch.zeros(0, dtype=torch.float64)


def per_sample(x_N: Tensor) -> list[Tensor]:
    """Split (N,) into one 0-dim float32 per sample."""
    return list(x_N.float().unbind())


SUMS = ("weight", "total", "total_square")  # state of `RunningMoments`
EPSILON = 1e-5  # added to a standard deviation: equal values that differ by rounding must not become large


@dataclass(frozen=True)
class Moments:
    """Count, mean and (biased) variance over all ranks; all 0 without numbers."""

    count: float
    mean: float
    variance: float


def moments(x: Tensor, reduce: Reduce) -> Moments:
    """Return the moments of the float64 numbers of all ranks; a rank may have none. Two all-reduces."""
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
