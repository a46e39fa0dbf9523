"""The response tokens of samples as rows, so that what is computed along them is computed for all samples at once.

N samples, R the most tokens that count in one of them. Row n has the entries of sample n whose mask is not 0, from the
left: what stands elsewhere in a sample, even nan, is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, eq=False)
class Responses:
    """Attributes:
    masks: of each sample, (tokens,).
    """

    masks: Sequence[Tensor]

    @cached_property
    def lengths_N(self) -> Tensor:
        """How many tokens count, int64."""
        return torch.tensor([int(mask.count_nonzero()) for mask in self.masks], dtype=torch.int64)

    @cached_property
    def inside_NR(self) -> Tensor:
        """Which entries of a row are a token, bool."""
        longest = int(self.lengths_N.max()) if len(self.masks) else 0
        return torch.arange(longest) < self.lengths_N[:, None]

    def rows(self, values: Sequence[Tensor]) -> Tensor:
        """(N, R) float64 of per-token values; 0 behind a row's tokens."""
        if not self.masks:
            return torch.zeros(0, 0, dtype=torch.float64)
        chosen = [value[mask != 0].double() for value, mask in zip(values, self.masks, strict=True)]
        return pad_sequence(chosen, batch_first=True)

    def at_end(self, x_N: Tensor) -> Tensor:
        """(N, R) float64 with x at the last token of each row; a row without tokens loses it."""
        last_NR = torch.arange(self.inside_NR.shape[1]) == self.lengths_N[:, None] - 1
        return x_N.double()[:, None] * last_NR

    def per_token(self, rows_NR: Tensor) -> list[Tensor]:
        """The rows' tokens as float32 per-token values, 0 where the mask is."""
        values = []
        for row_R, mask in zip(rows_NR, self.masks, strict=True):
            value = torch.zeros(mask.shape, dtype=torch.float32)
            chosen = mask != 0
            value[chosen] = row_R[: int(chosen.count_nonzero())].float()
            values.append(value)
        return values


def scalars(values: Sequence[Tensor]) -> Tensor:
    """(N,) float64 of one number per sample, maybe of no sample."""
    return torch.stack([value.double() for value in values]) if len(values) else torch.zeros(0, dtype=torch.float64)


def per_sample(x_N: Tensor) -> list[Tensor]:
    """One 0-dim float32 for each sample."""
    return list(x_N.float().unbind())
