"""DeepSpeed-Ulysses (arXiv 2309.14509): all-to-alls between sequence-sharded and head-sharded tensors.

q, k and v are sent together; heads need not divide evenly over ranks (heads.py). An exchange is posted first and
finished by the function that posting it returns, so that one group of heads travels while another one computes.

B batch, S tokens per row of a rank, T = B * ulysses * S tokens of a ring rank (row by row), N query heads and K KV
heads in total, H head dim, V head dim of the values, w heads of one rank, X elements of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from math import prod

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
        step = ("sequence to heads", *(x.shape for x in tensors))
        (exchanged,) = keep(step, lambda: (post_to_heads(tensors, plan, channel)(),))
        return separated_heads(exchanged, plan, channel.rank, *(x.shape[-1] for x in tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        tokens = grads[0].shape[0] // (ctx.batch * ctx.channel.size)
        total = SequenceTotal(ctx.plan, ctx.batch, ctx.channel, tokens, grads)
        total.post(ctx.plan, [*grads])()
        return None, None, None, *total.result()


class HeadsToSeq(torch.autograd.Function):
    """`apply(out_TwV, plan, batch, channel, keep)` -> out_BSNV, all heads of this rank's tokens."""

    @staticmethod
    def forward(ctx, out, plan: HeadPlan, batch: int, channel: Channel, keep: Keep):
        ctx.plan, ctx.channel = plan, channel

        def exchange() -> tuple[Tensor, ...]:
            tokens = out.shape[0] // (batch * channel.size)
            total = SequenceTotal(plan, batch, channel, tokens, (out,))
            total.post(plan, [out])()
            return tuple(total.result())

        (gathered,) = keep(("heads to sequence", out.shape), exchange)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        exchanged = post_to_heads((dout,), ctx.plan, ctx.channel)()
        return *separated_heads(exchanged, ctx.plan, ctx.channel.rank, dout.shape[-1]), None, None, None, None


def separated_heads(x_TX: Tensor, plan: HeadPlan, rank: int, *head_dims: int) -> tuple[Tensor, ...]:
    """Return the q_TwH, k_TwH and v_TwV in a result of `post_to_heads`, as views."""
    ranges = [of_tensor[rank] for of_tensor in _head_ranges(plan, len(head_dims))]
    return _separated(x_TX, [(stop - start, dim) for (start, stop), dim in zip(ranges, head_dims, strict=True)])


def post_to_heads(tensors: Sequence[Tensor], plan: HeadPlan, channel: Channel) -> Callable[[], Tensor]:
    """Start to send to each rank its heads, by `plan`, of q, k and v (B, S, heads, head dim), in one message.

    Returns:
        A function that waits, and returns (T, X): all tokens of this rank's heads, one tensor after the other.
    """
    batch, tokens = tensors[0].shape[:2]
    of_tensors = _head_ranges(plan, len(tensors))
    shapes = _shapes(tensors, of_tensors)
    features = [sum(map(prod, of_rank)) for of_rank in shapes]
    evens = [even for ranges in of_tensors if (even := _even(ranges))]
    if len(evens) == len(of_tensors):
        sharing = channel.size // min(number for number, *_ in evens)  # ranks with the same KV heads
        parts = [_by_rank(x, even, channel.size, sharing) for x, even in zip(tensors, evens, strict=True)]
        # Tensors of up to four dims take one launch.
        sent = torch.cat(parts, -1, out=parts[0].new_empty(*parts[0].shape[:3], features[0])).view(-1)
    else:
        sent = tensors[0].new_empty(batch * tokens * sum(features))
        messages = _messages(sent, batch, tokens, features)
        for message, shape, of_rank in zip(messages, shapes, zip(*of_tensors, strict=True), strict=True):
            for part, x, heads in zip(_separated(message, shape), tensors, of_rank, strict=True):
                part.copy_(x[:, :, slice(*heads)])
    own = features[channel.rank]
    per_rank = batch * tokens * own
    with named("ulysses all-to-all: seq to heads"):
        received, pending = channel.post_all_to_all(
            sent, [batch * tokens * x for x in features], [per_rank] * channel.size
        )

    def finish() -> Tensor:
        with named("ulysses all-to-all: wait"):
            pending.wait()
        by_source = received.view(channel.size, batch, tokens, own)
        return by_source.transpose(0, 1).reshape(batch * channel.size * tokens, own)

    return finish


