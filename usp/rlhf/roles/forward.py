"""Forward micro-batches through pipeline stages, without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parallel import ParallelMesh
from usp.hf.stage import CausalLMStage
from usp.losses.output_heads import Head
from usp.train.engines.base import MicroBatch


@torch.no_grad()
def forward_stages(
    stage: CausalLMStage,
    mesh: ParallelMesh,
    micro_batches: Sequence[MicroBatch],
    head: Head | None,
    *,
    dtype: torch.dtype,
    token_parts: int = 1,
) -> list[Tensor]:
    """Return the output of `head` for each micro-batch on the last stage; an empty list on the others.

    Collective over the mesh. Stages work concurrently: hidden states pass along the pp axis in micro-batch order.

    Args:
        stage: of this rank.
        head: None for hidden states.
        dtype: of hidden states.
        token_parts: ranks that hidden states are sharded over within an sp rank: tp under tp_sequence_parallel.
    """
    group, rank = mesh.group("pp"), mesh.rank("pp")
    outputs: list[Tensor] = []
    sending: dist.Work | None = None
    for batch in micro_batches:
        inputs = dict(batch)
        x = inputs.pop("input_ids")
        if not stage.first:
            shape = (x.shape[0], x.shape[1] // token_parts, stage.model.config.hidden_size)
            x = torch.empty(shape, dtype=dtype, device=x.device)
            dist.recv(x, group=group, group_src=rank - 1)
        with _without_balance(stage):
            output = stage(x, **inputs, head=head)
        if stage.last:
            outputs.append(output)
            continue
        if sending is not None:
            sending.wait()
        sending = dist.isend(sent := output.contiguous(), group=group, group_dst=rank + 1)
    if sending is not None:
        sending.wait()
        del sent  # keeps the buffer alive until it is sent
    if isinstance(stage, FSDPModule):
        # FSDP2 keeps weights gathered for a backward that never comes, and would miss later changes to them.
        stage.reset_iter_state()
    return outputs


@contextmanager
def _without_balance(stage: CausalLMStage) -> Iterator[None]:
    """Let the stage return what its head does: the load-balancing loss is part of losses alone."""
    balance, stage.balance = stage.balance, None
    try:
        yield
    finally:
        stage.balance = balance
