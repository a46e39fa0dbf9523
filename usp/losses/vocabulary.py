"""Softmax over a vocabulary that is sharded over ranks, for some tokens at a time.

C tokens of a chunk, H hidden size, V vocabulary (this rank's part where it is sharded).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from parallel import local_tensor
from usp.sp.batch import IGNORED_LABEL


@dataclass(frozen=True, eq=False)
class VocabularyRows:
    """Which part of the vocabulary this rank has."""

    vocabulary: int
    start: int
    group: dist.ProcessGroup | None  # None where this rank has it all

    @staticmethod
    def of(weight: Tensor, group: dist.ProcessGroup | None) -> VocabularyRows:
        """Those of an output head's `weight`, as `vocab_loss` takes it.

        Raises:
            ValueError: for a DTensor that is not sharded by rows over the group.
        """
        size = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        if not isinstance(weight, DTensor):
            return VocabularyRows(weight.shape[0] * size, weight.shape[0] * rank, group if size > 1 else None)
        sharded = all(
            isinstance(placement, Shard) and placement.dim == 0 and degree == size
            for placement, degree in zip(weight.placements, weight.device_mesh.shape, strict=True)
        )
        each = -(-weight.shape[0] // size)  # as DTensor cuts: full parts first
        if weight.device_mesh.ndim != 1 or not sharded or each * (size - 1) >= weight.shape[0]:
            raise ValueError(
                f"weight {tuple(weight.shape)} is placed {weight.placements} on a mesh of "
                f"{tuple(weight.device_mesh.shape)}, and must be Shard(0) over the {size} ranks of group with at least "
                f"a row on each: shard the output head by rows over tp alone, or give the group it is sharded over"
            )
        return VocabularyRows(weight.shape[0], each * rank, group if size > 1 else None)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        if self.group is not None:
            dist.all_reduce(x, op, group=self.group)

    def owned(self, labels_C: Tensor, own_rows: int) -> tuple[Tensor, Tensor]:
        """(C, 1) the column of each label in this rank's logits, 0 for another rank's; (C,) whether it is this rank's.

        -100 is no rank's.
        """
        index = labels_C - self.start
        owned = (index >= 0) & (index < own_rows)
        return index.where(owned, 0).unsqueeze(1), owned


def head_inputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, rows: VocabularyRows
) -> tuple[Tensor, Tensor, Tensor]:
    """(this rank's rows of the weight, flat labels, which of them are outside of the vocabulary).

    Raises:
        ValueError: for shapes that do not fit, and for labels outside where they are on the CPU: elsewhere that would
            take a synchronisation.
    """
    violations = []
    if hidden.dim() != 3 or weight.dim() != 2 or hidden.shape[2:] != weight.shape[1:]:
        violations.append("hidden must be (batch, tokens, hidden size) and weight (vocabulary, hidden size)")
    if labels.shape != hidden.shape[:2]:
        violations.append("there must be one label for each token")
    if hidden.dtype != weight.dtype:
        violations.append("hidden and weight must share their dtype")
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
    return local_tensor(weight), flat, outside


def without_targets(labels_C: Tensor) -> bool:
    """Whether a chunk can be left out, which is known without a synchronisation on the CPU alone."""
    return labels_C.device.type == "cpu" and bool((labels_C == IGNORED_LABEL).all())


def logits_of(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    """(C, V) in fp32 (fp64 for fp64)."""
    return (hidden_CH @ weight_VH.T).to(torch.promote_types(hidden_CH.dtype, torch.float32))


def subtract_largest(logits_CV: Tensor, rows: VocabularyRows) -> Tensor:
    """Make each token's largest logit, over all ranks, 0, in place; gives what it was (C,)."""
    largest = logits_CV.amax(1)
    rows.all_reduce(largest, dist.ReduceOp.MAX)
    logits_CV.sub_(largest.unsqueeze(1))
    return largest


def add_weight_gradient(grad_weight: Tensor, grad_logits_CV: Tensor, hidden_CH: Tensor) -> None:
    """Add a chunk's part, summed in the dtype of `grad_weight`, which may be wider than that of the factors."""
    if grad_weight.dtype == hidden_CH.dtype:
        grad_weight.addmm_(grad_logits_CV.T, hidden_CH)
    else:
        grad_weight += grad_logits_CV.T @ hidden_CH
