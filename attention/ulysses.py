"""DeepSpeed-Ulysses (arXiv 2309.14509): one all-to-all between sequence-sharded and head-sharded tensors.

q, k and v are sent together; heads need not divide evenly over ranks (heads.py).

B batch, S tokens per row of a rank, T = B * ulysses * S tokens of a ring rank (row by row), N query heads and K KV
heads in total, H head dim, w heads of one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from .accumulate import accumulate_dtype
from .comm import Channel
from .heads import HeadPlan
from .keep import Keep


class SeqToHeads(torch.autograd.Function):
    """`apply(q_BSNH, k_BSKH, v_BSKH, plan, channel, keep)` -> q_TwH, k_TwH, v_TwH of this rank's heads."""

    @staticmethod
    def forward(ctx, q, k, v, plan: HeadPlan, channel: Channel, keep: Keep):
        ctx.plan, ctx.channel, ctx.batch = plan, channel, q.shape[0]

        def exchange() -> tuple[Tensor, Tensor, Tensor]:
            parts = [
                torch.cat((q[:, :, slice(*heads)], k[:, :, slice(*kv)], v[:, :, slice(*kv)]), dim=2)
                for heads, kv in zip(plan.q_ranges, plan.kv_ranges, strict=True)
            ]
            return _split(_scatter_heads(parts, channel), plan, channel.rank)

        return keep(("sequence to heads", q.shape, k.shape), exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        plan, channel = ctx.plan, ctx.channel
        widths = [plan.width(rank) for rank in range(plan.ulysses)]
        parts = _gather_heads(torch.cat((dq, dk, dv), dim=1), widths, ctx.batch, channel)
        replicated = sum(map(plan.kv_width, range(plan.ulysses))) > plan.num_kv_heads
        shape = parts[0].shape
        kv_dtype = accumulate_dtype(dk.dtype) if replicated else dk.dtype
        grad_q = dq.new_empty(*shape[:2], plan.num_heads, shape[-1])
        grad_k = torch.zeros(*shape[:2], plan.num_kv_heads, shape[-1], dtype=kv_dtype, device=dk.device)
        grad_v = torch.zeros_like(grad_k)
        for rank, (part, heads, kv) in enumerate(zip(parts, plan.q_ranges, plan.kv_ranges, strict=True)):
            part_q, part_k, part_v = _split(part, plan, rank)
            grad_q[:, :, slice(*heads)] = part_q
            grad_k[:, :, slice(*kv)] += part_k
            grad_v[:, :, slice(*kv)] += part_v
        return grad_q, grad_k.to(dk.dtype), grad_v.to(dv.dtype), None, None, None


class HeadsToSeq(torch.autograd.Function):
    """`apply(out_TwH, plan, batch, channel, keep)` -> out_BSNH, all heads of this rank's tokens."""

    @staticmethod
    def forward(ctx, out, plan: HeadPlan, batch: int, channel: Channel, keep: Keep):
        ctx.plan, ctx.channel = plan, channel
        widths = [plan.q_width(rank) for rank in range(plan.ulysses)]

        def exchange() -> tuple[Tensor]:
            return (torch.cat(_gather_heads(out, widths, batch, channel), dim=2),)

        (gathered,) = keep(("heads to sequence", out.shape), exchange)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        parts = [dout[:, :, slice(*heads)] for heads in ctx.plan.q_ranges]
        return _scatter_heads(parts, ctx.channel), None, None, None, None


def _split(x: Tensor, plan: HeadPlan, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split (..., w, H) into a rank's q, k and v heads."""
    return x.split((plan.q_width(rank), plan.kv_width(rank), plan.kv_width(rank)), dim=-2)


def _scatter_heads(parts: list[Tensor], channel: Channel) -> Tensor:
    """Send parts[rank] (B, S, w_rank, H) to each rank; return (T, w, H), all tokens of this rank's heads."""
    batch, tokens, width, head_dim = parts[channel.rank].shape
    with record_function("ulysses all-to-all: seq to heads"):
        received = channel.all_to_all(
            torch.cat([part.flatten() for part in parts]),
            [part.numel() for part in parts],
            [parts[channel.rank].numel()] * channel.size,
        )
    by_source = received.view(channel.size, batch, tokens, width, head_dim)
    return by_source.transpose(0, 1).reshape(batch * channel.size * tokens, width, head_dim)


def _gather_heads(x_TwH: Tensor, widths: list[int], batch: int, channel: Channel) -> list[Tensor]:
    """Invert `_scatter_heads`: return this rank's tokens of each rank's heads (B, S, w_rank, H)."""
    all_tokens, width, head_dim = x_TwH.shape
    tokens = all_tokens // (batch * channel.size)
    by_rank = x_TwH.reshape(batch, channel.size, tokens, width, head_dim).transpose(0, 1)
    per_head = batch * tokens * head_dim
    with record_function("ulysses all-to-all: heads to seq"):
        received = channel.all_to_all(
            by_rank.reshape(-1), [per_head * width] * channel.size, [per_head * w for w in widths]
        )
    parts = received.split([per_head * w for w in widths])
    return [part.view(batch, tokens, w, head_dim) for part, w in zip(parts, widths, strict=True)]