class SequenceTotal:
    """All heads (B, S, heads, head dim) of this rank's tokens, to which `post` adds those of one group after another.

    plan: of all heads. tensors: with the dtype and the head dims of q, k and v.
    """

    def __init__(self, plan: HeadPlan, batch: int, channel: Channel, tokens: int, tensors: Sequence[Tensor]) -> None:
        self._batch, self._channel, self._tokens, self._dtype = batch, channel, tokens, tensors[0].dtype
        self._like, self._ranges = [x.new_empty(0, x.shape[-1]) for x in tensors], _head_ranges(plan, len(tensors))
        # Ranks that share a KV head send a part of its gradient each, possibly with other groups; `post` sums those of
        # one group itself if all heads are even.
        apart = plan.groups > 1 or not all(map(_even, self._ranges))
        self._added = [
            apart and sum(stop - start for start, stop in ranges) > max(stop for _, stop in ranges)
            for ranges in self._ranges
        ]

    @cached_property
    def _totals(self) -> list[Tensor]:
        totals = []
        for x, ranges, added in zip(self._like, self._ranges, self._added, strict=True):
            shape = (self._batch, self._tokens, max(stop for _, stop in ranges), x.shape[-1])
            totals.append(x.new_zeros(shape, dtype=accumulate_dtype(x.dtype)) if added else x.new_empty(shape))
        return totals

    def post(self, plan: HeadPlan, tensors: list[Tensor]) -> Callable[[], None]:
        """Start to send the tokens of this rank's heads, by `plan`, to their ranks; return what waits for those of the
        other ranks and adds them. The list is emptied, so that what it alone holds is free before messages arrive."""
        channel, batch, tokens = self._channel, self._batch, self._tokens
        of_tensors = _head_ranges(plan, len(tensors))
        shapes = _shapes(tensors, of_tensors)
        features = [sum(map(prod, of_rank)) for of_rank in shapes]
        own = features[channel.rank]
        parts = [x.flatten(1).view(batch, channel.size, tokens, -1).transpose(0, 1) for x in tensors]
        sent = torch.cat(parts, -1) if len(parts) > 1 else parts[0].contiguous()
        tensors.clear()
        del parts
        with named("ulysses all-to-all: heads to seq"):
            received, pending = channel.post_all_to_all(
                sent.view(-1), [batch * tokens * own] * channel.size, [batch * tokens * x for x in features]
            )

        def finish() -> None:
            with named("ulysses all-to-all: wait"):
                pending.wait()
            evens = [even for ranges in of_tensors if (even := _even(ranges))]
            if len(evens) == len(of_tensors):
                parts = _separated(received.view(channel.size, batch, tokens, own), shapes[0])
                for total, part, even, added in zip(self._totals, parts, evens, self._added, strict=True):
                    part, of_ranges = part.view(even[0], -1, *part.shape[1:]), _by_range(total, *even)
                    if part.shape[1] == 1:
                        (of_ranges.add_ if added else of_ranges.copy_)(part[:, 0])
                    elif added:
                        of_ranges.add_(part.sum(1, dtype=total.dtype))
                    else:
                        torch.sum(part, 1, out=of_ranges)  # rounds once
                return
            messages = map(_separated, _messages(received, batch, tokens, features), shapes)
            for message, of_rank in zip(messages, zip(*of_tensors, strict=True), strict=True):
                for total, part, heads, added in zip(self._totals, message, of_rank, self._added, strict=True):
                    own_heads = total[:, :, slice(*heads)]
                    (own_heads.add_ if added else own_heads.copy_)(part)

        return finish

    def result(self) -> list[Tensor]:
        return [total.to(self._dtype) for total in self._totals]


def _head_ranges(plan: HeadPlan, tensors: int) -> list[tuple[Range, ...]]:
    """Return the ranks' heads of q, k and v, of q alone, or of k and v."""
    return [plan.q_ranges] * (tensors != 2) + [plan.kv_ranges] * (2 * (tensors > 1))


def _shapes(tensors: Sequence[Tensor], of_tensors: Sequence[Sequence[Range]]) -> list[list[Shape]]:
    """Return each rank's heads and head dim of each tensor (..., head dim)."""
    by_tensor = [[(stop - start, x.shape[-1]) for start, stop in r] for x, r in zip(tensors, of_tensors, strict=True)]
    return list(map(list, zip(*by_tensor, strict=True)))


@lru_cache(maxsize=256)
def _even(ranges: tuple[Range, ...]) -> tuple[int, int, int, int] | None:
    """Return (number, first head, heads from one to the next, heads of each) of the different ranges, if these are
    alike and share no head, and each in turn belongs to equally many ranks; else None."""
    different = list(dict.fromkeys(ranges))
    (first, stop), copies = different[0], len(ranges) // len(different)
    width, stride = stop - first, different[1][0] - first if len(different) > 1 else stop - first
    starts = [first + index * stride for index in range(len(different)) for _ in range(copies)]
    alike = list(ranges) == [(start, start + width) for start in starts]
    return (len(different), first, stride, width) if alike and 0 < width <= stride else None


def _by_range(x_BSNH: Tensor, number: int, first: int, stride: int, width: int) -> Tensor:
    """Return the heads of each range, as a view (ranges, B, S, heads, H)."""
    rows, tokens, heads, features = x_BSNH.stride()
    size = (number, *x_BSNH.shape[:2], width, x_BSNH.shape[3])
    strides = (stride * heads, rows, tokens, heads, features)
    return x_BSNH.as_strided(size, strides, x_BSNH.storage_offset() + first * heads)


def _by_rank(x_BSNH: Tensor, even: tuple[int, int, int, int], ranks: int, sharing: int) -> Tensor:
    """Return the heads of each rank, as a view (KV ranges, ranks of each, B * S, X) unless tokens or heads are apart.
    even: of `_even`. sharing: ranks of each KV range."""
    number, first, stride, width = even
    (batch, tokens, _, head), (row, token, *rest) = x_BSNH.shape, x_BSNH.stride()
    if rest != [head, 1] or (batch > 1 and row != tokens * token):
        x_BSNH, token = x_BSNH.contiguous(), x_BSNH.shape[2] * head
    between = (stride * sharing, stride) if number == ranks else (stride, 0)  # ranks share keys, not queries
    size = (ranks // sharing, sharing, batch * tokens, width * head)
    strides = (between[0] * head, between[1] * head, token, 1)
    return x_BSNH.as_strided(size, strides, x_BSNH.storage_offset() + first * head)


def _messages(flat: Tensor, batch: int, tokens: int, features: Sequence[int]) -> list[Tensor]:
    """Return views (B, S, X) of the messages in a buffer, by rank."""
    parts = flat.split([batch * tokens * x for x in features])
    return [part.view(batch, tokens, x) for part, x in zip(parts, features, strict=True)]


def _separated(x: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Return views (..., heads, head dim) of the tensors in (..., X)."""
    parts = x.split([prod(shape) for shape in shapes], dim=-1)
    return tuple(part.view(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True))
