"""Accumulation of partial attention outputs and gradients over blocks of keys, in fp32 (fp64 for fp64 inputs).

T tokens, N heads, H head dim, V head dim of the values.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of `dtype` inputs are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`, without torch's dispatcher where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens of a (T, ...) buffer that a kernel launch works on, as `count` runs of `length` tokens.

    Run i starts at start + i * stride, unless `index` (count, length) lists the tokens. `valid` are the flat positions
    in `index` that are not padding; padding repeats a token, and its results are dropped.
    """

    length: int
    start: int = 0
    count: int = 1
    stride: int = 0
    index: Tensor | None = None
    valid: Tensor | None = None

    @staticmethod
    def of(start: int, stop: int) -> Rows:
        """Make a single run."""
        return Rows(stop - start, start)

    @cached_property
    def key(self) -> object:
        """The same for equal runs."""
        return (self.start, self.length, self.count, self.stride) if self.index is None else self.index

    def take(self, x: Tensor) -> Tensor:
        """Select these tokens: (T, ...) -> (count, length, ...), as a view unless `index` is given."""
        if self.index is not None:
            return x[self.index]
        if self.count == 1:  # size(0), for a tensor's len is a Python function
            return (x if self.length == x.size(0) else x.narrow(0, self.start, self.length)).unsqueeze(0)
        first = x.storage_offset() + self.start * x.stride(0)
        size, strides = (self.count, self.length, *x.shape[1:]), (self.stride * x.stride(0), *x.stride())
        return x.as_strided(size, strides, first)

    def covers(self, tokens: int) -> bool:
        """Return True if the runs are all `tokens` tokens of a buffer, in order."""
        joined = self.count == 1 or self.stride == self.length
        return self.index is None and self.start == 0 and joined and self.count * self.length == tokens

    def unpadded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens in `index` without padding, and their values from (count, length, ...) results."""
        assert self.index is not None
        tokens, x = self.index.flatten(), x.flatten(0, 1)
        return (tokens, x) if self.valid is None else (tokens[self.valid], x[self.valid])


class AttentionSum:
    """Running softmax-weighted average `out` (T, N, V) and log-sum-exp `lse` (T, N) over all blocks so far.

    Rows without any key have out = 0 and lse = -inf.
    """

    def __init__(self, q_TNH: Tensor, v_head_dim: int) -> None:
        self._shape, self._device = (*q_TNH.shape[:2], v_head_dim), q_TNH.device
        self._dtype = accumulate_dtype(q_TNH.dtype)
        self._totals: tuple[Tensor, Tensor] | None = None

    def merge(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Add a launch's out (count, length, N, V) and lse (count, N, length), in which no row occurs twice.

        The tensors may be kept and modified in place later.
        """
        lse = converted(lse.transpose(1, 2), self._dtype)
        if self._totals is None and rows.covers(self._shape[0]):
            # A view of wider rows would keep their padding in memory.
            self._totals = out.flatten(0, 1).contiguous(), lse.flatten(0, 1)
            return
        total_out, total_lse = self._totals = self._sums()
        if rows.index is None:
            merge(rows.take(total_out), rows.take(total_lse), out, lse)
            return
        out = out.to(self._dtype)
        (tokens, out), (_, lse) = rows.unpadded(out), rows.unpadded(lse)
        merged_out, merged_lse = total_out[tokens], total_lse[tokens]
        merge(merged_out, merged_lse, out, lse)
        total_out[tokens], total_lse[tokens] = merged_out, merged_lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Return out (T, N, V), in the kernel's dtype if one launch computed all of it, and lse (T, N)."""
        return self._sums() if self._totals is None else self._totals

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Return out and lse in the accumulation dtype."""
        if self._totals is not None:
            out, lse = self._totals
            return (out, lse) if out.dtype == self._dtype else (out.to(self._dtype), lse)
        out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return out, torch.full(self._shape[:2], float("-inf"), dtype=self._dtype, device=self._device)


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge out (n, T, N, V) and lse (n, T, N) with those of another part, in place."""
    real = type(out) is Tensor and out.is_cuda and out.dtype == torch.float32 and more_out.stride(-1) == 1
    if real and out.dim() == 4 and (fused := _fused()) is not None:
        fused.merge(out, lse, more_out, more_lse)
        return
    # The sigmoid of the difference is the new part's weight, and is exact when one side is -inf. When both are, the
    # difference is nan, and any weight of two zero outputs will do.
    weight = (more_lse - lse).nan_to_num_(nan=0.0).sigmoid_().unsqueeze(-1)
    torch.logaddexp(lse, more_lse, out=lse)
    out.lerp_(more_out.to(out.dtype), weight)


@cache
def _fused() -> ModuleType | None:
    return importlib.import_module("usp.attention.fused") if importlib.util.find_spec("triton") else None


class GradientSum:
    """Running sum of a gradient (T, heads, H) like `x`; in memory of its own, or in `total` of the accumulation dtype,
    whose values are not read."""

    def __init__(self, x: Tensor, total: Tensor | None = None) -> None:
        self._tokens, self._dtype = (x if total is None else total).size(0), accumulate_dtype(x.dtype)
        self._like, self._given = x, total
        self._total: Tensor | None = None

    def add(self, rows: Rows, part: Tensor) -> None:
        """Add a launch's (count, length, heads, H) tensor, which may be kept and modified in place later."""
        if self._total is None and rows.covers(self._tokens):
            part = part.flatten(0, 1)
            self._total = part if self._given is None else self._given.copy_(part)
        elif rows.index is None:
            rows.take(self.total).add_(part)
        else:
            tokens, part = rows.unpadded(part)
            self.total.index_add_(0, tokens, part.to(self._dtype))

    @property
    def total(self) -> Tensor:
        """Sum so far (T, heads, H) in the accumulation dtype; callers may add to it in place."""
        if self._total is None:
            if self._given is None:
                self._total = self._like.new_zeros(self._like.shape, dtype=self._dtype)
            else:
                self._total = self._given.zero_()
        elif self._total.dtype != self._dtype:
            self._total = self._total.to(self._dtype)
        return self._total

    def result(self, dtype: torch.dtype) -> Tensor:
        """Return the sum in `dtype`: without a conversion what a single launch computed in it."""
        return converted(self.total if self._total is None else self._total, dtype)
