"""A training batch, sharded over the sequence: what a model's forward needs on each rank.

Everything that depends on neighbouring tokens (the label shift, positions, document borders) is computed from the
global sequence, before it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attention import AttentionSpec
from parallel import ParallelMesh

from .axes import SpAxes
from .sp_attention import documents_of

IGNORED_LABEL = -100  # transformers' and torch's cross-entropy convention


def shard_batch(
    batch: Mapping[str, Tensor], mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag"
) -> dict[str, Tensor]:
    """This rank's part of a batch that all sequence-parallel ranks hold; no communication.

    Args:
        batch: `input_ids` (B, S) of global length S; optionally `labels` (B, S), unshifted as in transformers, -100 for
            tokens that are no target; optionally `cu_seqlens`, the borders of packed documents, integers of shape
            (documents + 1,) for every row alike or (B, documents + 1) padded by repeating the last.

    Returns:
        `input_ids`, `position_ids` (counted from each document's start), `shift_labels` where there are labels
        (token t's target is label t + 1 of its own document, else -100), all (B, S / (ring * ulysses)), and
        `cu_seqlens` unchanged, on the CPU. Hand them to the model as keyword arguments, `shift_labels` to the loss.

    Raises:
        ValueError: for missing or unknown keys, shapes that differ, a length that the layout cannot divide, or borders
            that do not fit.
    """
    _check(batch)
    ids, cu_seqlens = batch["input_ids"], batch.get("cu_seqlens")
    rows, seq_len = ids.shape
    axes = SpAxes.of(mesh)
    own = axes.positions(axes.layout(layout, seq_len)).to(ids.device)
    starts = document_starts(cu_seqlens, rows, seq_len)
    sharded = {"input_ids": ids[:, own], "position_ids": own - starts.to(ids.device)[:, own]}
    if "labels" in batch:
        sharded["shift_labels"] = _shifted(batch["labels"], starts, _ends(cu_seqlens, seq_len))[:, own]
    if cu_seqlens is not None:
        sharded["cu_seqlens"] = cu_seqlens.cpu()
    return sharded


def split_rows(batch: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Rows of the batch in `parts` equal micro-batches."""
    pieces = {key: value.chunk(parts) for key, value in batch.items()}
    return [{key: chunks[part] for key, chunks in pieces.items()} for part in range(parts)]


def document_starts(cu_seqlens: Tensor | None, rows: int, seq_len: int) -> Tensor:
    """(rows, seq_len): the position at which each token's document starts; behind the last border, that border."""
    spec = AttentionSpec(documents=documents_of(cu_seqlens))
    violation = spec.document_violation(rows, seq_len)
    if violation:
        raise ValueError(violation)
    starts = torch.zeros(rows, seq_len, dtype=torch.int64)
    for row in range(rows):
        borders = torch.tensor(spec.row_documents(row, seq_len))
        starts[row] = borders[torch.searchsorted(borders, torch.arange(seq_len), right=True) - 1]
    return starts


def _ends(cu_seqlens: Tensor | None, seq_len: int) -> Tensor:
    """(rows, 1) or (1, 1): the last border of each row. What lies behind it is padding."""
    if cu_seqlens is None:
        return torch.tensor([[seq_len]])
    return cu_seqlens.cpu().reshape(-1, cu_seqlens.shape[-1])[:, -1:]


def _shifted(labels: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Each token's target: the next label, if the next token is of the same document."""
    shifted = torch.full_like(labels, IGNORED_LABEL)
    next_place = torch.arange(1, labels.shape[1])
    same = (starts[:, 1:] == starts[:, :-1]) & (next_place < ends)
    shifted[:, :-1] = torch.where(same.to(labels.device), labels[:, 1:], IGNORED_LABEL)
    return shifted


def _check(batch: Mapping[str, Tensor]) -> None:
    violations = []
    if "input_ids" not in batch:
        violations.append("input_ids is missing")
    elif batch["input_ids"].dim() != 2:
        violations.append(f"input_ids {tuple(batch['input_ids'].shape)} must be (batch, tokens)")
    elif "labels" in batch and batch["labels"].shape != batch["input_ids"].shape:
        violations.append(
            f"labels {tuple(batch['labels'].shape)} must have the shape of input_ids "
            f"{tuple(batch['input_ids'].shape)}: they are shifted here, before the sequence is cut"
        )
    for key in sorted(set(batch) - {"input_ids", "labels", "cu_seqlens"}):
        hint = {
            "attention_mask": ": drop padding and pack documents, with their borders in cu_seqlens",
            "position_ids": ": they are made here, from the borders in cu_seqlens",
        }.get(key, ": shard it with shard_sequence")
        violations.append(f"{key} is not a key of shard_batch{hint}")
    if violations:
        raise ValueError("; ".join(violations))
