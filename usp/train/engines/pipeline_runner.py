"""Running a step's micro-batches through the pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from parallel import ParallelMesh
from parallel.pipeline import Pipeline
from usp.hf.stage import CausalLMStage
from usp.losses.output_heads import Head

from .base import MicroBatch
from .forward_only import count_choices, loss_share


@dataclass(eq=False)
class PipelineRunner:
    """Runs the stages of this rank. Every rank calls it in the same order, with micro-batches of the same shapes.

    Attributes:
        stages: in the order of `parallel.rank_stages`, after `apply_fsdp` with `zero`.
        hidden_size, dtype: of the hidden states that a stage sends to the next.
        token_parts: ranks that share the tokens of a sequence-parallel rank: tp with tp_sequence_parallel.
        num_experts: of a model with a load-balancing loss, whose float32 counts (2, num_experts) are sent as well.
    """

    stages: Sequence[CausalLMStage]
    mesh: ParallelMesh
    schedule: str
    zero: int
    hidden_size: int
    dtype: torch.dtype
    token_parts: int = 1
    num_experts: int = 0

    def __post_init__(self) -> None:
        # A pipeline keeps its receive buffers, so those of shapes that vary from step to step must not accumulate.
        self._prepare = lru_cache(maxsize=4)(self._pipeline)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        """Accumulate gradients; return the loss share, float32, 0-dim, on the last stage's rank, zero elsewhere."""
        batch = joined(micro_batches)
        ids = batch.pop("input_ids")
        rows, tokens = micro_batches[0]["input_ids"].shape
        count_choices(self.stages, self.mesh, micro_batches, schedule=self.schedule, sent=self._sent(rows, tokens))
        return self._prepare(len(micro_batches), rows, tokens).step(ids, **batch, head=head)

    def evaluate(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        """Return the loss share as `forward_backward`, without gradients and the load-balancing loss."""
        sent = self._sent(*micro_batches[0]["input_ids"].shape)
        return loss_share(self.stages, self.mesh, micro_batches, head, schedule=self.schedule, sent=sent)

    def _pipeline(self, micro_batches: int, rows: int, tokens: int) -> Pipeline:
        return Pipeline(
            self.stages,
            self.mesh,
            self.schedule,
            micro_batches=micro_batches,
            stage_outputs=self._sent(rows, tokens),
            zero=self.zero,
        )

    def _sent(self, rows: int, tokens: int) -> tuple[Tensor, ...]:
        """Return examples of what a stage sends to the next one for a micro-batch, without memory."""
        hidden = torch.empty(rows, tokens // self.token_parts, self.hidden_size, dtype=self.dtype, device="meta")
        return (hidden, torch.empty(2, self.num_experts, device="meta")) if self.num_experts else (hidden,)


def joined(micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Concatenate micro-batches of one shape to the batch whose consecutive rows they are.

    `cu_seqlens` become (rows, documents + 1); rows with fewer documents repeat their last boundary.

    Raises:
        ValueError: if their `input_ids` differ in shape.
    """
    shapes = {tuple(batch["input_ids"].shape) for batch in micro_batches}
    if len(shapes) != 1:
        raise ValueError(f"micro-batches of input_ids {sorted(shapes)} must have the same shape in a pipeline")
    keys = [key for key, value in micro_batches[0].items() if key != "cu_seqlens"]
    whole = {key: torch.cat([batch[key] for batch in micro_batches]) for key in keys}
    if micro_batches[0].get("cu_seqlens") is not None:
        ((rows, _),) = shapes
        boundaries = [torch.atleast_2d(batch["cu_seqlens"]).expand(rows, -1) for batch in micro_batches]
        widest = max(part.shape[1] for part in boundaries)
        whole["cu_seqlens"] = torch.cat(
            [torch.cat([part, part[:, -1:].expand(-1, widest - part.shape[1])], dim=1) for part in boundaries]
        )
    return whole
