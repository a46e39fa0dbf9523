"""Norm and clipping of distributed gradients."""

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
    """Clip gradients in place to a total 2-norm of at most `max_norm` (inf disables it), and return the norm.

    Parameters may be DTensors on different meshes (tp, ep, efsdp), or plain tensors replicated on every rank of a
    pipeline stage; each element counts once. Collective over the mesh. The norm is summed in float64 and is the same
    on every rank.
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
    """Return how many of a stage's `ranks` hold each element."""
    if not isinstance(grad, DTensor):
        return ranks
    sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return ranks / math.prod(size for size, placement in sizes if not placement.is_replicate())
