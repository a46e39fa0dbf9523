"""What the last pipeline stage makes of its hidden states: a loss, or something about each token.

The stage hands a `Head` its `LastHidden`, inside its forward, where the output head's weight is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import local_tensor

from .cross_entropy import vocab_loss
from .logprobs import vocab_logprobs


@dataclass(frozen=True, eq=False)
class LastHidden:
    """What a model computed for this rank's tokens, before its output head.

    Attributes:
        hidden_BSH: after the final norm, alike on all ranks of `group`.
        weight: of the output head: (vocabulary, H), maybe sharded over `group`, or (1, H) of a scalar head.
        chunk_tokens: tokens whose logits exist at a time.
        group: the tp axis, None for one rank.
    """

    hidden_BSH: Tensor
    weight: Tensor
    chunk_tokens: int
    group: dist.ProcessGroup | None

    def loss(self, shift_labels: Tensor, global_tokens: Tensor | int) -> Tensor:
        """`vocab_loss`."""
        return vocab_loss(
            self.hidden_BSH,
            self.weight,
            shift_labels,
            global_tokens=global_tokens,
            chunk_tokens=self.chunk_tokens,
            group=self.group,
        )

    def logprobs(
        self, shift_labels: Tensor, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`vocab_logprobs`."""
        return vocab_logprobs(
            self.hidden_BSH,
            self.weight,
            shift_labels,
            chunk_tokens=self.chunk_tokens,
            temperature=temperature,
            entropy=entropy,
            group=self.group,
        )

    def values(self) -> Tensor:
        """(B, S) of a scalar head, in fp32 (fp64 for fp64)."""
        weight = local_tensor(self.weight)
        dtype = torch.promote_types(self.hidden_BSH.dtype, torch.float32)
        return (self.hidden_BSH.to(dtype) @ weight.to(dtype).T).squeeze(-1)


class Head(Protocol):
    """What is wanted of the last stage."""

    def __call__(self, last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
        """In training this rank's share of the loss, 0-dim.

        inputs: what a micro-batch holds beside ids and positions: cu_seqlens (where there are documents) and what
        lies like the ids.
        """


@dataclass(frozen=True)
class NextToken:
    """The mean cross-entropy over `shift_labels`, of which the whole step has `global_tokens`."""

    global_tokens: int

    def __call__(self, last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
        return last.loss(inputs["shift_labels"], self.global_tokens)
