"""Per-token loss weights. They include the normalization over a mini-batch, in whatever layout it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from usp.rlhf.data.mini_batches import mini_batch_of
from usp.rlhf.graph.calls import Reduce

from .response_rows import Responses

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True)
class Weighting:
    """Aggregation of token losses into the loss of a mini-batch. Sequences without tokens do not count.

    token_mean: mean over tokens. sequence_mean: mean over sequences of their token means (GRPO: DeepSeekMath, arXiv
    2402.03300, equation 3). sequence_sum: mean over sequences of their token sums, the gradient of sequence
    log-probabilities. constant: sequence_sum divided by the constant `length` (Dr. GRPO, arXiv 2503.20783).

    Attributes:
        mini_batches, unit: of the train step.
    """

    aggregation: Aggregation
    mini_batches: int
    unit: int = 1
    length: int = 1

    def __call__(self, ids: Sequence[int], masks: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
        """Return per-token float32 weights of samples `ids` from 0/1 masks. Two all-reduces."""
        lengths = Responses(masks).lengths_N.double()
        batch = mini_batch_numbers(ids, self.mini_batches, self.unit, reduce)
        counted = lengths if self.aggregation == "token_mean" else (lengths > 0).double()
        totals = reduce(torch.zeros(self.mini_batches, dtype=torch.float64).index_add(0, batch, counted))
        divisors = totals.clamp(min=1)[batch]
        if self.aggregation == "sequence_mean":
            divisors = divisors * lengths.clamp(min=1)
        elif self.aggregation == "constant":
            divisors = divisors * self.length
        return [((mask != 0) / divisor).float() for mask, divisor in zip(masks, divisors, strict=True)]


def mini_batch_numbers(ids: Sequence[int], mini_batches: int, unit: int, reduce: Reduce) -> Tensor:
    """Return the mini-batch index of each sample, (samples,) int64. One all-reduce."""
    samples = int(reduce(torch.tensor(len(ids))))
    return torch.tensor(mini_batch_of(ids, samples, mini_batches, unit), dtype=torch.int64)
