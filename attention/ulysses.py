"""DeepSpeed-Ulysses (arXiv 2309.14509): one all-to-all between sequence-sharded and head-sharded tensors.

q, k and v are sent together; heads need not divide evenly over ranks (heads.py).

B batch, S tokens per row of a rank, T = B * ulysses * S tokens of a ring rank (row by row), N query heads and K KV
heads in total, H head dim, V head dim of the values, w heads of one rank, X elements of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .accumulate import accumulate_dtype
from .comm import Channel, named
from .heads import HeadPlan, Range
from .keep import Keep

Shape = tuple[int, int]  # heads and head dim of a tensor's part


class SeqToHeads(torch.autograd.Function):
    """`apply(plan, channel, keep, q_BSNH, k_BSKH, v_BSKV)` -> q_TwH, k_TwH, v_TwV of this rank's heads; also for q, or
    for k and v, alone."""

    @staticmethod
    def forward(ctx, plan: HeadPlan, channel: Channel, keep: Keep, *tensors: Tensor):
        ctx.plan, ctx.channel, ctx.batch = plan, channel, tensors[0].shape[0]
        exchanged = seq_to_heads(tensors, plan, channel, keep)
        return separated_heads(exchanged, plan, channel.rank, *(x.shape[-1] for x in tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        plan, channel = ctx.plan, ctx.channel
        of_tensors = _head_ranges(plan, len(grads))
        ranges = list(zip(*of_tensors, strict=True))
        messages = _gather_heads(grads, ranges, ctx.batch, channel)
        if isinstance(messages, Tensor):
            parts: Sequence[Any] = _separated(messages, _shapes(grads, ranges[:1])[0])
        else:
            parts = list(zip(*messages, strict=True))
        totals = []
        for dx, part, heads in zip(grads, parts, of_tensors, strict=True):
            number = max(stop for _, stop in heads)
            replicated = sum(stop - start for start, stop in heads) > number
            dtype = accumulate_dtype(dx.dtype) if replicated else dx.dtype
            if isinstance(part, Tensor):
                totals.append(_summed(part, _groups(heads), dtype))
                continue
            total = dx.new_zeros(*part[0].shape[:2], number, dx.shape[-1], dtype=dtype)
            for of_rank, own in zip(part, heads, strict=True):
                total[:, :, slice(*own)] += of_rank
            totals.append(total.to(dx.dtype))
        return None, None, None, *totals


class HeadsToSeq(torch.autograd.Function):
    """`apply(out_TwV, plan, batch, channel, keep)` -> out_BSNV, all heads of this rank's tokens."""

    @staticmethod
    def forward(ctx, out, plan: HeadPlan, batch: int, channel: Channel, keep: Keep):
        ctx.plan, ctx.channel = plan, channel
        ranges = [(heads,) for heads in plan.q_ranges]

        def exchange() -> tuple[Tensor]:
            messages = _gather_heads((out,), ranges, batch, channel)
            if isinstance(messages, Tensor):
                return (_summed(messages.unflatten(-1, out.shape[1:]), plan.ulysses, out.dtype),)
            return (torch.cat([part for (part,) in messages], dim=2),)

        (gathered,) = keep(("heads to sequence", out.shape), exchange)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        scattered = _scatter_heads((dout,), [(heads,) for heads in ctx.plan.q_ranges], ctx.channel)
        return scattered.unflatten(1, (-1, dout.shape[-1])), None, None, None, None


def seq_to_heads(tensors: Sequence[Tensor], plan: HeadPlan, channel: Channel, keep: Keep) -> Tensor:
    """Exchange q, k and v of this rank's tokens for those of its heads: (T, X), for `separated_heads`."""
    ranges = list(zip(*_head_ranges(plan, len(tensors)), strict=True))
    step = ("sequence to heads", *(x.shape for x in tensors))
    (exchanged,) = keep(step, lambda: (_scatter_heads(tensors, ranges, channel),))
    return exchanged


def separated_heads(x_TX: Tensor, plan: HeadPlan, rank: int, *head_dims: int) -> tuple[Tensor, ...]:
    """Return the q_TwH, k_TwH and v_TwV in a result of `seq_to_heads`, as views."""
    ranges = [of_tensor[rank] for of_tensor in _head_ranges(plan, len(head_dims))]
    return _separated(x_TX, [(stop - start, dim) for (start, stop), dim in zip(ranges, head_dims, strict=True)])


def _head_ranges(plan: HeadPlan, tensors: int) -> list[tuple[Range, ...]]:
    """Return the ranks' heads of q, k and v, of q alone, or of k and v."""
    return [plan.q_ranges] * (tensors != 2) + [plan.kv_ranges] * (2 * (tensors > 1))


