"""Sums of partial attention over blocks of keys, and of partial gradients, in fp32 (fp64 for fp64).

T tokens, N heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of `dtype` inputs are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens of a (T, ...) buffer that take part in a kernel launch, as a batch of n equally long runs.

    Either `run`, one slice (n = 1), or `index` of shape (n, length). Where `valid`, the flat places in `index` that
    are not padding, is given, the others repeat some token and their results are dropped.
    """

    run: slice | None = None
    index: Tensor | None = None
    valid: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """(T, ...) -> (n, length, ...)."""
        return x[self.run].unsqueeze(0) if self.index is None else x[self.index]

    def scatter(self, x: Tensor) -> tuple[slice | Tensor, Tensor]:
        """(n, length, ...) results -> where they belong in a (T, ...) buffer, and their values in that order."""
        if self.index is None:
            assert self.run is not None
            return self.run, x.squeeze(0)
        place, x = self.index.flatten(), x.flatten(0, 1)
        return (place, x) if self.valid is None else (place[self.valid], x[self.valid])


class AttentionSum:
    """Running softmax-weighted average `out` (T, N, H) with its log-sum-exp `lse` (T, N), both of all blocks so far.

    A row that has seen no key has out = 0 and lse = -inf.
    """

    def __init__(self, q_TNH: Tensor) -> None:
        self._shape, self._device = q_TNH.shape, q_TNH.device
        self._dtype = accumulate_dtype(q_TNH.dtype)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def merge(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Add a launch's out (n, length, N, H) and lse (n, N, length), no row twice."""
        place, lse = rows.scatter(lse.transpose(1, 2).to(self._dtype))
        _, out = rows.scatter(out)
        if self._out is None and isinstance(place, slice) and out.shape[0] == self._shape[0]:
            self._out, self._lse = out.to(self._dtype), lse.contiguous()
            return
        total_out, total_lse = self._totals()
        out_before, lse_before = total_out[place], total_lse[place]
        # sigmoid of the difference is the new part's weight. Its limits make it exact where one side is -inf;
        # where both are, nan becomes 1/2 of zeros.
        weight = torch.sigmoid(torch.nan_to_num(lse - lse_before, nan=0.0)).unsqueeze(-1)
        total_lse[place] = torch.logaddexp(lse_before, lse)
        total_out[place] = out_before.lerp_(out.to(self._dtype), weight)

    def result(self) -> tuple[Tensor, Tensor]:
        """out (T, N, H) and lse (T, N) in the accumulating dtype."""
        return self._totals()

    def _totals(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            self._out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            self._lse = torch.full(self._shape[:2], float("-inf"), dtype=self._dtype, device=self._device)
        return self._out, self._lse


def add_rows(total: Tensor, rows: Rows, part: Tensor) -> None:
    """total (T, N, H) += part (n, length, N, H) at its rows, in place."""
    place, part = rows.scatter(part)
    if isinstance(place, slice):
        total[place] += part
    else:
        total.index_add_(0, place, part.to(total.dtype))
