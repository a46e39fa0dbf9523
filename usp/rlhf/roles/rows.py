"""Pack a data-parallel rank's samples into micro-batches: rows of sequences, equally many and long on every rank.

    samples  --plan_rows-->  RowPlan  --micro_batches-->  this rank's tokens of each row
    the model's output for this rank's tokens  --unpack-->  one tensor per sample, on the CPU

A micro-batch is one row. Padding follows the last boundary of `cu_seqlens`, and neither attends nor is attended to.

Samples with a common prefix, such as the responses to a prompt, can have it once: the row is then a prefix tree.

    documents   a a a a a | a 1 1 1 | a 2 2 | a 3 3 3 3      the prompt's last token predicts the first one of each
    parents       -1          0         0       0            response, so every response begins with it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from usp.attention import SequenceLayout
from usp.parallel import ParallelMesh
from usp.rlhf.graph import BRANCHES, ROUTED, Sequences
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.samples import Samples
from usp.sp.sequence import IGNORED_LABEL, shard_batch, shard_sequence, unshard_sequence

SEQUENCE = "sequence"  # key in a micro-batch: the index, within the row, of each token's sequence


Family = tuple[range, int]
Tokens = Sequence[Tensor] | Mapping[int, Tensor]


@dataclass(frozen=True)
class RowSegment:
    """Tokens [start, stop) of a sample as one document of a row. parent: of a prefix tree; sharers: the samples whose
    tokens they are."""

    sample: int
    start: int
    stop: int
    parent: int
    sharers: tuple[int, ...]

    def of(self, values: Tokens) -> Tensor:
        return values[self.sample][self.start : self.stop]


@dataclass(frozen=True)
class RowPlan:
    """The samples in each row."""

    rows: tuple[tuple[int, ...], ...]  # indices of the samples in each micro-batch, ascending, possibly none
    row_len: int  # tokens in a row, including padding, over all sequence-parallel ranks
    families: tuple[Family, ...] = ()  # consecutive samples in one row that share their first tokens, and how many


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


def prefix_families(samples: Samples, budget: int = 0, counts: str = "") -> tuple[Family, ...]:
    """Return the division of samples into families that saves most tokens.

    budget: the most tokens of a family of several; 0: no limit. counts: tokens where this key is not 0 have an output
    for each sample, and are not shared.
    """
    tokens = samples["tokens"] if samples.ids else []
    lengths, alike = list(map(len, tokens)), []
    most = lengths
    if counts and samples.ids:
        most = [int(counted[0]) if len(counted := each.nonzero()) else len(each) for each in samples[counts]]
    for a, b in pairwise(tokens):
        size = min(len(a), len(b))
        different = (a[:size] != b[:size]).nonzero()
        # The label of the last common token differs.
        alike.append((int(different[0]) if len(different) else size) - 1)
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # by end: tokens saved, begin of the last family, tokens it shares
    for end in range(1, len(tokens) + 1):
        best.append((best[end - 1][0], end - 1, 0))
        shared, total = most[end - 1], lengths[end - 1]
        for begin in range(end - 2, -1, -1):
            shared, total = min(shared, alike[begin], most[begin]), total + lengths[begin]
            saved = (end - begin - 1) * shared
            if shared <= 0 or (budget and total - saved > budget):
                break
            best[end] = max(best[end], (best[begin][0] + saved, begin, shared))
    families, end = [], len(tokens)
    while end:
        _, begin, shared = best[end]
        families.append((range(begin, end), shared))
        end = begin
    return tuple(reversed(families))


def plan_rows(
    samples: Samples, layout: CallLayout, mesh: ParallelMesh, unit: int = 1, *, share: bool = False, counts: str = ""
) -> RowPlan | None:
    """Pack this data-parallel rank's samples, with the same number and length of rows on every rank.

    share: samples of a row have common prefixes once, but for tokens where the key `counts` is not 0; only for `unit`
    1. Collective over the batch axis, on every rank of the mesh. Returns None if no rank has a sample.
    """
    ids, lengths = samples.ids, [len(tokens) for tokens in samples["tokens"]] if samples.ids else []
    families = prefix_families(samples, layout.token_budget, counts) if share and unit == 1 else ()
    if families:
        ids = tuple(number for number, (members, _) in enumerate(families) for _ in members)
        for members, shared in families:
            for index in members[1:]:
                lengths[index] -= shared
    rows = pack_lengths(ids, lengths, unit=unit, budget=layout.token_budget, at_least=mesh.size("pp"))
    longest = max(sum(lengths[index] for index in row) for row in rows)
    shape = torch.tensor([len(rows), longest], device=mesh.device_type)
    dist.all_reduce(shape, dist.ReduceOp.MAX, group=mesh.group("batch"))
    number, longest = shape.tolist()
    if not longest:
        return None
    multiple = SequenceLayout.multiple_of(layout.sp_layout, mesh.size("ring"), mesh.size("ulysses"))
    if layout.tp_sequence_parallel:
        multiple *= mesh.size("tp")
    return RowPlan(rows + ((),) * (number - len(rows)), -(-longest // multiple) * multiple, families)


def micro_batches(
    samples: Samples, plan: RowPlan, layout: CallLayout, mesh: ParallelMesh, keys: Sequence[str] = (), counts: str = ""
) -> list[dict[str, Tensor]]:
    """Return this rank's tokens of each row, on the mesh's device; no communication.

    Has `input_ids`, `position_ids`, `shift_labels`, `cu_seqlens` and, where samples share tokens, `prefix_tree` as
    `shard_batch`; `SEQUENCE`: the index of each token's sequence in the row (of the first, if it is shared), or the
    number of sequences for padding; `real`: bool, False for padding; and each of
    `keys` as float32, 0 in padding.
    All but `cu_seqlens` and `prefix_tree` are (1, this rank's tokens); `ROUTED`, if the samples have it, has several
    numbers for each.

    counts: key of the samples that is 0 at tokens without a label; "": all have one, but the last of a sequence.

    Raises ValueError naming values that do not have one number per token of their sample.
    """
    violations = [
        f"{key} of sample {sample} has shape {tuple(value.shape)}, expected {tuple(tokens.shape)}"
        for key in ((*keys, *([counts] if counts else [])) if samples.ids else ())  # empty samples may lack keys
        for sample, tokens, value in zip(samples.ids, samples["tokens"], samples[key], strict=True)
        if value.shape != tokens.shape
    ]
    if violations:
        raise ValueError(f"per-token values must have one number per token: {'; '.join(violations[:5])}")
    tokens = samples["tokens"] if samples.ids else []
    routed = [x.view(len(ids), -1) for x, ids in zip(samples.values.get(ROUTED, ()), tokens, strict=False)]
    labels = [pad(ids[1:], (0, 1), value=IGNORED_LABEL) for ids in tokens]
    if counts and samples.ids:
        labels = [x.where(each != 0, IGNORED_LABEL) for x, each in zip(labels, samples[counts], strict=True)]
    batches, sharing = [], any(shared for _, shared in plan.families)
    for row, segments in zip(plan.rows, _segments(samples, plan), strict=True):
        boundaries = _boundaries(segments)

        def joined(
            values: Tokens, padding: int, dtype: torch.dtype, *width: int, segments: Sequence[RowSegment] = segments
        ) -> Tensor:
            whole = torch.full((1, plan.row_len, *width), padding, dtype=dtype)
            if segments:
                content = torch.cat([segment.of(values).to(dtype) for segment in segments])
                whole[0, : len(content)] = content
            return whole.to(mesh.device_type)

        whole = {"input_ids": joined(tokens, 0, torch.int64), "cu_seqlens": boundaries.unsqueeze(0)}
        if sharing:
            whole["prefix_tree"] = torch.tensor([[segment.parent for segment in segments] or [-1]], dtype=torch.int32)
        batch = shard_batch(whole, mesh, layout.sp_layout)
        places, count = dict[int, Tensor](), 0
        for index in row:
            lengths = [end - begin for begin, end in pairwise((0, *_ends(samples, index)))]
            places[index] = torch.cat([torch.full((length,), count + n) for n, length in enumerate(lengths)])
            count += len(lengths)
        others = {
            "shift_labels": joined(labels, IGNORED_LABEL, torch.int64),
            SEQUENCE: joined(places, count, torch.int64),
            **{key: joined(samples[key] if samples.ids else (), 0, torch.float32) for key in keys},
        }
        if routed:
            others[ROUTED] = joined(routed, 0, torch.int16, routed[0].shape[1])
        for key, value in others.items():
            batch[key] = shard_sequence(value, mesh, layout.sp_layout, cu_seqlens=boundaries)
        batch["real"] = batch[SEQUENCE] < count
        batches.append(batch)
    return batches


def _segments(samples: Samples, plan: RowPlan) -> list[list[RowSegment]]:
    """Return the documents of each row, in order."""
    family_of = {index: family for family in plan.families for index in family[0]}
    rows: list[list[RowSegment]] = []
    for row in plan.rows:
        segments: list[RowSegment] = []
        for index in row:
            members, shared = family_of.get(index, ((index,), 0))
            if shared and index == members[0]:
                segments.append(RowSegment(index, 0, shared, -1, tuple(members)))
                parent = len(segments) - 1
            for begin, end in pairwise((shared, *_ends(samples, index))):
                segments.append(RowSegment(index, begin, end, parent if shared else -1, (index,)))
        rows.append(segments)
    return rows


def _ends(samples: Samples, index: int) -> list[int]:
    """Return where the conversations of a sample end: each is a document and a sequence of its own."""
    branches, whole = samples.values.get(BRANCHES), [len(samples["tokens"][index])]
    return whole if branches is None else branches[index].unique(return_counts=True)[1].cumsum(0).tolist()


def unpack(
    parts: Sequence[Tensor], plan: RowPlan, samples: Samples, layout: CallLayout, mesh: ParallelMesh
) -> list[Tensor]:
    """Return each sample's per-token values, on the CPU, from the (1, this rank's tokens) of each micro-batch.
    Collective over the sp axis, all of whose ranks get all values."""
    rows = _segments(samples, plan)
    boundaries = list(map(_boundaries, rows))
    longest = max(map(len, boundaries))
    padded = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in boundaries])
    whole = unshard_sequence(torch.cat(list(parts)), mesh, layout.sp_layout, cu_seqlens=padded).cpu()
    values: dict[int, list[Tensor]] = {index: [] for index in range(len(samples))}
    for segments, content in zip(rows, whole, strict=True):
        lengths = [segment.stop - segment.start for segment in segments]
        for segment, part in zip(segments, content.split([*lengths, plan.row_len - sum(lengths)]), strict=False):
            for index in segment.sharers:
                values[index].append(part)
    return [torch.cat(parts) for parts in values.values()]


def _boundaries(segments: Sequence[RowSegment]) -> Tensor:
    """Return the cu_seqlens of a row; one without samples has one empty document."""
    lengths = [segment.stop - segment.start for segment in segments] or [0]
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def sequences_of(inputs: Mapping[str, Tensor], group: dist.ProcessGroup) -> Sequences:
    """Return the sequences of a micro-batch of `micro_batches`, whose row is sharded over `group`."""
    # A pipeline pads cu_seqlens by repeating the last boundary.
    documents = int((inputs["cu_seqlens"].diff() > 0).sum())
    shared = inputs["prefix_tree"].unique() if "prefix_tree" in inputs else ()
    return Sequences(inputs[SEQUENCE], documents - sum(int(parent) >= 0 for parent in shared), group)
