"""The language-model loss, normalised by the tokens of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ParallelMesh

from .batch import IGNORED_LABEL


def global_token_count(shift_labels: Tensor, mesh: ParallelMesh) -> Tensor:
    """The number of targets on all ranks that hold different tokens (the loss axis), int64. Collective."""
    count = (shift_labels != IGNORED_LABEL).sum()
    dist.all_reduce(count, group=mesh.group("loss"))
    return count


def causal_lm_loss(logits: Tensor, shift_labels: Tensor, global_tokens: Tensor | int) -> Tensor:
    """This rank's share of the mean cross-entropy over all ranks' targets, in fp32.

    The sum of the shares over the loss axis is the loss, and the sum of their gradients its gradient, however
    unevenly targets fall on ranks.

    Args:
        logits: (B, S, vocabulary) for this rank's tokens.
        shift_labels: (B, S) the target of each token, -100 for none; from `shard_batch`.
        global_tokens: targets on all ranks; from `global_token_count`.
    """
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), shift_labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total / global_tokens


def vocab_loss(
    hidden: Tensor,
    weight: Tensor,
    shift_labels: Tensor,
    *,
    global_tokens: int,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """To be replaced by the chunked, vocabulary-parallel one."""
    return causal_lm_loss(hidden @ weight.T, shift_labels, global_tokens)
