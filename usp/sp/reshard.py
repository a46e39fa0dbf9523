"""Moving a sharded sequence from one layout to another, with one message between each pair of ranks.

Layers that work in sequence order have no use for the striped layout, whose spans are single tokens: they run on the
contiguous one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from attention import Channel, Keep, SequenceLayout

from .spans import SentBytes


@dataclass(frozen=True)
class ReshardPlan:
    """One rank's part of moving tokens from layout `source` to layout `destination` over the same grid.

    Attributes:
        rank: this rank in the grid, ring_rank * ulysses + ulysses_rank.
    """

    source: SequenceLayout
    destination: SequenceLayout
    rank: int

    @cached_property
    def inverse(self) -> ReshardPlan:
        return ReshardPlan(self.destination, self.source, self.rank)

    @cached_property
    def sends(self) -> tuple[Tensor, ...]:
        """The indices of this rank's tokens for each rank, in order of position."""
        return _shared(self.source, self.destination, self.rank)

    @cached_property
    def receives(self) -> tuple[Tensor, ...]:
        """Where the tokens of each rank go among this rank's, in order of position."""
        return _shared(self.destination, self.source, self.rank)

    def wire_bytes(self, rows: int, width: int, dtype: torch.dtype) -> SentBytes:
        """Predict the bytes that this rank sends for (rows, local_len, width) and its gradient."""
        sent, received = (
            sum(len(index) for peer, index in enumerate(indices) if peer != self.rank)
            for indices in (self.sends, self.receives)
        )
        per_token = rows * width * dtype.itemsize
        return SentBytes(sent * per_token, received * per_token)


def _positions(layout: SequenceLayout, rank: int) -> Tensor:
    return layout.positions(*divmod(rank, layout.ulysses))


def _shared(own: SequenceLayout, others: SequenceLayout, rank: int) -> tuple[Tensor, ...]:
    """Return, for each rank, which of `rank`'s tokens under `own` it holds under `others`, in order of position."""
    holder = torch.empty(own.seq_len, dtype=torch.int64)
    for peer in range(own.ring * own.ulysses):
        holder[_positions(others, peer)] = peer
    positions = _positions(own, rank)
    order = positions.argsort()
    owners = holder[positions[order]]
    return tuple(order[owners == peer] for peer in range(own.ring * own.ulysses))


class Reshard(torch.autograd.Function):
    """`apply(x, plan, channel, keep)`: (rows, tokens, width) in the source layout -> the same in the destination's."""

    @staticmethod
    def forward(ctx, x: Tensor, plan: ReshardPlan, channel: Channel, keep: Keep) -> Tensor:
        ctx.inverse, ctx.channel = plan.inverse, channel
        (moved,) = keep(("reshard", x.shape), lambda: (_move(x, plan, channel),))
        return moved

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _move(grad, ctx.inverse, ctx.channel), None, None, None


def _move(x: Tensor, plan: ReshardPlan, channel: Channel) -> Tensor:
    rows, _, width = x.shape
    out = x.new_empty(rows, plan.destination.local_len, width)
    parts = [x[:, index.to(x.device)] for index in plan.sends]
    received = [x.new_empty(rows, len(index), width) for index in plan.receives]
    received[plan.rank] = parts[plan.rank]
    sends, receives = (
        [(peer, part) for peer, part in enumerate(side) if peer != plan.rank and part.numel()]
        for side in (parts, received)
    )
    with record_function("reshard"):
        channel.post(sends, receives).wait()
    for index, part in zip(plan.receives, received, strict=True):
        out[:, index.to(x.device)] = part
    return out
