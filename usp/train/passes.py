"""Passes over the stages of this rank: through a pipeline, and forward only.

Passes that are forward only evaluate a model, infer for RLHF, and count which experts a step's tokens choose for its
load-balancing loss. They keep nothing for a backward, so they do not raise the peak memory, and they are exact for
every layout and schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from usp.hf.stage import CausalLMStage
from usp.losses import Head
from usp.parallel import ParallelMesh, PipelineSchedule, rank_stages
from usp.parallel.fsdp import forget_forwards
from usp.parallel.pipeline import Pipeline
from usp.parallel.stages import ONE_STAGE

# input_ids, position_ids, cu_seqlens, shift_labels (see `usp.shard_batch`), other inputs of the head sharded alike, and
# images, as `CausalLMStage` takes them
MicroBatch = Mapping[str, Any]


def loss_share(
    stages: Sequence[CausalLMStage], mesh: ParallelMesh, micro_batches: Sequence[MicroBatch], head: Head, **options: Any
) -> Tensor:
    """Return `Engine.evaluate` of these stages. Collective. Options as of `forward_only`."""
    inputs = [{**batch, "head": head} for batch in micro_batches]
    for stage in stages:
        stage.eval()
    try:
        shares = forward_only(stages, mesh, inputs, **options)
    finally:
        for stage in stages:
            stage.train()
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()  # with ZeRO 1 and 2, a backward would do it
    return sum(shares, torch.zeros((), device=mesh.device_type))


def count_choices(
    stages: Sequence[CausalLMStage], mesh: ParallelMesh, micro_batches: Sequence[MicroBatch], **options: Any
) -> None:
    """Give the last stage the step's counts, if its load-balancing loss is one of several micro-batches. Collective.

    The layers run on every micro-batch without the output head, which costs the time of a forward. Options as of
    `forward_only`.
    """
    balance = stages[-1].balance
    if balance is None or balance.by_micro_batch:
        return
    balances: list[Tensor] = []
    if len(micro_batches) > 1:
        inputs = [{**batch, "head": None} for batch in micro_batches]
        outputs = forward_only(stages, mesh, inputs, **options)
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
    schedule: PipelineSchedule = ONE_STAGE,
    sent: Sequence[Tensor] = (),
) -> list[Any]:
    """Run this rank's stages forward on all micro-batches; return the outputs of the last stage, if it is here.

    In step t stage s runs micro-batch t - s; then the messages of the step are exchanged together, so that ranks that
    send to one another do not wait for one another. Collective over the pp axis, which may have one rank.

    stages: in the order of `rank_stages`.
    micro_batches: keyword arguments of all stages, and `input_ids` for the first.
    calls: how the stages are called, if not directly.
    schedule: places the stages on the pp ranks.
    sent: examples of what a stage sends for one micro-batch; the micro-batches have one shape.
    """
    pp, group = mesh.size("pp"), mesh.group("pp")
    owner = {stage: rank for rank in range(pp) for stage in rank_stages(schedule, pp, rank)}
    local = dict(zip(rank_stages(schedule, pp, mesh.rank("pp")), calls or stages, strict=True))
    last, outputs = len(owner) - 1, []
    arrived: dict[int, tuple[Tensor, ...]] = {}  # inputs of the next step, by stage
    for step in range(len(micro_batches) + last):
        computed: dict[int, Any] = {}
        for index, stage in local.items():
            if 0 <= step - index < len(micro_batches):
                options = dict(micro_batches[step - index])
                ids = options.pop("input_ids")
                computed[index] = stage(*(arrived.pop(index) if index else (ids,)), **options)
        if last in computed:
            outputs.append(computed.pop(last))
        messages: list[dist.P2POp] = []
        for index in range(last):
            if not 0 <= step - index < len(micro_batches) or not {index, index + 1} & local.keys():
                continue
            if {index, index + 1} <= local.keys():
                arrived[index + 1] = _sendable(computed[index])
            elif index in local:
                peer = dist.get_global_rank(group, owner[index + 1])
                messages += [dist.P2POp(dist.isend, x.contiguous(), peer, group) for x in _sendable(computed[index])]
            else:
                peer = dist.get_global_rank(group, owner[index])
                arrived[index + 1] = tuple(torch.empty_like(x, device=mesh.device_type) for x in sent)
                messages += [dist.P2POp(dist.irecv, x, peer, group) for x in arrived[index + 1]]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
    for module in stages:
        if isinstance(module, FSDPModule):
            forget_forwards(module)
    return outputs


def _sendable(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else output


@dataclass(eq=False)
class PipelineRunner:
    """Runner of the stages of this rank: `Engine`'s forward_backward and evaluate, of micro-batches of the same shapes.

    stages: in the order of `usp.parallel.rank_stages`, after `apply_fsdp` with `zero`.
    hidden_size, dtype: of the hidden states that a stage sends to the next.
    token_parts: ranks that share the tokens of a sequence-parallel rank: tp with tp_sequence_parallel.
    num_experts: of a model with a load-balancing loss, whose float32 counts (2, num_experts) are sent as well.
    """

    stages: Sequence[CausalLMStage]
    mesh: ParallelMesh
    schedule: PipelineSchedule
    zero: int
    hidden_size: int
    dtype: torch.dtype
    token_parts: int = 1
    num_experts: int = 0

    def __post_init__(self) -> None:
        # A pipeline keeps its receive buffers, so those of shapes that vary from step to step must not accumulate.
        self._prepare = lru_cache(maxsize=4)(self._pipeline)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        batch = joined(micro_batches)
        ids = batch.pop("input_ids")
        rows, tokens = micro_batches[0]["input_ids"].shape
        count_choices(self.stages, self.mesh, micro_batches, schedule=self.schedule, sent=self._sent(rows, tokens))
        return self._prepare(len(micro_batches), rows, tokens).step(ids, **batch, head=head)

    def evaluate(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        sent = self._sent(*micro_batches[0]["input_ids"].shape)
        return loss_share(self.stages, self.mesh, micro_batches, head, schedule=self.schedule, sent=sent)

    def _pipeline(self, micro_batches: int, rows: int, tokens: int) -> Pipeline:
        return Pipeline(
            self.stages,
            self.mesh,
            self.schedule,
            micro_batches=micro_batches,
            stage_outputs=self._sent(rows, tokens),
            zero=self.zero,
        )

    def _sent(self, rows: int, tokens: int) -> tuple[Tensor, ...]:
        """Return examples of what a stage sends to the next one for a micro-batch, without memory."""
        hidden = torch.empty(rows, tokens // self.token_parts, self.hidden_size, dtype=self.dtype, device="meta")
        return (hidden, torch.empty(2, self.num_experts, device="meta")) if self.num_experts else (hidden,)


def joined(micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Concatenate micro-batches of one shape to the batch whose consecutive rows they are.

    `cu_seqlens` become (rows, documents + 1); rows with fewer documents repeat their last boundary, and have no parent
    for these in `prefix_tree`. Raises ValueError if their `input_ids` differ in shape.
    """
    shapes = {tuple(batch["input_ids"].shape) for batch in micro_batches}
    if len(shapes) != 1:
        raise ValueError(f"micro-batches of input_ids {sorted(shapes)} must have the same shape in a pipeline")
    keys = [key for key, value in micro_batches[0].items() if key not in ("cu_seqlens", "prefix_tree")]
    whole = {key: torch.cat([batch[key] for batch in micro_batches]) for key in keys}
    if micro_batches[0].get("cu_seqlens") is not None:
        ((rows, _),) = shapes
        boundaries = [torch.atleast_2d(batch["cu_seqlens"]).expand(rows, -1) for batch in micro_batches]
        widest = max(part.shape[1] for part in boundaries)
        whole["cu_seqlens"] = torch.cat(
            [torch.cat([part, part[:, -1:].expand(-1, widest - part.shape[1])], dim=1) for part in boundaries]
        )
    if micro_batches[0].get("prefix_tree") is not None:
        parents = [torch.atleast_2d(batch["prefix_tree"]).expand(rows, -1) for batch in micro_batches]
        padded = [torch.nn.functional.pad(part, (0, widest - 1 - part.shape[1]), value=-1) for part in parents]
        whole["prefix_tree"] = torch.cat(padded)
    return whole
