"""The language-model loss, normalised by the tokens of all ranks.

B batch, S a rank's tokens of each row, T = B * S, C tokens of a chunk, H hidden size, V vocabulary (this rank's part
where it is sharded).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel import ParallelMesh
from usp.sp.batch import IGNORED_LABEL

from .vocabulary import VocabularyRows, add_weight_gradient, head_inputs, logits_of, subtract_largest, without_targets


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
    hidden_BSH: Tensor,
    weight: Tensor,
    shift_labels_BS: Tensor,
    *,
    global_tokens: Tensor | int,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`causal_lm_loss(hidden @ weight.T, ...)` without the logits: `chunk_tokens` tokens have theirs at a time.

    Where gradients are wanted, the forward computes them with each chunk's logits, and the backward scales them: no
    product with the vocabulary is made twice (as Liger Kernel's fused linear cross-entropy, arXiv 2410.10989, section
    3.2, does). Softmax, loss and the weight's gradient are summed in fp32 (fp64 for fp64), chunk after chunk, so the
    result does not change from run to run.

    With a `group` the vocabulary is sharded over it (Megatron-LM, arXiv 1909.08053, section 3): per chunk two
    all-reduces of one and two numbers per token, and one of hidden's gradient. Collective; every rank of the group
    gets the same loss and the whole gradient of `hidden`.

    Args:
        hidden_BSH: last hidden states, alike on all ranks of `group`.
        weight: (V, H) of the output head. With `group`, a DTensor sharded over it by rows, or a plain tensor with this
            rank's rows, as many on every rank.
        shift_labels_BS: the target of each token, -100 for none. On the CPU a chunk without targets costs nothing; on
            a device that would take a synchronisation, and it is computed as any other.
        global_tokens: targets on all ranks; from `global_token_count`.

    Returns:
        This rank's share of the loss, 0-dim, in fp32 (fp64 for fp64).

    Raises:
        ValueError: for shapes and shards that do not fit, and for labels outside the vocabulary where they are on the
            CPU; elsewhere such a label makes the loss nan, without a synchronisation.
    """
    if isinstance(global_tokens, int) and global_tokens < 1:
        raise ValueError(f"global_tokens={global_tokens} must be at least 1: no rank has a target to learn from")
    rows = VocabularyRows.of(weight, group)
    local, labels, outside = head_inputs(hidden_BSH, weight, shift_labels_BS, chunk_tokens, rows)
    loss: Tensor = _VocabLoss.apply(
        hidden_BSH.flatten(0, 1), local, labels, 1 / global_tokens, chunk_tokens, rows, torch.is_grad_enabled()
    )
    return loss.masked_fill(outside.any(), float("nan"))


class _VocabLoss(torch.autograd.Function):
    """`apply(hidden_TH, weight_VH, labels_T, scale, chunk_tokens, rows, differentiate)` -> sum of losses * scale."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, scale, chunk_tokens: int, rows: VocabularyRows, differentiate: bool):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        wants_hidden, wants_weight = (differentiate and wanted for wanted in ctx.needs_input_grad[:2])
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        for start in range(0, len(labels), chunk_tokens):
            place = slice(start, start + chunk_tokens)
            targets = labels[place]
            if without_targets(targets):
                continue
            losses, grad_logits = _chunk(hidden[place], weight, targets, rows, wants_hidden or wants_weight)
            total += losses.sum()
            if grad_logits is None:
                continue
            grad_logits = grad_logits.mul_(scale).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[place])
            if grad_weight is not None:
                add_weight_gradient(grad_weight, grad_logits, hidden[place])
        if grad_hidden is not None:
            rows.all_reduce(grad_hidden)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        # Not in place: a pipeline that splits its backward comes here twice.
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunk(
    hidden_CH: Tensor, weight_VH: Tensor, labels_C: Tensor, rows: VocabularyRows, differentiate: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of each token (0 where ignored), and its gradient by this rank's logits (C, V) where wanted."""
    logits = logits_of(hidden_CH, weight_VH)
    subtract_largest(logits, rows)
    index, owned = rows.owned(labels_C, weight_VH.shape[0])
    target = logits.gather(1, index).squeeze(1).where(owned, 0)
    exp = logits.exp_()
    sums = torch.stack((exp.sum(1), target))
    rows.all_reduce(sums)
    normaliser, target = sums
    wanted = labels_C != IGNORED_LABEL
    losses = (normaliser.log() - target).where(wanted, 0)
    if not differentiate:
        return losses, None
    exp.mul_((wanted / normaliser).unsqueeze(1))
    exp.scatter_add_(1, index, -(owned & wanted).to(exp.dtype).unsqueeze(1))
    return losses, exp
