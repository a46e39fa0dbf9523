"""The training step, its learning rate, and the evaluation on held-out data: the same on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from usp.attention import SequenceLayout, layout_name
from usp.config import CommonConfig, TrainConfig
from usp.data.batches import ImageBatch, Part, one_epoch
from usp.data.rows import PackedRows, WholeRows
from usp.hf.images import image_inputs
from usp.losses import LastHidden, NextTokenLoss, global_token_count
from usp.parallel import ParallelMesh
from usp.sp.sequence import IGNORED_LABEL, SpAxes, split_rows

from .engine import Engine

FIRST = 16  # tokens before a target, at most, in the first range of positions
POSITION = "position"


def part_of(
    mesh: ParallelMesh, config: TrainConfig, balanced: bool = False, images: Any = None, windows: tuple[int, ...] = (0,)
) -> Part:
    """Return which rows of a global batch this rank trains on, and which of their tokens; the others as in `Part`."""
    axes, name = SpAxes.of(mesh), layout_name(config.sp_layout, windows)
    return Part(
        layout=SequenceLayout(name, config.padded_len, axes.ring, axes.ulysses),  # of rows, not decided yet
        ring_rank=axes.ring_rank,
        ulysses_rank=axes.ulysses_rank,
        first=mesh.rank("batch") * config.batch_size,
        rows=config.batch_size,
        balanced=balanced,
        micro_batches=config.micro_batches,
        images=images,
        windows=windows,
    )


def sum_over_ranks(values: Sequence[float], mesh: ParallelMesh, device: torch.device) -> list[float]:
    """Sum over all ranks; values that tensor-parallel ranks share count once. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    for axis in ("pp", "loss", "tp"):
        if mesh.size(axis) > 1:
            dist.all_reduce(total, group=mesh.group(axis))
    return (total / mesh.size("tp")).tolist()


def backward(
    engine: Engine,
    mesh: ParallelMesh,
    batch: Mapping[str, Tensor],
    config: TrainConfig,
    images: Sequence[ImageBatch] = (),
) -> Tensor:
    """Compute the gradients of next-token training; return this rank's share of the loss, see `Engine`. Collective.

    Args:
        batch: this rank's part of the global batch, as `shard_batch` and `Batch.to` return it.
        images: of each micro-batch; none without images in the global batch.
    """
    tokens = max(1, int(global_token_count(batch["shift_labels"], mesh)))  # with chats, a batch may have no target
    micro_batches = with_images(engine, split_rows(batch, config.micro_batches), images)
    return engine.forward_backward(micro_batches, NextTokenLoss(tokens))


def with_images(
    engine: Engine, micro_batches: Sequence[dict[str, Tensor]], images: Sequence[ImageBatch]
) -> Sequence[dict[str, Any]]:
    """Return micro-batches with what the model takes of their images, if there are any."""
    if not images:
        return micro_batches
    model, found = engine.stages[0].model, list[dict[str, Any]]()
    for batch, read in zip(micro_batches, images, strict=True):
        pixels = {name: value.to(batch["input_ids"].device) for name, value in read.pixels.items()}
        found.append({**batch, "images": pixels | image_inputs(model, batch, read.ids, read.sizes, read.own)})
    return found


@dataclass(frozen=True)
class LearningRate:
    """A linear warmup, then a decay that ends at the last step.

    kind: cosine and linear decay from the end of the warmup on; constant does not; wsd (warmup, stable, decay: MiniCPM,
        arXiv 2404.06395, section 4) is constant, and decays linearly over the last `decay_steps`.
    steps: steps of the run, including `warmup_steps` and `decay_steps`.
    final: rate of the last step, as a fraction of the peak.
    """

    kind: str
    steps: int
    warmup_steps: int
    decay_steps: int
    final: float

    @classmethod
    def of(cls, config: CommonConfig, steps: int, warmup_steps: int) -> LearningRate:
        decay_steps = math.ceil(steps / 10) if config.lr_decay_steps < 0 else config.lr_decay_steps
        return cls(config.lr_schedule, steps, warmup_steps, decay_steps, config.lr_final)

    def at(self, step: int) -> float:
        """Return the rate of step 1, 2, ... as a fraction of the peak."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        begin = max(self.warmup_steps, self.steps - self.decay_steps) if self.kind == "wsd" else self.warmup_steps
        done = max(0, step - begin) / max(1, self.steps - begin)
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.final + (1 - self.final) * left

    def __str__(self) -> str:
        """Describe the schedule, as `after 10 warmup steps, cosine decay to 10%`."""
        if self.steps < self.warmup_steps:
            reached = f"{self.at(self.steps):.0%} of it in the last of {self.steps} steps"
            return f"{reached}, fewer than {self.warmup_steps} of warmup"
        after = f"after {self.warmup_steps} warmup steps"
        if self.kind == "constant":
            return f"{after}, constant"
        if self.kind == "wsd":
            return f"{after}, constant until a linear decay to {self.final:.0%} in the last {self.decay_steps} steps"
        return f"{after}, {self.kind} decay to {self.final:.0%}"


@dataclass(frozen=True)
class HeldOut:
    """A set of held-out data: its rows in the order of its store, and which of its files were left out. name: empty for
    the only one."""

    name: str
    packed: PackedRows
    left_out: str

    @property
    def identity(self) -> str:
        """What losses that can be compared have in common."""
        whole = ", whole documents" if isinstance(self.packed, WholeRows) else ""
        return f"{self.packed.store.manifest.digest}, seq_len {self.packed.seq_len}{whole}"


@dataclass
class Evaluations:
    """One number of each evaluation so far, by step; `identity` says on which data. name: of these numbers: of losses
    the lowest is the best, of scores the highest."""

    identity: str
    values: dict[int, float] = field(default_factory=dict)
    name: Literal["losses", "scores"] = "losses"

    def best_first(self) -> list[int]:
        """Return the steps from the best number on; of equal ones the earlier first."""
        sign = 1 if self.name == "losses" else -1
        return sorted(self.values, key=lambda step: (sign * self.values[step], step))

    def since_best(self) -> int:
        """Return how many evaluations came after the best one."""
        return sum(step > best for best in self.best_first()[:1] for step in self.values)

    def text(self, step: int) -> str:
        """Return the number of a step in words."""
        value = self.values[step]
        if self.name == "scores":
            return f"eval score {value:.4g}"
        return f"eval loss {value:.4f}, perplexity {perplexity(value):.4g}"

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
    part: Part,
    progress: Callable[[], None] = lambda: None,
) -> HeldOutLoss:
    """Return the losses of the targets of `held_out`, without the load-balancing loss. Collective. Every token of its
    rows is a target once, except those that begin a document or a row. part: of a global batch of training. `progress`
    is called at every batch."""
    head, part = LossByPosition(config.seq_len, device), replace(part, balanced=False)
    for batch in one_epoch(held_out.packed, mesh.size("batch") * config.batch_size, part):
        progress()
        local = batch.to(device)
        local[POSITION] = local["position_ids"] + 1
        engine.evaluate(with_images(engine, split_rows(local, config.micro_batches), batch.images), head)
    totals = iter(sum_over_ranks(head.totals.flatten().tolist(), mesh, device))
    by_range = {last: (loss, targets) for last, loss, targets in zip(head.lasts, totals, totals, strict=True)}
    loss, targets = map(sum, zip(*by_range.values(), strict=True))
    return HeldOutLoss(loss / targets, {last: loss / n for last, (loss, n) in by_range.items() if n})
