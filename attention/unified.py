"""Unified sequence-parallel attention: ring attention inside Ulysses (USP, arXiv 2405.07719, Algorithm 1).

    q, k, v: this rank's tokens, all heads
        | all-to-all over the ulysses axis
    q, k, v: the ring rank's tokens, this rank's heads
        | ring attention over the ring axis
    out: the ring rank's tokens, this rank's heads
        | all-to-all back
    out: this rank's tokens, all heads

B batch, S tokens per row of a rank, N query heads, K KV heads, H head dim, V head dim of the values, T tokens of a ring
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .accumulate import accumulate_dtype
from .comm import Channel
from .heads import HeadPlan
from .keep import Keep, compute_now
from .layout import SequenceLayout
from .ring import RingAttention, RingProgram
from .schedule import RingSchedule, ring_schedule
from .spec import AttentionSpec
from .ulysses import HeadsToSeq, SeqToHeads, separated_heads, seq_to_heads


@dataclass(frozen=True)
class WireBytes:
    """Payload bytes that one rank sends to others per call.

    Attributes:
        seq_to_heads, heads_to_seq: of q, k and v, and of the output, over the ulysses axis in the forward.
        dout_to_heads, grads_to_seq: of their gradients in the backward.
        keys: of keys and values over the ring axis, in the forward and again in the backward.
        grads: of their partial gradients.
    """

    seq_to_heads: int
    heads_to_seq: int
    dout_to_heads: int
    grads_to_seq: int
    keys: int
    grads: int

    @property
    def forward(self) -> int:
        return self.seq_to_heads + self.heads_to_seq + self.keys

    @property
    def backward(self) -> int:
        return self.dout_to_heads + self.grads_to_seq + self.keys + self.grads

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class UnifiedPlan:
    """One rank's part of one attention call, as plain data derived independently on every rank."""

    layout: SequenceLayout
    spec: AttentionSpec
    heads: HeadPlan
    batch: int
    ulysses_rank: int
    ring: RingSchedule

    @staticmethod
    def make(
        layout: SequenceLayout, spec: AttentionSpec, heads: HeadPlan, batch: int, ring_rank: int, ulysses_rank: int
    ) -> UnifiedPlan:
        """Plan a call on (batch, local_len) tokens of one rank.

        Raises:
            ValueError: if the documents do not fit the batch and the sequence.
        """
        if violation := spec.document_violation(batch, layout.seq_len):
            raise ValueError(violation)
        return UnifiedPlan(layout, spec, heads, batch, ulysses_rank, ring_schedule(layout, spec, batch, ring_rank))

    def wire_bytes(self, head_dim: int, dtype: torch.dtype, v_head_dim: int | None = None) -> WireBytes:
        """Predict the bytes that this rank sends to others; `v_head_dim` is that of v, None for `head_dim`."""
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        heads, mine = self.heads, self.ulysses_rank
        others = [rank for rank in range(heads.ulysses) if rank != mine]
        per_element = self.batch * self.layout.local_len * dtype.itemsize
        per_token = heads.kv_width(mine) * (head_dim + v_head_dim)
        return WireBytes(
            seq_to_heads=per_element * sum(heads.elements(rank, head_dim, v_head_dim) for rank in others),
            heads_to_seq=per_element * len(others) * heads.q_width(mine) * v_head_dim,
            dout_to_heads=per_element * sum(map(heads.q_width, others)) * v_head_dim,
            grads_to_seq=per_element * len(others) * heads.elements(mine, head_dim, v_head_dim),
            keys=self.ring.tokens_sent * per_token * dtype.itemsize,
            grads=self.ring.grad_tokens_sent * per_token * accumulate_dtype(dtype).itemsize,
        )


def unified_attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    *,
    plan: UnifiedPlan,
    program: RingProgram,
    ulysses: Channel,
    ring: Channel,
    sinks: Tensor | None = None,
    keep: Keep = compute_now,
) -> Tensor:
    """Compute exact, differentiable attention of this rank's queries over the whole sequence, (B, S, N, V).

    `program` is `plan.ring` lowered for a kernel. `sinks` (N,) are logits added to every row's softmax without a
    value; each rank gets a partial gradient of them, to be summed over ranks. `keep` saves or replays results for
    activation checkpointing (keep.py).
    """
    batch = q_BSNH.shape[0]
    q_BSNH, k_BSKH, v_BSKV = _heads_contiguous(q_BSNH, k_BSKH, v_BSKV)
    if ulysses.size > 1:
        q, k, v = SeqToHeads.apply(q_BSNH, k_BSKH, v_BSKV, plan.heads, ulysses, keep)
    else:
        q, k, v = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKV))
    own_sinks = _own_sinks(sinks, plan)
    if plan.heads.q_width(plan.ulysses_rank) == 0:  # there are more ulysses ranks than query heads
        # Adding the empty sum of sinks gives every rank a gradient of them and a backward in which to exchange heads.
        out = v if own_sinks is None else v + own_sinks.sum().to(v.dtype)
    else:
        out = RingAttention.apply(q, k, v, own_sinks, program, ring, keep)
    if ulysses.size > 1:
        return HeadsToSeq.apply(out, plan.heads, batch, ulysses, keep)
    return out.unflatten(0, (batch, -1))


