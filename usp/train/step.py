"""The training step: which part of a global batch this rank takes, and from that to new weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ParallelMesh
from usp.config import TrainConfig
from usp.data.reader import Part
from usp.losses.cross_entropy import global_token_count
from usp.losses.output_heads import NextTokenLoss
from usp.sp.axes import SpAxes
from usp.sp.batch import split_rows

from .engines.base import Engine


def part_of(mesh: ParallelMesh, config: TrainConfig) -> Part:
    """Return which rows of every global batch this rank trains on, and which tokens of them."""
    axes = SpAxes.of(mesh)
    layout = axes.layout(config.sp_layout, config.seq_len)
    return Part.of(
        layout, axes.ring_rank, axes.ulysses_rank, first=mesh.rank("batch") * config.batch_size, rows=config.batch_size
    )


def sum_over_ranks(values: Sequence[float], mesh: ParallelMesh, device: torch.device) -> list[float]:
    """Sum over all ranks; values that tensor-parallel ranks share count once. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    for axis in ("pp", "loss", "tp"):
        dist.all_reduce(total, group=mesh.group(axis))
    return (total / mesh.size("tp")).tolist()


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
        batch: this rank's part of the global batch, as `shard_batch` and `Batch.to` return it.
        before_update: takes this rank's share of the loss (see `Engine.forward_backward`) once the gradients are there,
            and returns the loss over all ranks; where that is not finite, the weights are not updated.

    Returns:
        The loss as `before_update` returned it, and the gradient norm before clipping: nan if the loss is not finite.
    """
    tokens = max(1, int(global_token_count(batch["shift_labels"], mesh)))  # with chats, a batch may have no target
    share = engine.forward_backward(split_rows(batch, config.micro_batches), NextTokenLoss(tokens))
    loss = before_update(share)
    return loss, engine.step(learning_rate, config.max_grad_norm) if math.isfinite(loss) else math.nan
