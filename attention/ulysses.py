"""DeepSpeed-Ulysses (arXiv 2309.14509): one all-to-all between sequence-sharded and head-sharded tensors.

q, k and v are sent together; heads need not divide evenly over ranks (heads.py).

B batch, S tokens per row of a rank, T = B * ulysses * S tokens of a ring rank (row by row), N query heads and K KV
heads in total, H head dim, V head dim of the values, w heads of one rank, X elements of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from .accumulate import accumulate_dtype
from .comm import Channel
from .heads import HeadPlan, Range
from .keep import Keep

Shape = tuple[int, int]  # heads and head dim of a tensor's part


class SeqToHeads(torch.autograd.Function):
    """`apply(q_BSNH, k_BSKH, v_BSKV, plan, channel, keep)` -> q_TwH, k_TwH, v_TwV of this rank's heads."""

    @staticmethod
    def forward(ctx, q, k, v, plan: HeadPlan, channel: Channel, keep: Keep):
        ctx.plan, ctx.channel, ctx.batch = plan, channel, q.shape[0]
        return separated_heads(seq_to_heads(q, k, v, plan, channel, keep), plan, channel.rank, q.shape[-1], v.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        plan, channel = ctx.plan, ctx.channel
        widths = [(plan.q_width(rank), plan.kv_width(rank), plan.kv_width(rank)) for rank in range(plan.ulysses)]
        parts = _gather_heads((dq, dk, dv), widths, ctx.batch, channel)
        replicated = sum(map(plan.kv_width, range(plan.ulysses))) > plan.num_kv_heads
        kv_dtype = accumulate_dtype(dk.dtype) if replicated else dk.dtype
        tokens = parts[0][0].shape[:2]
        grad_q = dq.new_empty(*tokens, plan.num_heads, dq.shape[-1])
        grad_k, grad_v = (x.new_zeros(*tokens, plan.num_kv_heads, x.shape[-1], dtype=kv_dtype) for x in (dk, dv))
        for (part_q, part_k, part_v), heads, kv in zip(parts, plan.q_ranges, plan.kv_ranges, strict=True):
            grad_q[:, :, slice(*heads)] = part_q
            grad_k[:, :, slice(*kv)] += part_k
            grad_v[:, :, slice(*kv)] += part_v
        return grad_q, grad_k.to(dk.dtype), grad_v.to(dv.dtype), None, None, None


class HeadsToSeq(torch.autograd.Function):
    """`apply(out_TwV, plan, batch, channel, keep)` -> out_BSNV, all heads of this rank's tokens."""

    @staticmethod
    def forward(ctx, out, plan: HeadPlan, batch: int, channel: Channel, keep: Keep):
        ctx.plan, ctx.channel = plan, channel
        widths = [(plan.q_width(rank),) for rank in range(plan.ulysses)]

        def exchange() -> tuple[Tensor]:
            return (torch.cat([part for (part,) in _gather_heads((out,), widths, batch, channel)], dim=2),)

        (gathered,) = keep(("heads to sequence", out.shape), exchange)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        scattered = _scatter_heads((dout,), [(heads,) for heads in ctx.plan.q_ranges], ctx.channel)
        return scattered.unflatten(1, (-1, dout.shape[-1])), None, None, None, None


def seq_to_heads(q: Tensor, k: Tensor, v: Tensor, plan: HeadPlan, channel: Channel, keep: Keep) -> Tensor:
    """Exchange q, k and v of this rank's tokens for those of its heads: (T, X), for `separated_heads`."""
    ranges = [(heads, kv, kv) for heads, kv in zip(plan.q_ranges, plan.kv_ranges, strict=True)]
    step = ("sequence to heads", q.shape, k.shape, v.shape)
    (qkv,) = keep(step, lambda: (_scatter_heads((q, k, v), ranges, channel),))
    return qkv


def separated_heads(qkv_TX: Tensor, plan: HeadPlan, rank: int, head_dim: int, v_head_dim: int) -> tuple[Tensor, ...]:
    """Return the q_TwH, k_TwH and v_TwV in a result of `seq_to_heads`, as views."""
    kv = plan.kv_width(rank)
    return _separated(qkv_TX, [(plan.q_width(rank), head_dim), (kv, head_dim), (kv, v_head_dim)])


def _scatter_heads(tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]], channel: Channel) -> Tensor:
    """Send to each rank its range of heads of each tensor (B, S, heads, head dim), in one message.

    Returns:
        (T, X): all tokens of this rank's heads, one tensor after the other.
    """
    batch, tokens = tensors[0].shape[:2]
    shapes = [
        [(stop - start, x.shape[-1]) for (start, stop), x in zip(of_rank, tensors, strict=True)] for of_rank in ranges
    ]
    features = [sum(map(prod, of_rank)) for of_rank in shapes]
    sent = tensors[0].new_empty(batch * tokens * sum(features))
    for message, shape, of_rank in zip(_messages(sent, batch, tokens, features), shapes, ranges, strict=True):
        for part, x, heads in zip(_separated(message, shape), tensors, of_rank, strict=True):
            part.copy_(x[:, :, slice(*heads)])
    own = features[channel.rank]
    per_rank = batch * tokens * own
    with record_function("ulysses all-to-all: seq to heads"):
        received = channel.all_to_all(sent, [batch * tokens * x for x in features], [per_rank] * channel.size)
    by_source = received.view(channel.size, batch, tokens, own)
    return by_source.transpose(0, 1).reshape(batch * channel.size * tokens, own)


def _gather_heads(
    tensors: Sequence[Tensor], widths: Sequence[Sequence[int]], batch: int, channel: Channel
) -> list[tuple[Tensor, ...]]:
    """Invert `_scatter_heads`; `widths` are the numbers of heads of each rank's tensors.

    Returns:
        For each rank, (B, S, heads, head dim) of each tensor: this rank's tokens of that rank's heads.
    """
    tokens = len(tensors[0]) // (batch * channel.size)
    shapes = [[(width, x.shape[-1]) for width, x in zip(of_rank, tensors, strict=True)] for of_rank in widths]
    features = [sum(map(prod, of_rank)) for of_rank in shapes]
    own = features[channel.rank]
    sent = tensors[0].new_empty(channel.size, batch, tokens, own)
    for part, x in zip(_separated(sent, shapes[channel.rank]), tensors, strict=True):
        part.copy_(x.view(batch, channel.size, tokens, *x.shape[1:]).transpose(0, 1))
    with record_function("ulysses all-to-all: heads to seq"):
        received = channel.all_to_all(
            sent.view(-1), [batch * tokens * own] * channel.size, [batch * tokens * x for x in features]
        )
    messages = _messages(received, batch, tokens, features)
    return [_separated(message, shape) for message, shape in zip(messages, shapes, strict=True)]


def _messages(flat: Tensor, batch: int, tokens: int, features: Sequence[int]) -> list[Tensor]:
    """Return views (B, S, X) of the messages in a buffer, by rank."""
    parts = flat.split([batch * tokens * x for x in features])
    return [part.view(batch, tokens, x) for part, x in zip(parts, features, strict=True)]


def _separated(x: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Return views (..., heads, head dim) of the tensors in (..., X)."""
    parts = x.split([prod(shape) for shape in shapes], dim=-1)
    return tuple(part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))
