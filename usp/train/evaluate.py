"""Evaluation on held-out data: the mean loss of its targets, the same on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel import ParallelMesh
from usp.config import TrainConfig
from usp.data.cache import StoreFolder
from usp.data.files import DataFiles
from usp.data.packing import PackedRows
from usp.data.reader import one_epoch
from usp.losses.output_heads import NextTokenLoss
from usp.sp.batch import IGNORED_LABEL, split_rows

from .engines.base import Engine
from .step import part_of, sum_over_ranks


@dataclass(frozen=True)
class HeldOut:
    """Held-out data: its files or its token store, and its rows in the order of the store."""

    data: DataFiles | StoreFolder
    packed: PackedRows

    @property
    def identity(self) -> str:
        """What losses that can be compared have in common."""
        return f"{self.packed.store.manifest.digest}, seq_len {self.packed.seq_len}"


@dataclass
class Evaluations:
    """The losses on held-out data so far, by step; `identity` says on which data."""

    identity: str
    losses: dict[int, float] = field(default_factory=dict)

    def best_first(self) -> list[int]:
        """Return the steps from the lowest loss on; of equal ones the earlier first."""
        return sorted(self.losses, key=lambda step: (self.losses[step], step))

    def to_extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as JSON values."""
        return {"identity": self.identity, "losses": {str(step): loss for step, loss in self.losses.items()}}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Take over the losses of a checkpoint, if they are of the same data."""
        if extra.get("identity") == self.identity:
            self.losses = {int(step): loss for step, loss in extra["losses"].items()}


def perplexity(loss: float) -> float:
    """Return e to the power of a mean cross-entropy; inf where that is not a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def held_out_loss(
    engine: Engine,
    mesh: ParallelMesh,
    held_out: HeldOut,
    config: TrainConfig,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> float:
    """Return the mean cross-entropy over the targets of `held_out`, without the load-balancing loss. Collective.

    Every token is a target once, except those that begin a document or a row. `progress` is called at every batch.
    """
    total = targets = 0.0
    for batch in one_epoch(held_out.packed, mesh.size("batch") * config.batch_size, part_of(mesh, config)):
        progress()
        local = batch.to(device)
        targets += int((local["shift_labels"] != IGNORED_LABEL).sum()) if engine.stages[-1].last else 0
        total += engine.evaluate(split_rows(local, config.micro_batches), NextTokenLoss(global_tokens=1)).item()
    total, targets = sum_over_ranks([total, targets], mesh, device)
    return total / targets
