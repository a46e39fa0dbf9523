"""What a role's model is, in whatever layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from usp.hf.models import ModelConfig
from usp.rlhf.plan.plan import CallLayout
from usp.train.build import EngineRecipe
from usp.train.engines.base import AdamW


@dataclass(frozen=True, eq=False)
class RoleSpec:
    """Everything but ranks and degrees.

    Attributes:
        role: its name, for messages.
        source: a preset's name or a folder, whose weights it starts from.
        config: from `load_model_config(source, head, new_head)`.
        new_head: `source` is a causal LM's folder and the scalar head is drawn from the seed.
        seed: of drawn weights.
        dtype: of forward and backward, and of weights that are not trained. Trained ones are float32.
        optimizer, learning_rate, max_grad_norm: of a trained role; the rate is the first one, see `RoleModel`.
        kernel, loss_chunk, mlp_tile, ac: as train.py's flags of these names (--attention-kernel for kernel).
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
    mlp_tile: int = 0
    ac: str = "none"

    def recipe(self, layout: CallLayout, trained: bool) -> EngineRecipe:
        """How its stages are built in a layout, to be trained there or not."""
        return EngineRecipe(
            model=self.config,
            dtype=self.dtype,
            zero=layout.zero if trained or layout.zero else None,
            optimizer=self.optimizer if trained else None,
            sp_layout=layout.sp_layout,
            kernel=self.kernel,
            tp_sequence_parallel=layout.tp_sequence_parallel,
            ac=self.ac if trained else "none",
            mlp_tile=self.mlp_tile,
            loss_chunk=self.loss_chunk,
            weights_dtype=torch.float32 if trained else self.dtype,
        )
