"""Log-probabilities of the next tokens, from hidden states and the output head's weight, without all tokens' logits.

B batch, S a rank's tokens of each row, T = B * S, C tokens of a chunk, H hidden size, V vocabulary (this rank's part
where it is sharded).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from usp.sp.batch import IGNORED_LABEL

from .vocabulary import VocabularyRows, add_weight_gradient, head_inputs, logits_of, subtract_largest, without_targets


def vocab_logprobs(
    hidden_BSH: Tensor,
    weight: Tensor,
    shift_labels_BS: Tensor,
    *,
    chunk_tokens: int,
    temperature: float = 1.0,
    entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log_softmax(hidden @ weight.T / temperature) at each label, and the entropies of these distributions.

    `chunk_tokens` tokens have their logits at a time. The forward keeps a number per token, its log-normaliser (and
    entropy); the backward makes a chunk's logits again, because only then is it known what each log-probability
    weighs. Softmax, sums and the weight's gradient are in fp32 (fp64 for fp64). With a `group` the vocabulary is
    sharded over it as in `vocab_loss`; collective, every rank of the group gets the same values, must have the same
    loss of them, and gets the whole gradient of `hidden`.

    Args:
        hidden_BSH, weight, shift_labels_BS, chunk_tokens, group: as in `vocab_loss`.
        temperature: divides the logits.
        entropy: whether the entropies are wanted, which takes a second (C, V) of memory.

    Returns:
        (B, S) log-probabilities and (B, S) entropies or None, in fp32 (fp64 for fp64); both 0 for the label -100.

    Raises:
        ValueError: as `vocab_loss`, and for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0: greedy decoding has no log-probabilities, use 1")
    rows = VocabularyRows.of(weight, group)
    local, labels, outside = head_inputs(hidden_BSH, weight, shift_labels_BS, chunk_tokens, rows)
    logprobs, entropies = _VocabLogprobs.apply(
        hidden_BSH.flatten(0, 1), local, labels, temperature, chunk_tokens, rows, entropy
    )
    logprobs = logprobs.masked_fill(outside, float("nan"))
    return logprobs.view_as(shift_labels_BS), entropies.view_as(shift_labels_BS) if entropy else None


class _VocabLogprobs(torch.autograd.Function):
    """`apply(hidden_TH, weight_VH, labels_T, temperature, chunk_tokens, rows, entropy)` -> logprobs_T, entropies_T.

    entropies are all 0 where they are not wanted.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature: float, chunk_tokens: int, rows: VocabularyRows, entropy):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normalisers, entropies = torch.zeros(3, len(labels), dtype=dtype, device=hidden.device)
        for start in range(0, len(labels), chunk_tokens):
            place = slice(start, start + chunk_tokens)
            if without_targets(labels[place]):
                continue
            logits = logits_of(hidden[place], weight).div_(temperature)
            largest = subtract_largest(logits, rows)
            index, owned = rows.owned(labels[place], len(weight))
            target = logits.gather(1, index).squeeze(1).where(owned, 0)
            # expected: the sum of exp(logit) * logit, of which the entropy is made
            exp = logits.exp() if entropy else logits.exp_()
            expected = (exp * logits).sum(1) if entropy else torch.zeros_like(target)
            sums = torch.stack((exp.sum(1), target, expected))
            rows.all_reduce(sums)
            total, target, expected = sums
            wanted = labels[place] != IGNORED_LABEL
            logprobs[place] = (target - total.log()).where(wanted, 0)
            normalisers[place] = largest + total.log()
            if entropy:
                entropies[place] = (total.log() - expected / total).where(wanted, 0)
        ctx.save_for_backward(hidden, weight, labels, normalisers, entropies)
        ctx.options = temperature, chunk_tokens, rows, entropy
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, labels, normalisers, entropies = ctx.saved_tensors
        temperature, chunk_tokens, rows, entropy = ctx.options
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=normalisers.dtype) if wants_weight else None
        for start in range(0, len(labels), chunk_tokens):
            place = slice(start, start + chunk_tokens)
            if without_targets(labels[place]):
                continue
            logs = logits_of(hidden[place], weight).div_(temperature).sub_(normalisers[place].unsqueeze(1))
            wanted = labels[place] != IGNORED_LABEL
            by_logprob = grad_logprobs[place].where(wanted, 0)
            index, owned = rows.owned(labels[place], len(weight))
            if entropy:  # by logit v: -p_v * (log p_v + entropy)
                by_entropy = grad_entropies[place].where(wanted, 0)
                factor = (logs + entropies[place].unsqueeze(1)).mul_(by_entropy.unsqueeze(1))
                grad_logits = logs.exp_().mul_(factor.add_(by_logprob.unsqueeze(1))).neg_()
            else:
                grad_logits = logs.exp_().mul_(-by_logprob.unsqueeze(1))
            grad_logits.scatter_add_(1, index, by_logprob.where(owned, 0).unsqueeze(1))
            grad_logits = grad_logits.div_(temperature).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[place])
            if grad_weight is not None:
                add_weight_gradient(grad_weight, grad_logits, hidden[place])
        if grad_hidden is not None:
            rows.all_reduce(grad_hidden)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None
