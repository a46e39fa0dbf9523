"""The interface of an engine, and the optimizer that all engines use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from usp.hf.stage import CausalLMStage
from usp.losses.output_heads import Head

# input_ids, position_ids, cu_seqlens, shift_labels (see `usp.shard_batch`), and other inputs of the head, sharded alike
MicroBatch = Mapping[str, Tensor]


class Engine(Protocol):
    """Trains the stages of this rank. Every rank calls every method, in the same order."""

    stages: Sequence[CausalLMStage]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        """Accumulate the step's gradients; return this rank's share of the loss, float32, 0-dim, detached.

        The loss is the sum of the shares over the loss axis on the last pipeline stage; other stages return zero.
        """

    def evaluate(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        """Return this rank's share of the loss as `forward_backward`, without gradients and load-balancing loss."""

    def step(self, learning_rate: float, max_norm: float) -> float:
        """Clip gradients to `max_norm`, update the weights, clear gradients; return the norm before clipping.

        Weights are not updated if the norm is not finite.
        """

    def state(self) -> dict[str, Tensor]:
        """Return weights and optimizer state under names that depend on neither layout nor engine.

        "model.<name>" and "optimizer.<name>.exp_avg", ".exp_avg_sq", ".step" (Muon: ".momentum_buffer"), with
        transformers' names; of persistent buffers and frozen parameters only "model.<name>", unless adapters are
        trained. DTensors of the global shape, or plain tensors that are the same on every rank.
        """

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`: the result of `state()`, its tensors filled from a checkpoint."""


@dataclass(frozen=True)
class AdamW:
    """AdamW; the learning rate is an argument of every step."""

    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def over(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """Return torch's fused AdamW over `parameters`, with weight decay on matrices only.

        Parameters are grouped by their device mesh, because one multi-tensor update cannot span several.
        """
        groups: dict[Any, dict[str, Any]] = {}
        for parameter in parameters:
            decay = self.weight_decay if parameter.ndim >= 2 else 0.0
            key = (decay, parameter.device_mesh if isinstance(parameter, DTensor) else None)
            groups.setdefault(key, {"params": [], "weight_decay": decay})["params"].append(parameter)
        return torch.optim.AdamW(list(groups.values()), betas=self.betas, eps=self.eps, fused=True)

    @staticmethod
    def first_state(parameter: Tensor) -> dict[str, Tensor]:
        """Return the state that the first step would make: the count is where the fused kernel updates it."""
        moment = partial(torch.zeros_like, parameter.detach())
        return {"step": torch.zeros((), device=parameter.device), "exp_avg": moment(), "exp_avg_sq": moment()}
