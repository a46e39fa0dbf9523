"""Response tokens as padded rows, so that advantages are computed for all samples at once.

N samples, R response tokens in the longest. Row n holds the entries of sample n whose mask is not 0, left-aligned;
other entries of a sample are never read, so they may be nan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, eq=False)
class Responses:
    """Conversion between per-token values of samples and rows.

    Attributes:
        masks: one per sample, (tokens,).
    """

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

    def at_end(self, x_N: Tensor) -> Tensor:
        """Place x at the last token of each row, (N, R) float64; a row without tokens drops it."""
        last_NR = torch.arange(self.inside_NR.shape[1]) == self.lengths_N[:, None] - 1
        return x_N.double()[:, None] * last_NR

    def per_token(self, rows_NR: Tensor) -> list[Tensor]:
        """Scatter rows back to float32 per-token values, 0 outside the mask."""
        values = []
        for row_R, mask in zip(rows_NR, self.masks, strict=True):
            value = torch.zeros(mask.shape, dtype=torch.float32)
            chosen = mask != 0
            value[chosen] = row_R[: int(chosen.count_nonzero())].float()
            values.append(value)
        return values


def discounted_sums(x_NR: Tensor, factor: float) -> Tensor:
    """Return y[t] = x[t] + factor * y[t + 1] in log2(R) steps (Hillis and Steele, "Data parallel algorithms", 1986)."""
    reach = 1
    while reach < x_NR.shape[1]:
        x_NR = x_NR + factor * pad(x_NR[:, reach:], (0, reach))
        reach, factor = 2 * reach, factor * factor
    return x_NR


def scalars(values: Sequence[Tensor]) -> Tensor:
    """Stack one number per sample into (N,) float64; N may be 0."""
    return torch.stack([value.double() for value in values]) if len(values) else torch.zeros(0, dtype=torch.float64)


def per_sample(x_N: Tensor) -> list[Tensor]:
    """Split (N,) into one 0-dim float32 per sample."""
    return list(x_N.float().unbind())
