"""What a call wants of a model's last stage, as a `Head`: something about each token, or an objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from usp.losses.output_heads import LastHidden
from usp.rlhf.graph.calls import Objective

from .rows import SEQUENCE


@dataclass(frozen=True)
class Say:
    """(B, S) log-probabilities of the next tokens at `temperature`, or values of the scalar head."""

    head: Literal["logprobs", "values"]
    temperature: float = 1.0

    def __call__(self, last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.head == "values":
            return last.values()
        return last.logprobs(inputs["shift_labels"], self.temperature)[0]


@dataclass(frozen=True, eq=False)
class Minimise:
    """An objective's share of the loss, and in `metrics` what it says of each micro-batch.

    Attributes:
        sp_group: the ranks that share a sequence.
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
    """`graph.Sequences` of one row.

    Attributes:
        number_BS: which of the row's `count` sequences each of this rank's tokens is of; `count` for padding.
    """

    number_BS: Tensor
    count: int
    group: dist.ProcessGroup

    @staticmethod
    def of(inputs: Mapping[str, Tensor], group: dist.ProcessGroup) -> RowSequences:
        """Those of a micro-batch that `rows.micro_batches` made."""
        borders = inputs["cu_seqlens"]
        # A pipeline pads borders by repeating the last.
        return RowSequences(inputs[SEQUENCE], int((borders[:, 1:] > borders[:, :-1]).sum()), group)

    def sums(self, x_BS: Tensor) -> Tensor:
        own = x_BS.new_zeros(self.count + 1).index_add(0, self.number_BS.flatten(), x_BS.flatten())
        return _SumOverRanks.apply(own[:-1], self.group)

    def share(self, loss: Tensor) -> Tensor:
        return loss / self.group.size()


class _SumOverRanks(torch.autograd.Function):
    """The sum over a group. What is made of it on every rank counts, so the gradient is summed too."""

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
