"""ZeRO stages 0 to 3 (arXiv 1910.02054, section 5) over dp_shard x sp with FSDP2; the norm of gradients sharded so.

    stage   sharded between steps      unsharded during a step             gradients are reduced
    0       nothing                    everything                          once per step
    1       all                        parameters, gradients               once per step
    2       all                        parameters                          every micro-batch
    3       all                        one block's parameters at a time    every micro-batch

Sequence-parallel ranks shard parameters just like data-parallel ranks. In stages 1 and 2, FSDP2 keeps parameters
sharded between steps too: the all-gather that ZeRO performs after the optimizer step happens in the next forward, with
the same number of bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from .mesh import ParallelMesh, local_tensor


def apply_fsdp(
    model: nn.Module,
    mesh: ParallelMesh,
    blocks: Iterable[nn.Module],
    *,
    param_dtype: torch.dtype = torch.float32,
    zero: int = 3,
    experts: Collection[nn.Module] = (),
    offload: bool = False,
) -> nn.Module:
    """Shard a model in place: each of `blocks` (the repeated layers) is gathered separately, the rest with the root.

    Gradients are SUMMED over all ranks, in fp32: divide the loss by the global number of tokens. Parameters that are
    already DTensors over tp or ep are sharded on top of that.

    Args:
        param_dtype: dtype of parameters and activations in forward and backward; sharded parameters and gradient
            reduction stay fp32.
        experts: modules inside the blocks with expert-parallel parameters, which are sharded over efsdp instead of
            fsdp.
        offload: keep sharded parameters and their gradients in host memory, pinned for a GPU, where the optimizer then
            updates them; they are copied to the device to be gathered. Give parameters memory on the CPU, and buffers
            on the device.

    Raises ValueError for stage 0 with experts where ep or tp is above 1.
    """
    if zero == 0 and experts and mesh.size("ep") * mesh.size("tp") > 1:
        raise ValueError(
            f"zero=0 replicates experts on every rank of dp x sp, but ep={mesh.size('ep')} x tp={mesh.size('tp')} "
            f"divides them: use zero=1"
        )
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    place: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(mesh.device_type == "cuda")} if offload else {}
    shards = mesh.device_mesh("loss", "unsharded") if zero == 0 else _shards(mesh, "fsdp", mesh.parameter_mesh)
    expert_shards = shards if zero == 0 else _shards(mesh, "efsdp", mesh.expert_mesh)
    ranks = expert_shards.size(-1)

    def placement(parameter: nn.Parameter) -> Shard:
        experts, rows = local_tensor(parameter).shape[:2]
        # With fewer experts than ranks, shard each expert's rows, if FSDP2 can divide them evenly.
        return Shard(1 if experts < ranks and rows % ranks == 0 else 0)

    for module in experts:
        fully_shard(
            module,
            mesh=expert_shards,
            mp_policy=replace(policy, cast_forward_inputs=False),  # routing weights stay float32
            reshard_after_forward=zero == 3,
            shard_placement_fn=placement,
            **place,
        )
    blocks = list(blocks)
    for block in blocks:
        fully_shard(block, mesh=shards, mp_policy=policy, reshard_after_forward=zero == 3, **place)
    # No reshard: the backward needs the root's parameters first. Its inputs already have the intended dtype.
    policy = replace(policy, cast_forward_inputs=False)
    fully_shard(model, mesh=shards, mp_policy=policy, reshard_after_forward=False, **place)
    # A layer with experts stops the host for its routing. What follows is gathered before, and not once it gets there.
    units = [[block, *(module for module in block.modules() if module in experts)] for block in blocks]
    for order, ahead in ((units, "forward"), (units[::-1], "backward")):
        for here, following in pairwise(order):
            if len(here) > 1:
                getattr(here[0], f"set_modules_to_{ahead}_prefetch")(following)
    for sharded in _fsdp_modules(model):
        # FSDP2 averages by default; gloo has no pre-multiplied sum, so force a plain one. One rank would divide a copy.
        if (expert_shards if sharded in experts else shards).size() > 1:
            sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return model


def before_micro_batch(model: nn.Module, zero: int, last: bool) -> None:
    """Configure what the next forward and backward of a sharded model reshard and reduce.

    Stages 0 and 1 accumulate unsharded gradients and reduce them once; stages 2 and 3 reduce-scatter them every time
    and all-reduce over dp_replicate once. In stages 1 and 2, parameters stay unsharded between micro-batches.
    """
    for module in _fsdp_modules(model):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last or zero >= 2, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(last or zero == 3, recurse=False)


@contextmanager
def gathered(model: nn.Module, zero: int) -> Iterator[None]:
    """Hold all parameters of a sharded model whole in the block, in `param_dtype`, for forwards without gradients.

    Collective over the ranks that share them. `model` has run a step before.
    """
    for module in _fsdp_modules(model):
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in _fsdp_modules(model):
            module.set_reshard_after_forward(zero == 3 and module is not model, recurse=False)
        forget_forwards(model)


def forget_forwards(model: nn.Module) -> None:
    """Shard a model again after forwards whose backwards never come, and for which FSDP2 would prefetch."""
    if hasattr(model, "reset_iter_state"):  # from torch 2.13 on
        model.reset_iter_state()  # type: ignore[operator]
        return
    for module in _fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        state._finalize_backward()
        module.reshard()


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _shards(mesh: ParallelMesh, axis: str, view: Callable[..., DeviceMesh]) -> DeviceMesh:
    return view("dp_replicate", axis) if mesh.size("dp_replicate") > 1 else view(axis)


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
    if not isinstance(grad, DTensor):
        return ranks
    sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
    return ranks / math.prod(size for size, placement in sizes if not placement.is_replicate())
