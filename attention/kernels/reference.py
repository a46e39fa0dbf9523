"""Reference attention by einsum in the accumulation dtype, for any device, mask and score function.

n runs, A queries, B keys, K KV heads, G query heads per KV head, H head dim, V head dim of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from usp.attention.accumulate import accumulate_dtype
from usp.attention.bands import Task, Tasks
from usp.attention.spec import AttentionSpec

from .base import Device, Kernel, KernelLaunch
from .dense import DenseLaunch, DenseLowering

TILE = 1024  # rows and columns of scores held at once


class ReferenceKernel(Kernel):
    name = "reference"

    def refuses_call(
        self, spec: AttentionSpec, device: Device, dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> str | None:
        return None if dtype.is_floating_point else f"dtype={dtype} is not a floating-point type"

    def lower(self, tasks: Sequence[Task], device: torch.device, dtype: torch.dtype) -> tuple[KernelLaunch, ...]:
        tiles = [
            tile
            for task in tasks
            for row in range(task.q_start, task.q_stop, TILE)
            for column in range(task.k_start, task.k_stop, TILE)
            if (tile := task.cut((row, row + TILE), (column, column + TILE))) is not None
        ]
        return DenseLowering(device, accumulate_dtype(dtype)).lower(Tasks(Tasks.of(tiles).rows, Tasks.of(tasks).tiles))

    def forward(self, q_nANH, k_nBKH, v_nBKV, launch, spec):
        scores, _ = _scores(q_nANH, k_nBKH, launch, spec)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
        out = torch.einsum("nkgab,nbkv->nakgv", weights, v_nBKV.to(weights.dtype))
        return out.flatten(2, 3).to(q_nANH.dtype), lse.flatten(1, 2)

    def backward(self, dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV, lse_nNA, launch, spec):
        scores, slope = _scores(q_nANH, k_nBKH, launch, spec)
        q, dout, out = (_grouped(x, k_nBKH.shape[2]).to(scores.dtype) for x in (q_nANH, dout_nANV, out_nANV))
        k, v = k_nBKH.to(scores.dtype), v_nBKV.to(scores.dtype)
        lse = lse_nNA.unflatten(1, q.shape[2:4])
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
        dv = torch.einsum("nkgab,nakgv->nbkv", weights, dout)
        dweights = torch.einsum("nakgv,nbkv->nkgab", dout, v)
        delta = (dout * out).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
        dscores = weights * (dweights - delta) * slope * spec.score_scale(q.shape[-1])
        dq = torch.einsum("nkgab,nbkh->nakgh", dscores, k).flatten(2, 3)
        dk = torch.einsum("nkgab,nakgh->nbkh", dscores, q)
        return dq, dk, dv


def _grouped(x_nANH: Tensor, kv_heads: int) -> Tensor:
    return x_nANH.unflatten(2, (kv_heads, -1))


def _scores(q_nANH: Tensor, k_nBKH: Tensor, launch: KernelLaunch, spec: AttentionSpec) -> tuple[Tensor, Tensor | float]:
    """Return the masked scores (n, K, G, A, B) and the derivative of the softcap at each."""
    assert isinstance(launch, DenseLaunch)
    dtype = accumulate_dtype(q_nANH.dtype)
    q = _grouped(q_nANH, k_nBKH.shape[2]).to(dtype)
    scores = torch.einsum("nakgh,nbkh->nkgab", q, k_nBKH.to(dtype)) * spec.score_scale(q.shape[-1])
    slope: Tensor | float = 1.0
    if spec.softcap is not None:
        capped = torch.tanh(scores / spec.softcap)
        scores, slope = spec.softcap * capped, 1 - capped**2
    if launch.causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    if (mask := launch.bias(dtype)) is not None:
        # (A, B) is shared by all runs; (n, N or 1, A, B) needs another dimension for the groups
        scores = scores + (mask if mask.dim() == 2 else mask.unflatten(1, (min(mask.shape[1], scores.shape[1]), -1)))
    return scores, slope
