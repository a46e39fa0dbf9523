"""Softmax over a vocabulary that is sharded over ranks, and its gradients, a chunk of tokens at a time.

T tokens, C tokens of a chunk, H hidden size, V vocabulary (this rank's shard of it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from parallel import local_tensor
from usp.sp.batch import IGNORED_LABEL


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
            self.weight += grad_logits_CV.T @ hidden[chunk]

    def reduce(self, rows: VocabularyRows) -> tuple[Tensor | None, Tensor | None]:
        """Sum the gradient of `hidden` over the vocabulary's shards; return both gradients."""
        if self.hidden is not None:
            rows.all_reduce(self.hidden)
        return self.hidden, self.weight


def head_inputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, group: dist.ProcessGroup | None
) -> tuple[VocabularyRows, Tensor, Tensor, Tensor]:
    """Return this rank's rows of the vocabulary and of the weight, the flat labels, and which are out of range.

    Raises:
        ValueError: for mismatched shapes or shards, and for labels outside the vocabulary if they are on the CPU (on a
            device, the check would synchronize).
    """
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


def chunks_of(labels_T: Tensor, chunk_tokens: int) -> Iterator[slice]:
    """Yield chunks of tokens; on the CPU, where it takes no synchronization, skip those without targets."""
    for start in range(0, len(labels_T), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        if labels_T.device.type != "cpu" or not bool((labels_T[chunk] == IGNORED_LABEL).all()):
            yield chunk


def logits_of(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return (C, V) logits in `softmax_dtype`."""
    return (hidden_CH @ weight_VH.T).to(softmax_dtype(hidden_CH))


def subtract_max(logits_CV: Tensor, rows: VocabularyRows) -> Tensor:
    """Subtract each token's largest logit over all ranks, in place; return these maxima (C,)."""
    largest = logits_CV.amax(1)
    rows.all_reduce(largest, dist.ReduceOp.MAX)
    logits_CV.sub_(largest.unsqueeze(1))
    return largest
