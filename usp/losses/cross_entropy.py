"""Cross-entropy of language models, normalized by the number of targets on all ranks.

B batch, S tokens per row on this rank, T = B * S, C tokens of a chunk, H hidden size, V this rank's vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel import ParallelMesh
from usp.sp.batch import IGNORED_LABEL

from .vocabulary import (
    UNCHANGED,
    HeadGradients,
    LogitTransform,
    VocabularyRows,
    chunks_of,
    head_inputs,
    logits_of,
    softmax_dtype,
    subtract_max,
)


def global_token_count(shift_labels: Tensor, mesh: ParallelMesh) -> Tensor:
    """Count the targets on all ranks of the loss axis, as an int64 tensor. Collective."""
    count = (shift_labels != IGNORED_LABEL).sum()
    dist.all_reduce(count, group=mesh.group("loss"))
    return count


def causal_lm_loss(logits: Tensor, shift_labels: Tensor, global_tokens: Tensor | int) -> Tensor:
    """Return this rank's share, in fp32, of the mean cross-entropy over all ranks' targets.

    Over the loss axis the shares sum to the loss and their gradients to its gradient, even if targets are distributed
    unevenly.

    Args:
        logits: (B, S, vocabulary) of this rank's tokens.
        shift_labels: (B, S) target of each token, -100 for none; from `shard_batch`.
        global_tokens: number of targets on all ranks; from `global_token_count`.
    """
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), shift_labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total / global_tokens


def vocab_loss(
    hidden_BSH: Tensor,
    weight: Tensor,
    shift_labels_BS: Tensor,
    *,
    global_tokens: Tensor | int,
    chunk_tokens: int,
    transform: LogitTransform = UNCHANGED,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute `causal_lm_loss(transform(hidden @ weight.T), ...)` with logits for only `chunk_tokens` tokens at a time.

    The forward also computes the gradients while a chunk's logits exist, and the backward scales them, so no product
    with the vocabulary is computed twice (as in Liger Kernel's fused linear cross-entropy, arXiv 2410.10989, section
    3.2). Softmax, loss and the weight's gradient are accumulated in fp32 (fp64 for fp64), in a fixed order, so results
    are reproducible.

    With a `group` the vocabulary is sharded over it (Megatron-LM, arXiv 1909.08053, section 3): per chunk two
    all-reduces of one and two numbers per token, and one of the gradient of `hidden`. Collective; every rank of the
    group gets the same loss and the whole gradient of `hidden`.

    Args:
        hidden_BSH: last hidden states, identical on all ranks of `group`.
        weight: (V, H) of the output head. With `group`, a DTensor sharded over it by rows, or a plain tensor with this
            rank's rows, the same number on each rank.
        shift_labels_BS: target of each token, -100 for none. On the CPU, chunks without targets are skipped; on a
            device that would take a synchronization, so they are computed.
        global_tokens: number of targets on all ranks; from `global_token_count`.
        transform: what the model does to the head's logits; applied in fp32 (fp64 for fp64).

    Returns:
        This rank's share of the loss, 0-dim, in fp32 (fp64 for fp64).

    Raises:
        ValueError: for mismatched shapes or shards, and for labels outside the vocabulary if they are on the CPU; on a
            device, such a label makes the loss nan instead, without a synchronization.
    """
    if isinstance(global_tokens, int) and global_tokens < 1:
        raise ValueError(f"global_tokens={global_tokens} must be at least 1: no rank has a target")
    rows, local, labels, outside = head_inputs(hidden_BSH, weight, shift_labels_BS, chunk_tokens, group)
    loss: Tensor = _VocabLoss.apply(
        hidden_BSH.flatten(0, 1),
        local,
        labels,
        1 / global_tokens,
        chunk_tokens,
        transform,
        rows,
        torch.is_grad_enabled(),
    )
    return loss.masked_fill(outside.any(), float("nan"))


class _VocabLoss(torch.autograd.Function):
    """`apply(hidden_TH, weight_VH, labels_T, scale, chunk_tokens, transform, rows, differentiate)`.

    Returns the sum of losses * scale.
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        labels,
        scale,
        chunk_tokens: int,
        transform: LogitTransform,
        rows: VocabularyRows,
        differentiate: bool,
    ):
        total = torch.zeros((), dtype=softmax_dtype(hidden), device=hidden.device)
        gradients = HeadGradients(hidden, weight, *(differentiate and wanted for wanted in ctx.needs_input_grad[:2]))
        for chunk in chunks_of(labels, chunk_tokens):
            losses, grad_logits = _chunk(hidden[chunk], weight, labels[chunk], transform, rows, gradients.wanted)
            total += losses.sum()
            if grad_logits is not None:
                grad_logits = grad_logits.mul_(scale).to(hidden.dtype)
                gradients.add(chunk, grad_logits)
        ctx.save_for_backward(*gradients.reduce(rows))
        ctx.weight_dtype = weight.dtype
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        # Not in place: a zero-bubble pipeline's split backward runs this twice.
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _chunk(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    labels_C: Tensor,
    transform: LogitTransform,
    rows: VocabularyRows,
    differentiate: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return each token's loss (0 where ignored), and if `differentiate` its gradient by the head's logits (C, V)."""
    logits = logits_of(hidden_CH, weight_VH)
    slope = transform.apply_(logits, differentiate)
    subtract_max(logits, rows)
    index, owned = rows.owned(labels_C, weight_VH.shape[0])
    target = logits.gather(1, index).squeeze(1).where(owned, 0)
    exp = logits.exp_()
    sums = torch.stack((exp.sum(1), target))
    rows.all_reduce(sums)
    normalizer, target = sums
    wanted = labels_C != IGNORED_LABEL
    losses = (normalizer.log() - target).where(wanted, 0)
    if not differentiate:
        return losses, None
    exp.mul_((wanted / normalizer).unsqueeze(1))
    exp.scatter_add_(1, index, -(owned & wanted).to(exp.dtype).unsqueeze(1))
    return losses, transform.chain_(exp, slope)
