"""A role's model without its layout, and its interface to the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from parallel import ParallelMesh
from usp.fields import shared_values
from usp.hf.lora import Lora
from usp.hf.models import ModelConfig
from usp.rlhf.graph import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.samples import Samples
from usp.train.build import EngineRecipe
from usp.train.engines.base import AdamW


@dataclass(frozen=True, eq=False)
class RoleSpec:
    """A role's model and training options, without ranks and degrees.

    Attributes:
        source: preset, or folder to load the weights from.
        config: from `load_model_config(source, head, new_head)`.
        new_head: `source` is a causal LM without a scalar head; initialize one from the seed.
        seed: for random weights.
        dtype: of forward and backward, and of weights that this copy does not train. Trained weights are float32.
        optimizer, learning_rate, max_grad_norm: for a trained role; `RoleModel.learning_rate` may change between steps.
        loss_chunk: tokens whose logits exist at a time in calls whose layout says nothing.
        balance, router_balance: weight and scope of the routers' load-balancing loss where the role is trained; see
            `EngineRecipe`. A step is a mini-batch.
        lora: adapters, which are trained instead of the weights of `source`.
    """

    role: str
    source: str
    config: ModelConfig
    new_head: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float32
    optimizer: AdamW | None = None
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0
    kernel: str = "auto"
    loss_chunk: int = 2048
    balance: float = 0.0
    router_balance: str = "step"
    lora: Lora | None = None

    def recipe(self, layout: CallLayout, trained: bool) -> EngineRecipe:
        """Return how to build the model's stages and engine in a layout."""
        different = {
            "model": self.config,
            "zero": layout.zero if trained or layout.zero else None,
            "optimizer": self.optimizer if trained else None,
            "loss_chunk": layout.loss_chunk or self.loss_chunk,
            "balance": self.balance if trained else 0.0,
            "weights_dtype": torch.float32 if trained and self.lora is None else self.dtype,
        }
        return EngineRecipe(**shared_values(self, EngineRecipe) | shared_values(layout, EngineRecipe) | different)


class Role(Protocol):
    """One copy of a role's weights in the layout of a call, without memory at first.

    Every rank of the mesh makes the same calls. Only the ranks in `CallLayout.leaders` return samples.
    """

    def weights(self) -> Mapping[str, Tensor]:
        """Return parameters and persistent buffers by global names, without those that training leaves as they are."""

    def fill(self) -> None:
        """Allocate and initialize the weights."""

    def allocate(self) -> None:
        """Allocate the weights without initializing them. Frozen ones are initialized the first time, and stay."""

    def release(self) -> None:
        """Free the memory of the weights."""

    def offload(self) -> None:
        """Move the weights to the host."""

    def load(self) -> None:
        """Move the weights back to the device."""

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        """Respond to prompts, by prompt id: samples p * group_size + k, with the keys of `GENERATED`."""

    def inference(self, samples: Samples, work: Inference, output: str, layout: CallLayout | None = None) -> Samples:
        """Return the samples with only the key `output`; see `RoleModel.inference`."""

    def train_step(self, mini_batches: Sequence[Samples], work: TrainStep) -> Mapping[str, float]:
        """Train on this data-parallel rank's part of each mini-batch; return the same metrics on every rank."""


# The call, with its layout, is the role's train step for the copy that the optimizer updates, else the first call that
# uses the copy.
BuildRole: TypeAlias = Callable[[ModelCall, CallLayout, ParallelMesh], Role]
