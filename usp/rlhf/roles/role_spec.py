"""The layout-independent description of a role's model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from usp.hf.lora.adapters import Lora
from usp.hf.models import ModelConfig
from usp.rlhf.plan.plan import CallLayout
from usp.train.build import EngineRecipe
from usp.train.engines.base import AdamW


@dataclass(frozen=True, eq=False)
class RoleSpec:
    """A role's model and training options, without ranks and degrees.

    Attributes:
        role: name, for messages.
        source: preset, or folder to load the weights from.
        config: from `load_model_config(source, head, new_head)`.
        new_head: `source` is a causal LM without a scalar head; initialize one from the seed.
        seed: for random weights.
        dtype: of forward and backward, and of weights that this copy does not train. Trained weights are float32.
        optimizer, learning_rate, max_grad_norm: for a trained role; `RoleModel.learning_rate` may change between steps.
        kernel: see `EngineRecipe`.
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
        return EngineRecipe(
            model=self.config,
            dtype=self.dtype,
            zero=layout.zero if trained or layout.zero else None,
            optimizer=self.optimizer if trained else None,
            sp_layout=layout.sp_layout,
            kernel=self.kernel,
            tp_sequence_parallel=layout.tp_sequence_parallel,
            ac=layout.ac,
            ac_offload=layout.ac_offload,
            mlp_tile=layout.mlp_tile,
            loss_chunk=layout.loss_chunk or self.loss_chunk,
            balance=self.balance if trained else 0.0,
            router_balance=self.router_balance,
            weights_dtype=torch.float32 if trained and self.lora is None else self.dtype,
            lora=self.lora,
        )