@torch.no_grad()
def unified_forward(
    q_BSNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    *,
    plan: UnifiedPlan,
    program: RingProgram,
    ulysses: Channel,
    ring: Channel,
    sinks: Tensor | None = None,
    keep: Keep = compute_now,
) -> list[Tensor]:
    """Compute `unified_attention` for a caller that saves tensors itself, as the operator of a compiled graph does.

    The arguments are those of `unified_attention`; every ulysses rank must have a query head.

    Returns:
        out (B, S, N, V) and lse (T, w) for w heads of this rank; with ulysses also its q, k and v (T, X), and its part
        of out (T, w, V). All are contiguous, and none shares memory with another or with the arguments.
    """
    batch, head_dims = q_BSNH.shape[0], (q_BSNH.shape[-1], v_BSKV.shape[-1])
    q_BSNH, k_BSKH, v_BSKV = _heads_contiguous(q_BSNH, k_BSKH, v_BSKV)
    if ulysses.size > 1:
        qkv = seq_to_heads(q_BSNH, k_BSKH, v_BSKV, plan.heads, ulysses, keep)
        q, k, v = separated_heads(qkv, plan.heads, ulysses.rank, *head_dims)
    else:
        q, k, v = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKV))
    context = _Context()
    out = RingAttention.forward(context, q, k, v, _own_sinks(sinks, plan), program, ring, keep).contiguous()
    lse = context.saved_tensors[4].contiguous()
    if ulysses.size > 1:
        return [HeadsToSeq.forward(_Context(), out, plan.heads, batch, ulysses, keep), lse, qkv, out]
    return [out.unflatten(0, (batch, -1)), lse]


@torch.no_grad()
def unified_backward(
    dout_BSNV: Tensor,
    saved: Sequence[Tensor],
    head_dim: int,
    *,
    plan: UnifiedPlan,
    program: RingProgram,
    ulysses: Channel,
    ring: Channel,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients of q, k, v and, if given, of sinks; contiguous, and without shared memory.

    saved: with ulysses the last three results of `unified_forward`, else both results and its arguments q, k and v.
    """
    batch, v_head_dim = dout_BSNV.shape[0], dout_BSNV.shape[-1]
    exchange = _Context(plan=plan.heads, channel=ulysses, batch=batch)
    if ulysses.size > 1:
        lse, qkv, out = saved
        q, k, v = separated_heads(qkv, plan.heads, ulysses.rank, head_dim, v_head_dim)
        dout = HeadsToSeq.backward(exchange, dout_BSNV)[0]
    else:
        out, lse, *inputs = saved
        q, k, v, out, dout = (x.flatten(0, 1) for x in (*_heads_contiguous(*inputs), out, dout_BSNV))
    kept = (q, k, v, out, lse, _own_sinks(sinks, plan))
    context = _Context(saved_tensors=kept, program=program, channel=ring)
    *grads, own_dsinks = RingAttention.backward(context, dout)[:4]
    if ulysses.size > 1:
        grads = SeqToHeads.backward(exchange, *grads)[:3]
    else:
        grads = [x.unflatten(0, (batch, -1)) for x in grads]
    if sinks is None:
        return [x.contiguous() for x in grads]
    dsinks = torch.zeros_like(sinks)
    dsinks[slice(*plan.heads.q_ranges[plan.ulysses_rank])] = own_dsinks
    return [*(x.contiguous() for x in grads), dsinks]


class _Context(SimpleNamespace):
    """Stands in for autograd's context."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def _heads_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make head dims contiguous, which fused kernels assume without checking."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _own_sinks(sinks: Tensor | None, plan: UnifiedPlan) -> Tensor | None:
    return None if sinks is None else sinks[slice(*plan.heads.q_ranges[plan.ulysses_rank])]
