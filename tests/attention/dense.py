"""Reference results: dense attention over the whole sequence in one process, from the definition of the mask."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def visible(
    batch: int,
    seq_len: int,
    *,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    prefix: Tensor | None = None,
    prefix_tree: Tensor | None = None,
) -> Tensor:
    """Return a bool mask (batch, query, key), pair by pair from positions and document numbers."""
    if prefix_tree is not None:
        assert cu_seqlens is not None
        prefix = torch.zeros_like(prefix_tree) if prefix is None else prefix
        cuts, parents, prefixes = (x.expand(batch, -1).tolist() for x in (cu_seqlens, prefix_tree, prefix))
        rows = [_in_tree(seq_len, cuts[i], parents[i], prefixes[i], window) for i in range(batch)]
        return torch.stack(rows) if rows else torch.zeros(0, seq_len, seq_len, dtype=torch.bool)
    position = torch.arange(seq_len)
    ahead = position.unsqueeze(0) - position.unsqueeze(1)  # key position - query position
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool)
    for reach, distance in zip(window or (-1, -1), (-ahead, ahead), strict=True):
        if reach >= 0:
            seen &= distance <= reach
    seen = seen.expand(batch, -1, -1).clone()
    if causal:
        past = (ahead <= 0).expand(batch, -1, -1).clone()
        starts = (
            torch.zeros(1, 1, dtype=torch.int64) if cu_seqlens is None else cu_seqlens.view(-1, cu_seqlens.shape[-1])
        )
        lengths = torch.zeros(1, 0) if prefix is None else prefix.view(-1, prefix.shape[-1])
        for row in range(batch):
            for start, length in zip(
                starts[row % len(starts)].tolist(), lengths[row % len(lengths)].tolist(), strict=False
            ):
                past[row, start : start + length, start : start + length] = True
        seen &= past
    if cu_seqlens is not None:
        for row, boundaries in enumerate(cu_seqlens.expand(batch, -1)):
            document = torch.full((seq_len,), -1)
            for number, (start, stop) in enumerate(pairwise(boundaries.tolist())):
                document[start:stop] = number
            seen[row] &= (document.unsqueeze(0) == document.unsqueeze(1)) & (document >= 0)
    return seen


def _in_tree(
    seq_len: int, boundaries: list[int], parents: list[int], prefixes: list[int], window: tuple[int, int] | None
) -> Tensor:
    """Return the mask (query, key) of one row, causal but in prefixes: each document is preceded by those that it
    continues."""
    seen = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for document, (start, stop) in enumerate(pairwise(boundaries)):
        path, at = list(range(start, stop)), parents[document]
        before = len(path)
        while at >= 0:
            path, at = [*range(boundaries[at], boundaries[at + 1]), *path], parents[at]
        for place in range(len(path) - before, len(path)):
            left, right = window or (-1, -1)
            first, at, end = 0 if left < 0 else max(0, place - left), path[place], start + prefixes[document]
            seen[at, path[first : place + 1]] = True
            if at < end:
                seen[at, at : end if right < 0 else min(end, at + right + 1)] = True
    return seen


def dense_attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    seen_BSS: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute differentiable attention; rows without a visible key are zero. seen: also of each head (B, N, S, S)."""
    group = q_BSNH.shape[2] // k_BSKH.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k_BSKH, v_BSKH))
    scores = torch.einsum("bqnh,bknh->bnqk", q_BSNH, k) * (scale or q_BSNH.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~(seen_BSS if seen_BSS.dim() == 4 else seen_BSS.unsqueeze(1)), float("-inf"))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - top.masked_fill(top.isneginf(), 0.0))
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return torch.einsum("bnqk,bknh->bqnh", weights[..., : seen_BSS.shape[-1]], v)


def dense_lse(
    q_BSNH: Tensor, k_BSKH: Tensor, seen_BSS: Tensor, *, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """Return the differentiable log-sum-exp of the scores (B, S, N); zero for rows without a visible key."""
    k = k_BSKH.repeat_interleave(q_BSNH.shape[2] // k_BSKH.shape[2], dim=2)
    scores = torch.einsum("bqnh,bknh->bqnk", q_BSNH, k) * (scale or q_BSNH.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    some = seen_BSS.any(2)
    seen = seen_BSS | ~some.unsqueeze(2)
    return scores.masked_fill(~seen.unsqueeze(2), float("-inf")).logsumexp(-1) * some.unsqueeze(2)


def relative_l2(x: Tensor, exact: Tensor) -> float:
    """Return |x - exact| / |exact|, in fp64."""
    x, exact = x.detach().double(), exact.detach().double()
    assert exact.norm() > 0, "the relative error of a zero tensor is undefined"
    return float((x - exact).norm() / exact.norm())


def worst(errors: list[float]) -> float:
    """Return the largest error, or nan if any is nan, which Python's max would ignore."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
