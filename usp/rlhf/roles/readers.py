"""Heads for a model's last pipeline stage: per-token outputs for inference, an objective's loss for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from usp.losses.output_heads import LastHidden
from usp.rlhf.graph.calls import Objective

from .rows import SEQUENCE


@dataclass(frozen=True)
class TokenOutputs:
    """A head that returns (B, S) log-probabilities of the next tokens at `temperature`, or values."""

    head: Literal["logprobs", "values"]
    temperature: float = 1.0

    def __call__(self, last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.head == "values":
            return last.values()
        return last.logprobs(inputs["shift_labels"], self.temperature)[0]


@dataclass(frozen=True, eq=False)
class ObjectiveLoss:
    """A head that returns this rank's share of an objective's loss.

    Attributes:
        sp_group: the sp axis.
        metrics: of each micro-batch so far.
    """

    objective: Objective
    sp_group: dist.ProcessGroup
    metrics: list[dict[str, Tensor]] = field(default_factory=list)

    def __call__(self, last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
        objective, entropy = self.objective, None
        if objective.head == "values":
            output = last.values()
        else:
            output, entropy = last.logprobs(inputs["shift_labels"], objective.temperature, objective.entropy)
        given = {key: inputs[key] for key in objective.keys}
        loss, metrics = objective(output, entropy, given, RowSequences.of(inputs, self.sp_group))
        self.metrics.append({**metrics, "loss": loss.detach()})
        return loss


@dataclass(frozen=True, eq=False)
class RowSequences:
    """`Sequences` of one row.

    Attributes:
        sequence_BS: index of the sequence that each of this rank's tokens belongs to; `count` for padding.
        count: sequences in the row.
    """

    sequence_BS: Tensor
    count: int
    group: dist.ProcessGroup

    @staticmethod
    def of(inputs: Mapping[str, Tensor], group: dist.ProcessGroup) -> RowSequences:
        """Read the sequences from a micro-batch of `rows.micro_batches`."""
        # A pipeline pads cu_seqlens by repeating the last boundary.
        return RowSequences(inputs[SEQUENCE], int((inputs["cu_seqlens"].diff() > 0).sum()), group)

    def sums(self, x_BS: Tensor) -> Tensor:
        own = x_BS.new_zeros(self.count + 1).index_add(0, self.sequence_BS.flatten(), x_BS.flatten())
        return _SumOverRanks.apply(own[:-1], self.group)

    def spread(self, x_N: Tensor) -> Tensor:
        return pad(x_N, (0, 1))[self.sequence_BS]

    def share(self, loss: Tensor) -> Tensor:
        return loss / self.group.size()


class _SumOverRanks(torch.autograd.Function):
    """Sum over a group. Every rank's use of the sum contributes to the loss, so the gradient is summed too."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup):
        ctx.group = group
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_reduced(grad, ctx.group), None


def _all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
