"""The norm of a gradient whose pieces lie on many ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .local import local_tensor
from .mesh import ParallelMesh


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, mesh: ParallelMesh) -> float:
    """Scale gradients in place so that the 2-norm of all of them together is at most `max_norm`; returns the norm.

    Parameters may be DTensors on different meshes (tp, ep, efsdp), or plain tensors that every rank of a pipeline
    stage holds; each element counts once. Collective over the whole mesh; the same number on every rank, from sums in
    float64. inf never scales.
    """
    ranks = mesh.size("loss") * mesh.size("tp")
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [local_tensor(grad) for grad in grads]
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for grad, norm in zip(grads, torch._foreach_norm(local, 2) if local else (), strict=True):
        total += norm.double().square() / _copies(grad, ranks)
    for axis in ("pp", "loss", "tp"):
        if mesh.size(axis) > 1:
            dist.all_reduce(total, group=mesh.group(axis))
    total_norm = math.sqrt(total.item())
    scale = max_norm / (total_norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_(local, scale)
    return total_norm


def _copies(grad: Tensor, ranks: int) -> float:
    """How many of a stage's `ranks` hold each element."""
    if not isinstance(grad, DTensor):
        return ranks
    sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return ranks / math.prod(size for size, placement in sizes if not placement.is_replicate())
