"""The training step: from this rank's part of a batch to new weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from parallel import ParallelMesh
from usp.config import TrainConfig
from usp.losses.cross_entropy import global_token_count
from usp.losses.output_heads import NextTokenLoss
from usp.sp.batch import split_rows

from .engines.base import Engine


def train_step(
    engine: Engine,
    mesh: ParallelMesh,
    batch: Mapping[str, Tensor],
    config: TrainConfig,
    learning_rate: float,
    before_update: Callable[[Tensor], float] = lambda share: 0.0,
) -> tuple[float, float]:
    """Run one optimizer step of next-token training. Collective.

    Args:
        batch: this rank's part of the rows and of the sequence, from `shard_batch`.
        before_update: takes this rank's share of the loss (see `Engine.forward_backward`) once the gradients are there,
            and returns the loss over all ranks; where that is not finite, the weights are not updated.

    Returns:
        The loss as `before_update` returned it, and the gradient norm before clipping: nan if the loss is not finite.
    """
    tokens = int(global_token_count(batch["shift_labels"], mesh))
    share = engine.forward_backward(split_rows(batch, config.micro_batches), NextTokenLoss(tokens))
    loss = before_update(share)
    return loss, engine.step(learning_rate, config.max_grad_norm) if math.isfinite(loss) else math.nan
