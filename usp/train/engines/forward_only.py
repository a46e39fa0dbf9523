"""Forward passes without gradients: they evaluate a model, and count which experts a step's tokens choose.

Nothing is kept for a backward, so they do not raise the peak memory, and they are exact for every layout and schedule.
The counts are for a step's load-balancing loss (`usp.hf.balance`), before its first backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parallel import ParallelMesh, rank_stages
from usp.hf.stage import CausalLMStage
from usp.losses.output_heads import Head

from .base import MicroBatch


def loss_share(
    stages: Sequence[CausalLMStage],
    mesh: ParallelMesh,
    micro_batches: Sequence[MicroBatch],
    head: Head,
    *,
    calls: Sequence[Callable[..., Any]] | None = None,
    schedule: str = "1f1b",
    sent: Sequence[Tensor] = (),
) -> Tensor:
    """Return `Engine.evaluate` of these stages. Collective. Arguments as in `count_choices`."""
    inputs = [{**batch, "head": head} for batch in micro_batches]
    with _evaluating(stages):
        shares = forward_only(stages, mesh, inputs, calls=calls, schedule=schedule, sent=sent)
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()  # with ZeRO 1 and 2, a backward would do it
    return sum(shares, torch.zeros((), device=mesh.device_type))


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

    The layers run on every micro-batch without the output head, which costs the time of a forward.

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
        outputs = forward_only(stages, mesh, inputs, calls=calls, schedule=schedule, sent=sent)
        balances = [chosen for _, chosen in outputs]
    if stages[-1].last:
        balance.set_step(balances)


@torch.no_grad()
def forward_only(
    stages: Sequence[CausalLMStage],
    mesh: ParallelMesh,
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    calls: Sequence[Callable[..., Any]] | None = None,
    schedule: str = "1f1b",
    sent: Sequence[Tensor] = (),
) -> list[Any]:
    """Run this rank's stages forward on all micro-batches; return the outputs of the last stage, if it is here.

    In step t stage s runs micro-batch t - s; then the messages of the step are exchanged together, so that ranks that
    send to one another do not wait for one another. Collective over the pp axis, which may have one rank.

    Args:
        stages: in the order of `rank_stages`.
        micro_batches: keyword arguments of all stages, and `input_ids` for the first.
        calls, schedule, sent: as in `count_choices`.
    """
    pp, group = mesh.size("pp"), mesh.group("pp")
    owner = {stage: rank for rank in range(pp) for stage in rank_stages(schedule, pp, rank)}
    own = dict(zip(rank_stages(schedule, pp, mesh.rank("pp")), calls or stages, strict=True))
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
                arrived[index + 1] = _sendable(made[index])
            elif index in own:
                peer = dist.get_global_rank(group, owner[index + 1])
                messages += [dist.P2POp(dist.isend, x.contiguous(), peer, group) for x in _sendable(made[index])]
            else:
                peer = dist.get_global_rank(group, owner[index])
                arrived[index + 1] = tuple(torch.empty_like(x, device=mesh.device_type) for x in sent)
                messages += [dist.P2POp(dist.irecv, x, peer, group) for x in arrived[index + 1]]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
    for module in stages:
        if isinstance(module, FSDPModule):
            # FSDP2 would prefetch for the backwards of these forwards, which never come.
            module.reset_iter_state()
    return outputs


def _sendable(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else output


@contextmanager
def _evaluating(stages: Sequence[CausalLMStage]) -> Iterator[None]:
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for stage in stages:
            stage.train()
