"""Cross-entropy, log-probabilities and entropies over a vocabulary that is sharded over ranks, by chunks of tokens, so
that the logits of all tokens are never materialized; and what the last pipeline stage computes with them.

The loss is normalized by the number of targets on all ranks. The stage calls a `Head` with its `LastHidden` inside its
forward, while the output head's weight is unsharded.

B batch, S tokens per row on this rank, T = B * S, C tokens of a chunk, H hidden size, V this rank's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from usp.parallel import ParallelMesh, local_tensor
from usp.sp.sequence import IGNORED_LABEL


@dataclass(frozen=True, eq=False)
class VocabularyRows:
    """This rank's rows of the output head's weight."""

    vocabulary: int
    start: int
    group: dist.ProcessGroup | None  # None if this rank holds the whole vocabulary

    @staticmethod
    def of(weight: Tensor, group: dist.ProcessGroup | None) -> VocabularyRows:
        """Locate the rows of an output head's `weight`; raises ValueError for a DTensor not sharded over `group`."""
        size = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        if not isinstance(weight, DTensor):
            return VocabularyRows(weight.shape[0] * size, weight.shape[0] * rank, group if size > 1 else None)
        each = -(-weight.shape[0] // size)  # DTensor makes ceil-sized shards first
        sharded = weight.device_mesh.shape == (size,) and weight.placements == (Shard(0),)
        if not sharded or each * (size - 1) >= weight.shape[0]:
            raise ValueError(
                f"weight {tuple(weight.shape)} has placements {weight.placements} on a mesh of "
                f"{tuple(weight.device_mesh.shape)}, but must be Shard(0) over the {size} ranks of group, with at "
                f"least one row each: shard the output head by rows over tp only, or pass the group it is sharded over"
            )
        return VocabularyRows(weight.shape[0], each * rank, group if size > 1 else None)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        if self.group is not None:
            dist.all_reduce(x, op, group=self.group)

    def owned(self, labels_C: Tensor, own_rows: int) -> tuple[Tensor, Tensor]:
        """Return (C, 1) each label's column in this rank's logits, 0 if not owned, and (C,) whether it is owned.

        No rank owns the label -100.
        """
        index = labels_C - self.start
        owned = (index >= 0) & (index < own_rows)
        return index.where(owned, 0).unsqueeze(1), owned


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its head's logits x: softcap * tanh(scale * x / softcap); without softcap (0) scale * x."""

    scale: float = 1.0
    softcap: float = 0.0

    def apply_(self, logits: Tensor, differentiate: bool = False) -> Tensor | float:
        """Transform `logits` in place; return the derivative by `logits`, elementwise where there is a softcap.

        differentiate: if False, the derivative of a softcap is not computed, and the result has no meaning.
        """
        if self.scale != 1:
            logits.mul_(self.scale)
        if not self.softcap:
            return self.scale
        logits.div_(self.softcap).tanh_()
        slope = (1 - logits.square()).mul_(self.scale) if differentiate else self.scale
        logits.mul_(self.softcap)
        return slope

    @staticmethod
    def chain_(grad_logits: Tensor, slope: Tensor | float) -> Tensor:
        """Multiply a gradient by the derivative from `apply_`, in place."""
        return grad_logits if isinstance(slope, float) and slope == 1 else grad_logits.mul_(slope)


UNCHANGED = LogitTransform()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices to a float32 one."""
    if total.device.type == "cuda":  # neither a rounded product nor its round trip
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


class HeadGradients:
    """Gradients of hidden states and the output head's weight, accumulated over chunks; None where not wanted."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, wants_hidden: bool, wants_weight: bool) -> None:
        self._inputs = hidden_TH, weight_VH
        self.hidden = torch.zeros_like(hidden_TH) if wants_hidden else None
        self.weight = torch.zeros_like(weight_VH, dtype=softmax_dtype(hidden_TH)) if wants_weight else None
        self.wanted = wants_hidden or wants_weight

    def add(self, chunk: slice | Tensor, grad_logits_CV: Tensor) -> None:
        """Add a chunk's contribution; the weight's is summed in `softmax_dtype`."""
        hidden, weight = self._inputs
        if self.hidden is not None:
            self.hidden[chunk] = grad_logits_CV @ weight
        if self.weight is not None and self.weight.dtype == hidden.dtype:
            self.weight.addmm_(grad_logits_CV.T, hidden[chunk])
        elif self.weight is not None:
            add_product(self.weight, grad_logits_CV.T, hidden[chunk])

    def reduce(self, rows: VocabularyRows) -> tuple[Tensor | None, Tensor | None]:
        """Sum the gradient of `hidden` over the vocabulary's shards; return both gradients."""
        if self.hidden is not None:
            rows.all_reduce(self.hidden)
        return self.hidden, self.weight


def head_inputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, group: dist.ProcessGroup | None
) -> tuple[VocabularyRows, Tensor, Tensor, Tensor]:
    """Return this rank's rows of the vocabulary and of the weight, the flat labels, and which are out of range. Raises
    ValueError as `vocab_loss`."""
    rows = VocabularyRows.of(weight, group)
    violations = []
    if hidden.dim() != 3 or weight.dim() != 2 or hidden.shape[2:] != weight.shape[1:]:
        violations.append("hidden must be (batch, tokens, hidden size) and weight (vocabulary, hidden size)")
    if labels.shape != hidden.shape[:2]:
        violations.append("there must be one label for each token")
    if hidden.dtype != weight.dtype:
        violations.append("hidden and weight must have the same dtype")
    if chunk_tokens < 1:
        violations.append("chunk_tokens must be at least 1")
    if violations:
        raise ValueError(
            f"{'; '.join(violations)}; got hidden {tuple(hidden.shape)} {hidden.dtype}, weight {tuple(weight.shape)} "
            f"{weight.dtype}, labels {tuple(labels.shape)}, chunk_tokens={chunk_tokens}"
        )
    flat = labels.flatten()
    outside = (flat != IGNORED_LABEL) & ((flat < 0) | (flat >= rows.vocabulary))
    if flat.device.type == "cpu" and bool(outside.any()):
        raise ValueError(f"labels {flat[outside][:5].tolist()} are not in the vocabulary of {rows.vocabulary}")
    return rows, local_tensor(weight), flat, outside


