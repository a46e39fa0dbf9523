"""Pack a data-parallel rank's samples into micro-batches: rows of sequences, equally many and long on every rank.

    samples  --plan_rows-->  RowPlan  --micro_batches-->  this rank's tokens of each row
    the model's output for this rank's tokens  --unpack-->  one tensor per sample, on the CPU

A micro-batch is one row. Padding follows the last boundary of `cu_seqlens`, and neither attends nor is attended to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from attention import SequenceLayout
from parallel import ParallelMesh
from usp.rlhf.graph import Sequences
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.samples import Samples
from usp.sp.sequence import IGNORED_LABEL, shard_batch, shard_sequence, unshard_sequence

SEQUENCE = "sequence"  # key in a micro-batch: the index, within the row, of each token's sequence


@dataclass(frozen=True)
class RowPlan:
    """The samples in each row.

    Attributes:
        rows: indices of the samples in each micro-batch, ascending, possibly none.
        row_len: tokens in a row, including padding, over all sequence-parallel ranks.
    """

    rows: tuple[tuple[int, ...], ...]
    row_len: int


def pack_lengths(
    ids: Sequence[int], lengths: Sequence[int], *, unit: int = 1, budget: int = 0, at_least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the samples in each row: `at_least` rows, more if they would exceed `budget` tokens.

    Worst-fit decreasing: the longest unit first, each into the shortest row. A unit longer than the budget gets a
    separate row.

    Args:
        unit: number of samples with consecutive ids, starting at a multiple of it, that share a row.
        budget: 0: no limit.
    """
    units: dict[int, list[int]] = {}
    for index, sample in enumerate(ids):
        units.setdefault(sample // unit, []).append(index)
    rows: list[list[int]] = [[] for _ in range(at_least)]
    loads = [0] * at_least
    sizes = {number: sum(lengths[index] for index in members) for number, members in units.items()}
    for number in sorted(units, key=lambda number: (-sizes[number], number)):
        row = loads.index(min(loads))
        if budget and loads[row] and loads[row] + sizes[number] > budget:
            row = len(rows)
            rows.append([])
            loads.append(0)
        rows[row] += units[number]
        loads[row] += sizes[number]
    return tuple(tuple(sorted(row)) for row in rows)


def plan_rows(samples: Samples, layout: CallLayout, mesh: ParallelMesh, unit: int = 1) -> RowPlan | None:
    """Pack this data-parallel rank's samples, with the same number and length of rows on every rank.

    Collective over the batch axis, on every rank of the mesh. Returns None if no rank has a sample.
    """
    lengths = [len(tokens) for tokens in samples["tokens"]] if samples.ids else []
    rows = pack_lengths(samples.ids, lengths, unit=unit, budget=layout.token_budget, at_least=mesh.size("pp"))
    longest = max(sum(lengths[index] for index in row) for row in rows)
    shape = torch.tensor([len(rows), longest], device=mesh.device_type)
    dist.all_reduce(shape, dist.ReduceOp.MAX, group=mesh.group("batch"))
    number, longest = shape.tolist()
    if not longest:
        return None
    multiple = SequenceLayout.multiple_of(layout.sp_layout, mesh.size("ring"), mesh.size("ulysses"))
    if layout.tp_sequence_parallel:
        multiple *= mesh.size("tp")
    return RowPlan(rows + ((),) * (number - len(rows)), -(-longest // multiple) * multiple)


def micro_batches(
    samples: Samples, plan: RowPlan, layout: CallLayout, mesh: ParallelMesh, keys: Iterable[str] = (), counts: str = ""
) -> list[dict[str, Tensor]]:
    """Return this rank's tokens of each row, on the mesh's device; no communication.

    Has `input_ids`, `position_ids`, `shift_labels` and `cu_seqlens` as `shard_batch`; `SEQUENCE`: the index of each
    token's sequence in the row, or the number of sequences for padding; `real`: bool, False for padding; and each of
    `keys` as float32, 0 in padding.
    All but `cu_seqlens` are (1, this rank's tokens).

    counts: key of the samples that is 0 at tokens without a label; "": all have one, but the last of a sequence.

    Raises ValueError naming values that do not have one number per token of their sample.
    """
    keys = tuple(keys)
    checked = (*keys, counts) if counts else keys
    violations = [
        f"{key} of sample {sample} has shape {tuple(value.shape)}, expected {tuple(tokens.shape)}"
        for key in (checked if samples.ids else ())  # empty samples may lack keys
        for sample, tokens, value in zip(samples.ids, samples["tokens"], samples[key], strict=True)
        if value.shape != tokens.shape
    ]
    if violations:
        raise ValueError(f"per-token values must have one number per token: {'; '.join(violations[:5])}")

    def joined(values: Sequence[Tensor], padding: int, dtype: torch.dtype) -> Tensor:
        whole = torch.full((1, plan.row_len), padding, dtype=dtype)
        if values:
            content = torch.cat([value.to(dtype) for value in values])
            whole[0, : len(content)] = content
        return whole.to(mesh.device_type)

    batches = []
    for row in plan.rows:
        tokens = [samples["tokens"][index] for index in row]
        whole = {
            "input_ids": joined(tokens, 0, torch.int64),
            "labels": joined(tokens, IGNORED_LABEL, torch.int64),
            "cu_seqlens": _boundaries(samples, row).unsqueeze(0),
        }
        batch = shard_batch(whole, mesh, layout.sp_layout)
        numbers = joined([torch.full((len(ids),), n) for n, ids in enumerate(tokens)], len(tokens), torch.int64)
        others = {key: joined([samples[key][index] for index in row], 0, torch.float32) for key in keys}
        for key, value in {SEQUENCE: numbers, **others}.items():
            batch[key] = shard_sequence(value, mesh, layout.sp_layout, cu_seqlens=whole["cu_seqlens"])
        batch["real"] = batch[SEQUENCE] < len(tokens)
        if counts:
            counted = joined([samples[counts][index] != 0 for index in row], 0, torch.bool)
            kept = shard_sequence(counted, mesh, layout.sp_layout, cu_seqlens=whole["cu_seqlens"])
            batch["shift_labels"] = batch["shift_labels"].where(kept, IGNORED_LABEL)
        batches.append(batch)
    return batches


def unpack(
    parts: Sequence[Tensor], plan: RowPlan, samples: Samples, layout: CallLayout, mesh: ParallelMesh
) -> list[Tensor]:
    """Return each sample's per-token values, on the CPU, from the (1, this rank's tokens) of each micro-batch.

    Collective over the sp axis, all of whose ranks get all values.
    """
    boundaries = [_boundaries(samples, row) for row in plan.rows]
    longest = max(map(len, boundaries))
    padded = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in boundaries])
    whole = unshard_sequence(torch.cat(list(parts)), mesh, layout.sp_layout, cu_seqlens=padded).cpu()
    values: dict[int, Tensor] = {}
    for row, content in zip(plan.rows, whole, strict=True):
        lengths = [len(samples["tokens"][index]) for index in row]
        cut = content.split([*lengths, plan.row_len - sum(lengths)])
        values.update(zip(row, (part.clone() for part in cut), strict=False))
    return [values[index] for index in range(len(samples))]


def _boundaries(samples: Samples, row: Sequence[int]) -> Tensor:
    """Return the cu_seqlens of a row of samples; a row without samples has one empty document."""
    lengths = [len(samples["tokens"][index]) for index in row] or [0]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def sequences_of(inputs: Mapping[str, Tensor], group: dist.ProcessGroup) -> Sequences:
    """Return the sequences of a micro-batch of `micro_batches`, whose row is sharded over `group`."""
    # A pipeline pads cu_seqlens by repeating the last boundary.
    return Sequences(inputs[SEQUENCE], int((inputs["cu_seqlens"].diff() > 0).sum()), group)
