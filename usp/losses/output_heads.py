"""Outputs of the last pipeline stage: a loss, or values per token.

The stage calls a `Head` with its `LastHidden` inside its forward, while the output head's weight is unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import local_tensor

from .vocabulary import UNCHANGED, LogitTransform, softmax_dtype, vocab_logprobs, vocab_loss


@dataclass(frozen=True, eq=False)
class LastHidden:
    """Last hidden states of this rank's tokens, with the output head's weight.

    hidden_BSH: after the final norm, identical on all ranks of `group`.
    weight: of the output head: (vocabulary, H), possibly sharded over `group`, or (1, H) for a scalar head.
    chunk_tokens: number of tokens whose logits exist at a time.
    group: the tp axis; None without tensor parallelism.
    bias: of the output head, sharded like `weight`; None without.
    """

    hidden_BSH: Tensor
    weight: Tensor
    chunk_tokens: int
    group: dist.ProcessGroup | None
    transform: LogitTransform = UNCHANGED
    bias: Tensor | None = None

    def loss(self, shift_labels: Tensor, global_tokens: Tensor | int) -> Tensor:
        """Return `vocab_loss` of these hidden states."""
        return vocab_loss(*self._factors, shift_labels, global_tokens=global_tokens, **self._options)

    def logprobs(self, shift_labels: Tensor, temperature: float, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return `vocab_logprobs` of these hidden states."""
        chosen = {"temperature": temperature, "entropy": entropy, **self._options}
        return vocab_logprobs(*self._factors, shift_labels, **chosen)

    def values(self) -> Tensor:
        """Return the scalar head's outputs (B, S), in fp32 (fp64 for fp64)."""
        weight = local_tensor(self.weight)
        dtype = softmax_dtype(self.hidden_BSH)
        return (self.hidden_BSH.to(dtype) @ weight.to(dtype).T).squeeze(-1)

    @property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """The hidden states and the weight, with the bias as the weight of one more hidden state, which is 1."""
        if self.bias is None:
            return self.hidden_BSH, self.weight
        ones = self.hidden_BSH.new_ones(*self.hidden_BSH.shape[:-1], 1)
        columns = local_tensor(self.weight), local_tensor(self.bias).unsqueeze(1)
        return torch.cat((self.hidden_BSH, ones), dim=-1), torch.cat(columns, dim=1)

    @property
    def _options(self) -> dict[str, Any]:
        return {"chunk_tokens": self.chunk_tokens, "transform": self.transform, "group": self.group}


# Computes the last stage's output, in training this rank's share of the loss, 0-dim. The mapping is the micro-batch
# without ids and positions: tensors shaped like the ids, and `cu_seqlens` if packed.
Head: TypeAlias = Callable[[LastHidden, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class NextTokenLoss:
    """Mean cross-entropy over the targets in `shift_labels`; the whole step has `global_tokens` targets."""

    global_tokens: int

    def __call__(self, last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
        return last.loss(inputs["shift_labels"], self.global_tokens)