def _scatter_heads(tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]], channel: Channel) -> Tensor:
    """Send to each rank its range of heads of each tensor (B, S, heads, head dim), in one message.

    Returns:
        (T, X): all tokens of this rank's heads, one tensor after the other.
    """
    batch, tokens = tensors[0].shape[:2]
    shapes = _shapes(tensors, ranges)
    features = [sum(map(prod, of_rank)) for of_rank in shapes]
    sent = tensors[0].new_empty(batch * tokens * sum(features))
    if all(numbers := [_groups(of_tensor) for of_tensor in zip(*ranges, strict=True)]):
        parts = _separated(sent.view(len(ranges), batch, tokens, -1), shapes[0])
        for part, x, number in zip(parts, tensors, numbers, strict=True):  # one copy each
            part.unflatten(0, (number, -1)).copy_(x.unflatten(2, (number, -1)).movedim(2, 0).unsqueeze(1))
    else:
        for message, shape, of_rank in zip(_messages(sent, batch, tokens, features), shapes, ranges, strict=True):
            for part, x, heads in zip(_separated(message, shape), tensors, of_rank, strict=True):
                part.copy_(x[:, :, slice(*heads)])
    own = features[channel.rank]
    per_rank = batch * tokens * own
    with named("ulysses all-to-all: seq to heads"):
        received = channel.all_to_all(sent, [batch * tokens * x for x in features], [per_rank] * channel.size)
    by_source = received.view(channel.size, batch, tokens, own)
    return by_source.transpose(0, 1).reshape(batch * channel.size * tokens, own)


def _gather_heads(
    tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]], batch: int, channel: Channel
) -> Tensor | list[tuple[Tensor, ...]]:
    """Invert `_scatter_heads`.

    Returns:
        This rank's tokens of each rank's heads: (ranks, B, S, X) if heads divide evenly over the ranks, else for each
        rank (B, S, heads, head dim) of each tensor.
    """
    tokens = len(tensors[0]) // (batch * channel.size)
    shapes = _shapes(tensors, ranges)
    features = [sum(map(prod, of_rank)) for of_rank in shapes]
    own = features[channel.rank]
    sent = tensors[0].new_empty(channel.size, batch, tokens, own)
    for part, x in zip(_separated(sent, shapes[channel.rank]), tensors, strict=True):
        part.copy_(x.view(batch, channel.size, tokens, *x.shape[1:]).transpose(0, 1))
    with named("ulysses all-to-all: heads to seq"):
        received = channel.all_to_all(
            sent.view(-1), [batch * tokens * own] * channel.size, [batch * tokens * x for x in features]
        )
    if all(map(_groups, zip(*ranges, strict=True))):
        return received.view(channel.size, batch, tokens, own)
    return list(map(_separated, _messages(received, batch, tokens, features), shapes))


def _shapes(tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]]) -> list[list[Shape]]:
    """Return each rank's heads and head dim of each tensor (..., head dim)."""
    return [
        [(stop - start, x.shape[-1]) for (start, stop), x in zip(of_rank, tensors, strict=True)] for of_rank in ranges
    ]


@lru_cache(maxsize=64)
def _groups(ranges: tuple[Range, ...]) -> int:
    """Return how many equal groups of heads there are, if each in turn belongs to equally many ranks; else 0."""
    groups = list(dict.fromkeys(ranges))
    width, copies = groups[0][1] - groups[0][0], len(ranges) // len(groups)
    even = [(number * width, (number + 1) * width) for number in range(len(groups)) for _ in range(copies)]
    return len(groups) if width and even == list(ranges) else 0


def _summed(part: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """Return (B, S, all heads, head dim) from (ranks, B, S, heads, head dim), with ranks that share one of the `number`
    groups of heads summed in `dtype`."""
    by_group = part.unflatten(0, (number, -1))
    total = by_group[:, 0] if by_group.shape[1] == 1 else by_group.sum(1, dtype=dtype).to(part.dtype)
    return total.movedim(0, 2).flatten(2, 3)


def _messages(flat: Tensor, batch: int, tokens: int, features: Sequence[int]) -> list[Tensor]:
    """Return views (B, S, X) of the messages in a buffer, by rank."""
    parts = flat.split([batch * tokens * x for x in features])
    return [part.view(batch, tokens, x) for part, x in zip(parts, features, strict=True)]


def _separated(x: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Return views (..., heads, head dim) of the tensors in (..., X)."""
    parts = x.split([prod(shape) for shape in shapes], dim=-1)
    return tuple(part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))
