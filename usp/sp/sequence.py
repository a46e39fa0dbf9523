"""Sharding of global sequences, and its inverse."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from parallel import ParallelMesh

from .axes import SpAxes


def shard_sequence(x: Tensor, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag", dim: int = 1) -> Tensor:
    """Return this rank's shard of a global tensor that every sequence-parallel rank holds; no communication.

    `x.shape[dim]` is the global length; the shard has length / (ring * ulysses). Differentiable.

    Raises:
        ValueError: for an unknown layout, or a length that it cannot divide.
    """
    axes = SpAxes.of(mesh)
    positions = axes.positions(axes.layout(layout, x.shape[dim]))
    return x.index_select(dim, positions.to(x.device))


def unshard_sequence(x: Tensor, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag", dim: int = 1) -> Tensor:
    """Gather all ranks' shards in global order: the inverse of `shard_sequence`. Collective.

    The gradient is that of the sum of all ranks' losses: the ranks' gradients are summed, and each gets its shard.
    """
    axes = SpAxes.of(mesh)
    if axes.ring * axes.ulysses == 1:
        return x
    ordered = axes.layout(layout, x.shape[dim] * axes.ring * axes.ulysses)
    order = torch.cat([ordered.positions(r, u) for r in range(axes.ring) for u in range(axes.ulysses)])
    gathered = _Gather.apply(x.movedim(dim, 0), axes)
    return gathered.index_select(0, order.argsort().to(x.device)).movedim(0, dim)


class _Gather(torch.autograd.Function):
    """(s, ...) of each rank -> (ring * ulysses * s, ...), ulysses innermost."""

    @staticmethod
    def forward(ctx, x: Tensor, axes: SpAxes) -> Tensor:
        ctx.axes = axes
        for group in (axes.ulysses_group, axes.ring_group):
            if group is not None:
                parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
                dist.all_gather(parts, x.contiguous(), group=group)
                x = torch.cat(parts)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        for group in (ctx.axes.ring_group, ctx.axes.ulysses_group):
            if group is not None:
                parts = [part.contiguous() for part in grad.chunk(group.size())]
                grad = torch.empty_like(parts[0])
                dist.reduce_scatter(grad, parts, group=group)
        return grad, None