def softmax_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the softmax and of all sums: fp32, or fp64 for fp64."""
    return torch.promote_types(hidden.dtype, torch.float32)


def logits_of(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return (C, V) logits in `softmax_dtype`."""
    return (hidden_CH @ weight_VH.T).to(softmax_dtype(hidden_CH))


def subtract_max(logits_CV: Tensor, rows: VocabularyRows) -> Tensor:
    """Subtract each token's largest logit over all ranks, in place; return these maxima (C,)."""
    largest = logits_CV.amax(1)
    rows.all_reduce(largest, dist.ReduceOp.MAX)
    logits_CV.sub_(largest.unsqueeze(1))
    return largest


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
    compile: str = "",
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
        compile: backend of torch.compile for a chunk, which reads the logits twice and writes their gradient; empty for
            eager, as is what communicates (with `group`).

    Returns:
        This rank's share of the loss, 0-dim, in fp32 (fp64 for fp64).

    Raises ValueError for mismatched shapes or shards, and on the CPU for labels outside the vocabulary; on a device,
    such a label makes the loss nan instead, without a synchronization.
    """
    if isinstance(global_tokens, int) and global_tokens < 1:
        raise ValueError(f"global_tokens={global_tokens} must be at least 1: no rank has a target")
    rows, local, labels, outside = head_inputs(hidden_BSH, weight, shift_labels_BS, chunk_tokens, group)
    chunk = torch.compile(_chunk, backend=compile) if compile and rows.group is None else _chunk
    chunks, scale = (chunk_tokens, transform, rows), hidden_BSH.new_ones((), dtype=softmax_dtype(hidden_BSH))
    scale /= global_tokens  # a tensor, because torch.compile would make another graph for each number
    given = chunks, chunk, scale, torch.is_grad_enabled()
    loss: Tensor = _VocabLoss.apply(hidden_BSH.flatten(0, 1), local, labels, *given)
    return loss.masked_fill(outside.any(), float("nan"))


# Tokens of a chunk, what is done to their logits, and the vocabulary of these.
Chunks: TypeAlias = tuple[int, LogitTransform, VocabularyRows]


class _VocabLoss(torch.autograd.Function):
    """`apply(hidden_TH, weight_VH, labels_T, chunks, compute, scale, differentiate)` -> sum of losses * scale.

    compute: `_chunk` or its compilation."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunks: Chunks, compute: Any, scale, differentiate: bool):
        chunk_tokens, transform, rows = chunks
        total = torch.zeros((), dtype=softmax_dtype(hidden), device=hidden.device)
        gradients = HeadGradients(hidden, weight, *(differentiate and wanted for wanted in ctx.needs_input_grad[:2]))
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            if labels.device.type == "cpu" and bool((labels[chunk] == IGNORED_LABEL).all()):
                continue  # on a GPU it would take a synchronization to know
            given = hidden[chunk], weight, labels[chunk], scale if gradients.wanted else None
            losses, grad_logits = compute(*given, transform, rows)
            total += losses.sum()
            if grad_logits is not None:
                gradients.add(chunk, grad_logits)
            del grad_logits  # before the next chunk's logits
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
            grad_weight = torch.mul(grad_weight, grad, out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunk(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    labels_C: Tensor,
    scale: Tensor | None,
    transform: LogitTransform,
    rows: VocabularyRows,
) -> tuple[Tensor, Tensor | None]:
    """Return each token's loss (0 where ignored), and if there is a `scale` the gradient of its product with the loss,
    by the head's logits (C, V), in their dtype."""
    logits = logits_of(hidden_CH, weight_VH)
    slope = transform.apply_(logits, scale is not None)
    subtract_max(logits, rows)
    index, owned = rows.owned(labels_C, weight_VH.shape[0])
    target = logits.gather(1, index).squeeze(1).where(owned, 0)
    exp = logits.exp_()
    sums = torch.stack((exp.sum(1), target))
    rows.all_reduce(sums)
    normalizer, target = sums
    wanted = labels_C != IGNORED_LABEL
    losses = (normalizer.log() - target).where(wanted, 0)
    if scale is None:
        return losses, None
    factor = (wanted * scale / normalizer).unsqueeze(1)
    at_label = exp.gather(1, index) * factor - (owned & wanted).unsqueeze(1) * scale
    at_label *= slope if isinstance(slope, float) else slope.gather(1, index)
    # Only here is the gradient rounded, so that one kernel reads logits and writes it.
    grad_logits = transform.chain_(exp.mul_(factor), slope).to(hidden_CH.dtype)
    return losses, grad_logits.scatter_(1, index, at_label.to(grad_logits.dtype))


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
        entropy: also compute entropies, of half as many tokens at a time, because each takes a second row of V.

    Returns:
        (B, S) log-probabilities and (B, S) entropies or None, in fp32 (fp64 for fp64); both 0 for the label -100.

    Raises ValueError as `vocab_loss`, and for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0: for greedy decoding, use 1")
    rows, local, labels, outside = head_inputs(hidden_BSH, weight, shift_labels_BS, chunk_tokens, group)
    chunks = chunk_tokens, transform, rows
    logprobs, entropies = _VocabLogprobs.apply(hidden_BSH.flatten(0, 1), local, labels, chunks, temperature, entropy)
    logprobs = logprobs.masked_fill(outside, float("nan"))
    return logprobs.view_as(shift_labels_BS), entropies.view_as(shift_labels_BS) if entropy else None


class _VocabLogprobs(torch.autograd.Function):
    """`apply(hidden_TH, weight_VH, labels_T, chunks, temperature, entropy)` -> logprobs_T and entropies_T, which is 0
    without `entropy`."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunks: Chunks, temperature: float, entropy: bool):
        chunk_tokens, transform, rows = chunks
        dtype = softmax_dtype(hidden)
        logprobs, normalizers, entropies = torch.zeros(3, len(labels), dtype=dtype, device=hidden.device)
        targets = (labels != IGNORED_LABEL).nonzero().squeeze(1)
        for chunk in _labelled_chunks(targets, chunk_tokens, entropy):
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
            del logits, exp  # before the next chunk's
        ctx.save_for_backward(hidden, weight, labels, targets, normalizers, entropies)
        ctx.options = temperature, chunk_tokens, transform, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, labels, targets, normalizers, entropies = ctx.saved_tensors
        temperature, chunk_tokens, transform, rows = ctx.options
        entropy = grad_entropies is not None  # often they are only a metric
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizers)
        gradients = HeadGradients(hidden, weight, *ctx.needs_input_grad[:2])
        for chunk in _labelled_chunks(targets, chunk_tokens, entropy):
            logs = logits_of(hidden[chunk], weight)
            slope = transform.apply_(logs, differentiate=True)
            logs.div_(temperature).sub_(normalizers[chunk].unsqueeze(1))
            by_logprob = grad_logprobs[chunk]
            index, owned = rows.owned(labels[chunk], len(weight))
            factor = -by_logprob.unsqueeze(1)
            if entropy:  # by logit v: -p_v * (log p_v + entropy)
                factor = (logs + entropies[chunk].unsqueeze(1)).mul_(-grad_entropies[chunk].unsqueeze(1)).add_(factor)
            grad_logits = logs.exp_().mul_(factor)
            grad_logits.scatter_add_(1, index, by_logprob.where(owned, 0).unsqueeze(1))
            grad_logits = transform.chain_(grad_logits.div_(temperature), slope)
            gradients.add(chunk, grad_logits.to(hidden.dtype))
            del logs, factor, grad_logits, slope  # before the next chunk's
        grad_hidden, grad_weight = gradients.reduce(rows)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _labelled_chunks(targets_N: Tensor, chunk_tokens: int, entropy: bool) -> tuple[Tensor, ...]:
    at_a_time = max(1, chunk_tokens // 2) if entropy else chunk_tokens
    return targets_N.split(at_a_time) if len(targets_N) else ()


@dataclass(frozen=True, eq=False)
class LastHidden:
    """Last hidden states of this rank's tokens, with the output head's weight.

    hidden_BSH: after the final norm, identical on all ranks of `group`.
    weight: of the output head: (vocabulary, H), possibly sharded over `group`, or (1, H) for a scalar head.
    chunk_tokens: number of tokens whose logits exist at a time.
    group: the tp axis; None without tensor parallelism.
    bias: of the output head, sharded like `weight`; None without.
    compile: backend of torch.compile for the loss; empty for eager.
    """

    hidden_BSH: Tensor
    weight: Tensor
    chunk_tokens: int
    group: dist.ProcessGroup | None
    transform: LogitTransform = UNCHANGED
    bias: Tensor | None = None
    compile: str = ""

    def loss(self, shift_labels: Tensor, global_tokens: Tensor | int) -> Tensor:
        """Return `vocab_loss` of these hidden states."""
        options = {"compile": self.compile, **self._options}
        return vocab_loss(*self._factors, shift_labels, global_tokens=global_tokens, **options)

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
