"""Evaluation on held-out data: the mean loss of its targets, in all and by position, the same on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from parallel import ParallelMesh
from usp.config import TrainConfig
from usp.data.cache import StoreFolder
from usp.data.files import DataFiles
from usp.data.packing import PackedRows
from usp.data.reader import one_epoch
from usp.losses.output_heads import LastHidden
from usp.sp.batch import IGNORED_LABEL, split_rows

from .engines.base import Engine
from .step import part_of, sum_over_ranks

FIRST = 16  # tokens before a target, at most, in the first range of positions
POSITION = "position"


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
    """One number of each evaluation so far, by step; `identity` says on which data.

    name: of these numbers: of losses the lowest is the best, of scores the highest.
    """

    identity: str
    values: dict[int, float] = field(default_factory=dict)
    name: Literal["losses", "scores"] = "losses"

    def best_first(self) -> list[int]:
        """Return the steps from the best number on; of equal ones the earlier first."""
        sign = 1 if self.name == "losses" else -1
        return sorted(self.values, key=lambda step: (sign * self.values[step], step))

    def to_extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as JSON values."""
        return {"identity": self.identity, self.name: {str(step): value for step, value in self.values.items()}}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Take over the numbers of a checkpoint, if they are of the same data."""
        if extra.get("identity") == self.identity:
            self.values = {int(step): value for step, value in extra[self.name].items()}


def perplexity(loss: float) -> float:
    """Return e to the power of a mean cross-entropy; inf where that is not a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean cross-entropy over held-out targets, and over those of each range of positions.

    by_position: {last: loss} of the targets at positions (last / 2, last] of their documents, where there are any;
        position p has p tokens of its document before it in its row, which are all that the model sees.
    """

    loss: float
    by_position: Mapping[int, float]


class LossByPosition:
    """A head that sums the losses of targets by where they are in their documents, and returns the sum of all.

    Attributes:
        lasts: last position of each range.
        totals: float64 (ranges, 2), on `device`: this rank's sum of losses in each range, and its targets.
    """

    def __init__(self, seq_len: int, device: torch.device) -> None:
        self.lasts = [FIRST]
        while self.lasts[-1] < seq_len - 1:
            self.lasts.append(2 * self.lasts[-1])
        self.totals = torch.zeros(len(self.lasts), 2, dtype=torch.float64, device=device)
        self._lasts = torch.tensor(self.lasts, device=device)

    def __call__(self, last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
        labels = inputs["shift_labels"]
        losses = -last.logprobs(labels, temperature=1.0)[0].double()
        values = torch.stack((losses, (labels != IGNORED_LABEL).double()), dim=-1)
        ranges = torch.bucketize(inputs[POSITION], self._lasts)
        self.totals.index_add_(0, ranges.flatten(), values.flatten(0, 1))
        return losses.sum()


def held_out_loss(
    engine: Engine,
    mesh: ParallelMesh,
    held_out: HeldOut,
    config: TrainConfig,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> HeldOutLoss:
    """Return the losses of the targets of `held_out`, without the load-balancing loss. Collective.

    Every token is a target once, except those that begin a document or a row. `progress` is called at every batch.
    """
    head = LossByPosition(config.seq_len, device)
    for batch in one_epoch(held_out.packed, mesh.size("batch") * config.batch_size, part_of(mesh, config)):
        progress()
        local = batch.to(device)
        local[POSITION] = local["position_ids"] + 1
        engine.evaluate(split_rows(local, config.micro_batches), head)
    totals = iter(sum_over_ranks(head.totals.flatten().tolist(), mesh, device))
    by_range = {last: (loss, targets) for last, loss, targets in zip(head.lasts, totals, totals, strict=True)}
    loss, targets = map(sum, zip(*by_range.values(), strict=True))
    return HeldOutLoss(loss / targets, {last: loss / n for last, (loss, n) in by_range.items() if n})
