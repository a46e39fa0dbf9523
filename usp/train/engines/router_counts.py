"""The forward passes that count which experts a step's tokens choose, for its load-balancing loss (`usp.hf.balance`).

The layers run on every micro-batch without gradients and without the output head. That is exact for every layout and
schedule, and costs the time of a forward; nothing is kept, so it does not raise the peak memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parallel import ParallelMesh, rank_stages
from usp.hf.stage import CausalLMStage

from .base import MicroBatch


def count_choices(
    stages: Sequence[CausalLMStage],
    mesh: ParallelMesh,
    micro_batches: Sequence[MicroBatch],
    *,
    calls: Sequence[Callable[..., Any]] | None = None,
    schedule: str = "1f1b",
    sent: Sequence[Tensor] = (),
) -> None:
    """Give the last stage the step's counts, if its load-balancing loss is one of several micro-batches. Collective.

    Args:
        calls: how the stages are called, if not directly.
        schedule: places the stages on the pp ranks; sent: examples of what a stage sends for one micro-batch.
    """
    balance = stages[-1].balance
    if balance is None or balance.by_micro_batch:
        return
    balances: list[Tensor] = []
    if len(micro_batches) > 1:
        inputs = [{**batch, "head": None} for batch in micro_batches]
        balances = [chosen for _, chosen in forward_only(calls or stages, mesh, schedule, inputs, sent)]
        for stage in stages:
            if isinstance(stage, FSDPModule):
                # FSDP2 would prefetch for the backwards of these forwards, which never come.
                stage.reset_iter_state()
    if stages[-1].last:
        balance.set_step(balances)


@torch.no_grad()
def forward_only(
    stages: Sequence[Callable[..., Any]],
    mesh: ParallelMesh,
    schedule: str,
    micro_batches: Sequence[Mapping[str, Any]],
    stage_outputs: Sequence[Tensor],
) -> list[Any]:
    """Run this rank's stages forward on all micro-batches; return the outputs of the last stage, if it is here.

    In step t stage s runs micro-batch t - s; then the messages of the step are exchanged together, so that ranks that
    send to one another do not wait for one another. Collective over the pp axis, which may have one rank.

    Args:
        stages: in the order of `rank_stages`; each takes and returns a tuple of tensors.
        micro_batches: keyword arguments of all stages, and `input_ids` for the first.
        stage_outputs: examples of what a stage sends for one micro-batch.
    """
    pp, group = mesh.size("pp"), mesh.group("pp")
    owner = {stage: rank for rank in range(pp) for stage in rank_stages(schedule, pp, rank)}
    own = dict(zip(rank_stages(schedule, pp, mesh.rank("pp")), stages, strict=True))
    last, outputs = len(owner) - 1, []
    arrived: dict[int, tuple[Tensor, ...]] = {}  # inputs of the next step, by stage
    for step in range(len(micro_batches) + last):
        made: dict[int, Any] = {}
        for index, stage in own.items():
            if 0 <= step - index < len(micro_batches):
                options = dict(micro_batches[step - index])
                ids = options.pop("input_ids")
                made[index] = stage(*(arrived.pop(index) if index else (ids,)), **options)
        if last in made:
            outputs.append(made.pop(last))
        messages: list[dist.P2POp] = []
        for index in range(last):
            if not 0 <= step - index < len(micro_batches) or not {index, index + 1} & own.keys():
                continue
            if {index, index + 1} <= own.keys():
                arrived[index + 1] = made[index]
            elif index in own:
                peer = dist.get_global_rank(group, owner[index + 1])
                messages += [dist.P2POp(dist.isend, x.contiguous(), peer, group) for x in made[index]]
            else:
                peer = dist.get_global_rank(group, owner[index])
                arrived[index + 1] = tuple(torch.empty_like(x, device=mesh.device_type) for x in stage_outputs)
                messages += [dist.P2POp(dist.irecv, x, peer, group) for x in arrived[index + 1]]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
    return outputs
