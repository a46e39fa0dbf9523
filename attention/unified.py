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

from dataclasses import dataclass

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
from .ulysses import HeadsToSeq, SeqToHeads


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
    # Fused kernels assume without checking that the head dim is contiguous.
    q_BSNH, k_BSKH, v_BSKV = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BSNH, k_BSKH, v_BSKV))
    if ulysses.size > 1:
        q, k, v = SeqToHeads.apply(q_BSNH, k_BSKH, v_BSKV, plan.heads, ulysses, keep)
    else:
        q, k, v = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKV))
    own_sinks = None if sinks is None else sinks[slice(*plan.heads.q_ranges[plan.ulysses_rank])]
    if plan.heads.q_width(plan.ulysses_rank) == 0:  # there are more ulysses ranks than query heads
        # Adding the empty sum of sinks gives every rank a gradient of them and a backward in which to exchange heads.
        out = v if own_sinks is None else v + own_sinks.sum().to(v.dtype)
    else:
        index = plan.heads.kv_index(plan.ulysses_rank)
        kv_index = None if index is None else torch.tensor(index, device=q.device)
        out = RingAttention.apply(q, k, v, own_sinks, program, ring, kv_index, keep)
    if ulysses.size > 1:
        return HeadsToSeq.apply(out, plan.heads, batch, ulysses, keep)
    return out.unflatten(0, (batch, -1))
