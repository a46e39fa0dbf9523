"""Latent keys in sparse attention: what multi-head latent attention expands for every head travels as it is, where that
is fewer bytes.

A token has a latent c and a rotary part r, of which a head n makes k = [W_n c, r] and v = U_n c (DeepSeek-V2, arXiv
2405.04434, section 2.1). Since q . k = [W_n^T q_nope, q_rot] . [c, r], all heads can attend to one key [c, r] of one
value c instead, and U_n is applied to the result: the same numbers, up to rounding.

B batch, N heads, S a rank's tokens, H head dim of q and k, V of v, C of the latents, R of the rotary part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from usp.sp.sequence import SpAxes

LATENTS = "sharded_latents"
QKV = tuple[Tensor, Tensor, Tensor]


def remember_latents(module: Any) -> None:
    """Let an attention module keep what it expands, (B, 1, S, C) and (B, 1, S, R), as its attribute `LATENTS`."""
    expand = getattr(module, "expand_kv", None)
    if expand is None:
        return

    def expand_kv(*latents: Tensor) -> tuple[Tensor, Tensor]:
        setattr(module, LATENTS, latents)
        return expand(*latents)

    module.expand_kv = expand_kv


def absorbed(
    module: Any, given: QKV, latents: tuple[Tensor, Tensor] | None, axes: SpAxes
) -> tuple[QKV, Callable[[Tensor], Tensor]]:
    """Return what a module's attention takes in place of q (B, S, N, H), k (B, S, N, H) and v (B, S, N, V), and what
    makes its results (B, S, N, V) of those for them: q (B, S, N, C + R), k (B, S, 1, C + R) and v (B, S, 1, C) of the
    latents, or the same where these are not fewer bytes, or the linear that expands them is not a plain one."""
    (q, k, v), linear = given, getattr(module, "kv_b_proj", module)
    plain = type(linear) is nn.Linear and linear.bias is None and not isinstance(linear.weight, DTensor)
    if latents is None or not plain or not _fewer_bytes(q.shape[2], k.shape[-1] + v.shape[-1], latents, axes):
        return given, lambda out: out
    c, r = (x.transpose(1, 2).to(q.dtype) for x in latents)
    nope, rotary = q.split([q.shape[-1] - r.shape[-1], r.shape[-1]], -1)
    of_k, of_v = linear.weight.view(q.shape[2], -1, c.shape[-1]).split([nope.shape[-1], v.shape[-1]], 1)
    q = torch.cat([torch.einsum("bsnd,ndc->bsnc", nope, of_k), rotary], -1)
    return (q, torch.cat([c, r], -1), c), lambda out: torch.einsum("bsnc,nvc->bsnv", out, of_v)


def _fewer_bytes(heads: int, expanded: int, latents: tuple[Tensor, Tensor], axes: SpAxes) -> bool:
    """Return whether a rank sends less for a token with its latents, if the other ring ranks choose all keys: q, k, v
    and results over ulysses, k and v of latents as a whole to every rank; and k and v over the ring."""
    latent = 2 * latents[0].shape[-1] + latents[1].shape[-1]
    to_ulysses, to_ring = axes.ulysses - 1, axes.ring - 1
    whole = latent * (to_ulysses + axes.ulysses * to_ring)
    return whole + heads * latent * to_ulysses / axes.ulysses < heads * expanded * (
        2 * to_ulysses / axes.ulysses + to_ring
    )
