"""Micro-batches forward through pipeline stages, without gradients."""

from __future__ import annotations

from collections.abc import Sequence

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
    head: Head,
    *,
    dtype: torch.dtype,
    token_parts: int = 1,
) -> list[Tensor]:
    """What `head` gives for each micro-batch on the last stage; nothing on the others.

    Collective over the mesh; hidden states go from stage to stage along the pp axis in the order of micro-batches, so
    that stages work at the same time.

    Args:
        stage: the one of this rank.
        dtype: of hidden states.
        token_parts: ranks over which a sequence-parallel rank's tokens are shared: tp under tp_sequence_parallel.
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
        output = stage(x, **inputs, head=head)
        if stage.last:
            outputs.append(output)
            continue
        if sending is not None:
            sending.wait()
        sending = dist.isend(sent := output.contiguous(), group=group, group_dst=rank + 1)
    if sending is not None:
        sending.wait()
        del sent  # which had to live until here
    if isinstance(stage, FSDPModule):
        # FSDP2 waits for a backward: what it keeps gathered until then would hide weights that change meanwhile.
        stage.reset_iter_state()
    return outputs
