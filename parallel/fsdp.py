"""Parameters, gradients and optimiser state sharded over dp_shard x sp with FSDP2 (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .mesh import ParallelMesh


def apply_fsdp(
    model: nn.Module, mesh: ParallelMesh, blocks: Iterable[nn.Module], *, param_dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Shard a model in place: each of `blocks` (the repeated layers) is gathered on its own, the rest with the root.

    Sequence-parallel ranks hold parts of the same sequences, so they shard parameters like data-parallel ones.
    Gradients are SUMMED over all ranks, in fp32: divide the loss by the number of tokens of all ranks.

    Args:
        param_dtype: dtype of parameters and activations in forward and backward; the sharded originals and the
            reduction stay fp32.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    replicated = mesh.size("dp_replicate") > 1
    shards = mesh.device_mesh("dp_replicate", "fsdp") if replicated else mesh.device_mesh("fsdp")
    for block in blocks:
        fully_shard(block, mesh=shards, mp_policy=policy)
    fully_shard(model, mesh=shards, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP2 averages by default. gloo has no pre-multiplied sum, so the factor 1 must be a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model
