"""Log-probabilities and entropies from hidden states and the output head's weight, without materializing all logits.

B batch, S tokens per row on this rank, T = B * S, C tokens of a chunk, H hidden size, V this rank's vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from usp.sp.batch import IGNORED_LABEL

from .vocabulary import (
    UNCHANGED,
    HeadGradients,
    LogitTransform,
    VocabularyRows,
    head_inputs,
    logits_of,
    softmax_dtype,
    subtract_max,
)


def vocab_logprobs(
    hidden_BSH: Tensor,
    weight: Tensor,
    shift_labels_BS: Tensor,
    *,
    chunk_tokens: int,
    temperature: float = 1.0,
    entropy: bool = False,
    transform: LogitTransform = UNCHANGED,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log_softmax(transform(hidden @ weight.T) / temperature) at each label, and optionally the entropies.

    Logits exist for `chunk_tokens` tokens at a time, and only of tokens with a label. Often few have one, prompts none,
    so on a device this is worth the synchronization that it takes. The forward saves one log-normalizer per token (and
    the entropy); the backward recomputes each chunk's logits, since the weight of each log-probability is only known
    then. Softmax, sums and the weight's gradient are in fp32 (fp64 for fp64). With a `group` the vocabulary is sharded
    over it as in `vocab_loss`: collective, every rank of the group gets the same values, must compute the same loss
    from them, and gets the whole gradient of `hidden`.

    Args:
        hidden_BSH, weight, shift_labels_BS, chunk_tokens, transform, group: as in `vocab_loss`.
        temperature: divides the logits.
        entropy: also compute entropies, of half as many tokens at a time, because each takes a second row of V.

    Returns:
        (B, S) log-probabilities and (B, S) entropies or None, in fp32 (fp64 for fp64); both 0 for the label -100.

    Raises:
        ValueError: as `vocab_loss`, and for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0: for greedy decoding, use 1")
    rows, local, labels, outside = head_inputs(hidden_BSH, weight, shift_labels_BS, chunk_tokens, group)
    logprobs, entropies = _VocabLogprobs.apply(
        hidden_BSH.flatten(0, 1), local, labels, temperature, chunk_tokens, transform, rows, entropy
    )
    logprobs = logprobs.masked_fill(outside, float("nan"))
    return logprobs.view_as(shift_labels_BS), entropies.view_as(shift_labels_BS) if entropy else None


class _VocabLogprobs(torch.autograd.Function):
    """`apply(hidden_TH, weight_VH, labels_T, temperature, chunk_tokens, transform, rows, entropy)`.

    Returns logprobs_T and entropies_T, which is 0 without `entropy`.
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        labels,
        temperature: float,
        chunk_tokens: int,
        transform: LogitTransform,
        rows: VocabularyRows,
        entropy: bool,
    ):
        dtype = softmax_dtype(hidden)
        logprobs, normalizers, entropies = torch.zeros(3, len(labels), dtype=dtype, device=hidden.device)
        targets = (labels != IGNORED_LABEL).nonzero().squeeze(1)
        for chunk in _chunks(targets, chunk_tokens, entropy):
            logits = logits_of(hidden[chunk], weight)
            transform.apply_(logits)
            logits.div_(temperature)
            largest = subtract_max(logits, rows)
            index, owned = rows.owned(labels[chunk], len(weight))
            target = logits.gather(1, index).squeeze(1).where(owned, 0)
            # expected: sum of exp(logit) * logit, for the entropy
            exp = logits.exp() if entropy else logits.exp_()
            expected = logits.mul_(exp).sum(1) if entropy else torch.zeros_like(target)
            sums = torch.stack((exp.sum(1), target, expected))
            rows.all_reduce(sums)
            total, target, expected = sums
            logprobs[chunk] = target - total.log()
            normalizers[chunk] = largest + total.log()
            if entropy:
                entropies[chunk] = total.log() - expected / total
        ctx.save_for_backward(hidden, weight, labels, targets, normalizers, entropies)
        ctx.options = temperature, chunk_tokens, transform, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, labels, targets, normalizers, entropies = ctx.saved_tensors
        temperature, chunk_tokens, transform, rows = ctx.options
        entropy = grad_entropies is not None  # often they are a metric alone
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizers)
        gradients = HeadGradients(hidden, weight, *ctx.needs_input_grad[:2])
        for chunk in _chunks(targets, chunk_tokens, entropy):
            logs = logits_of(hidden[chunk], weight)
            slope = transform.apply_(logs, differentiate=True)
            logs.div_(temperature).sub_(normalizers[chunk].unsqueeze(1))
            by_logprob = grad_logprobs[chunk]
            index, owned = rows.owned(labels[chunk], len(weight))
            if entropy:  # by logit v: -p_v * (log p_v + entropy)
                factor = (logs + entropies[chunk].unsqueeze(1)).mul_(grad_entropies[chunk].unsqueeze(1))
                grad_logits = logs.exp_().mul_(factor.add_(by_logprob.unsqueeze(1))).neg_()
            else:
                grad_logits = logs.exp_().mul_(-by_logprob.unsqueeze(1))
            grad_logits.scatter_add_(1, index, by_logprob.where(owned, 0).unsqueeze(1))
            grad_logits = transform.chain_(grad_logits.div_(temperature), slope)
            gradients.add(chunk, grad_logits.to(hidden.dtype))
        grad_hidden, grad_weight = gradients.reduce(rows)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _chunks(targets_N: Tensor, chunk_tokens: int, entropy: bool) -> tuple[Tensor, ...]:
    at_a_time = max(1, chunk_tokens // 2) if entropy else chunk_tokens
    return targets_N.split(at_a_time) if len(targets_N) else ()
