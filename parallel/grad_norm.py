"""Sums, norm and clipping of distributed gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import ParallelMesh, local_tensor


def sum_tied_gradients(held: Sequence[nn.Parameter], mesh: ParallelMesh) -> None:
    """Sum the gradients of the copies of one parameter that the first and the last pipeline stage have, in place.

    Collective over `mesh.ends`, unless one rank has both stages. The copies must be sharded alike.

    Args:
        held: the copies of this rank: none, one, or two where it has both stages.
    """
    grads = [local_tensor(parameter.grad) for parameter in held if parameter.grad is not None]
    if len(grads) == 2:
        grads[1].copy_(grads[0].add_(grads[1]))
    elif grads and grads[0].numel():  # rows that do not divide evenly leave ranks without any, the same at both ends
        summed = grads[0].to(mesh.device_type)  # itself, unless gradients are in host memory
        dist.all_reduce(summed, group=mesh.ends)
        grads[0].copy_(summed)


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, mesh: ParallelMesh, copies: Collection[nn.Parameter] = ()
) -> float:
    """Clip gradients in place to a total 2-norm of at most `max_norm` (inf disables it), and return the norm.

    Parameters may be DTensors on different meshes (tp, ep, efsdp), or plain tensors replicated on every rank of a
    pipeline stage; each element counts once. Gradients may be in host memory. Collective over the mesh. The norm is
    summed in float64 and is the same on every rank.

    copies: those of `parameters` that another stage counts; they are clipped like the others.
    """
    ranks = mesh.size("loss") * mesh.size("tp")
    counted = {id(copy) for copy in copies}
    held = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in held if parameter.grad is not None]
    local = [local_tensor(grad) for grad in grads]
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    # Norms that a few kernels sum.
    alike: dict[tuple[float, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter, grad, norm in zip(held, grads, torch._foreach_norm(local, 2) if local else (), strict=True):
        if id(parameter) not in counted:
            alike[_copies(grad, ranks), norm.device, norm.dtype].append(norm)
    for (copies_of_each, *_), norms in alike.items():
        total += torch.stack(norms).double().square_().sum() / copies_of_each
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
    from torch.distributed.tensor import DTensor

    if not isinstance(grad, DTensor):
        return ranks
    sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return ranks / math.prod(size for size, placement in sizes if not placement.is_replicate())
