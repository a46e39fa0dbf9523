"""What every engine does, and the optimiser that all of them use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from usp.hf.stage import CausalLMStage
from usp.losses.output_heads import Head

# input_ids, position_ids, cu_seqlens, shift_labels (see `usp.shard_batch`), and what else the head takes, lying so
MicroBatch = Mapping[str, Tensor]


class Engine(Protocol):
    """Trains the stages of this rank. Every rank calls every method, in the same order."""

    stages: Sequence[CausalLMStage]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        """Add the step's gradients up; gives this rank's share of the loss, float32, 0-dim, detached.

        The sum of the shares over the loss axis (on the last pipeline stage; zero elsewhere) is the loss.
        """

    def step(self, learning_rate: float, max_norm: float) -> float:
        """Clip the gradients to `max_norm`, update the weights, forget the gradients; gives the norm before clipping.

        A norm that is not finite leaves the weights as they were.
        """

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser state under names that no layout and no engine changes.

        "model.<name>" and "optimizer.<name>.exp_avg", ".exp_avg_sq", ".step", with transformers' names of parameters;
        DTensors of the global shape, or plain tensors that every rank holds alike.
        """

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`: what `state()` gave, its tensors filled from a checkpoint."""


@dataclass(frozen=True)
class AdamW:
    """What the optimiser is; its learning rate comes with every step."""

    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def over(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """torch's AdamW that decays matrices only.

        Parameters are grouped by the mesh they lie on, because one multi-tensor update cannot span several.
        """
        groups: dict[Any, dict[str, Any]] = {}
        for parameter in parameters:
            decay = self.weight_decay if parameter.ndim >= 2 else 0.0
            key = (decay, parameter.device_mesh if isinstance(parameter, DTensor) else None)
            groups.setdefault(key, {"params": [], "weight_decay": decay})["params"].append(parameter)
        return torch.optim.AdamW(list(groups.values()), betas=self.betas, eps=self.eps)
