"""The ring and ulysses axes of any mesh, messages over their grid, and sharding of sequences and batches over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from usp.attention import OF_DOCUMENTS, AttentionSpec, Channel, Keep, SequenceLayout, compute_now, parse_layout
from usp.attention.comm import Pending, gather_rows, reduce_scatter
from usp.attention.spec import Documents
from usp.parallel import ParallelMesh, agree

IGNORED_LABEL = -100  # the convention of transformers and torch


@dataclass(frozen=True)
class SpAxes:
    """Ring and ulysses process groups of this rank; None for a degree of 1."""

    ring_group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    device_type: str

    @staticmethod
    def of(mesh: ParallelMesh | DeviceMesh) -> SpAxes:
        """Read the axes named ring and ulysses; if a torch DeviceMesh lacks one, its degree is 1. Raises TypeError for
        any other type of mesh, and ValueError for a DeviceMesh with neither axis."""
        if isinstance(mesh, ParallelMesh):
            axes: list[DeviceMesh | None] = [mesh.device_mesh(name) for name in ("ring", "ulysses")]
        elif not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a ParallelMesh or a torch DeviceMesh, got {type(mesh).__name__}")
        elif not {"ring", "ulysses"} & set(names := mesh.mesh_dim_names or ()):
            raise ValueError(
                f"DeviceMesh has axes {names or 'without names'}, but must name at least one of ring and ulysses: "
                f"init_device_mesh(device, (2, 4), mesh_dim_names=('ring', 'ulysses'))"
            )
        else:
            axes = [mesh[name] if name in names else None for name in ("ring", "ulysses")]
        ring, ulysses = (axis.get_group() if axis is not None and axis.size() > 1 else None for axis in axes)
        return SpAxes(ring, ulysses, mesh.device_type)

    @property
    def ring(self) -> int:
        return 1 if self.ring_group is None else self.ring_group.size()

    @property
    def ulysses(self) -> int:
        return 1 if self.ulysses_group is None else self.ulysses_group.size()

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring_group is None else dist.get_rank(self.ring_group)

    @property
    def ulysses_rank(self) -> int:
        return 0 if self.ulysses_group is None else dist.get_rank(self.ulysses_group)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups of more than one rank; all-reducing over each in turn covers the grid."""
        return [group for group in (self.ulysses_group, self.ring_group) if group is not None]

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.ring * self.ulysses

    def layout(self, name: str, seq_len: int, documents: tuple[Documents, ...] | None = None) -> SequenceLayout:
        """Return the layout of rows of `seq_len` global tokens over these axes. Raises ValueError if they do not divide
        it, or if the layout depends on `documents`, as in `AttentionSpec`, and they do not fit."""
        known = documents if parse_layout(name)[0] in OF_DOCUMENTS else None
        return SequenceLayout(name, seq_len, self.ring, self.ulysses, known).decided

    def padding(self, name: str, seq_len: int) -> int:
        """Return how many tokens `seq_len` lacks to be divided."""
        return SequenceLayout.padded_len(name, seq_len, self.ring, self.ulysses) - seq_len

    def positions(self, layout: SequenceLayout) -> torch.Tensor:
        """Return the global positions of this rank's tokens, int64 (`layout.rows`, local_len)."""
        return torch.stack([layout.positions(self.ring_rank, self.ulysses_rank, row) for row in range(layout.rows)])

    def agree(self, value: object, what: str) -> None:
        """Raise RanksDisagree on every rank of the grid if `repr(value)` differs between ranks. Collective."""
        agree(value, self.groups, what, self.device_type)


def _grid(mesh: ParallelMesh | DeviceMesh) -> tuple[list[str], DeviceMesh]:
    """Return the axes of a sequence in the order of the mesh, and the mesh of these."""
    names = mesh.dims.degrees() if isinstance(mesh, ParallelMesh) else mesh.mesh_dim_names or ()
    axes = [axis for axis in names if axis in ("ring", "ulysses")]
    return axes, mesh.device_mesh(*axes) if isinstance(mesh, ParallelMesh) else mesh[tuple(axes)]


class GridChannel(Channel):
    """A channel over the whole grid, in which rank ring_rank * ulysses + ulysses_rank has that number. members: the
    rank in the process group of each rank of the grid."""

    def __init__(self, group: dist.ProcessGroup | None, members: Sequence[int]) -> None:
        super().__init__(group)
        self.members = tuple(members)
        self.rank = self.members.index(self.rank)

    def post(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Pending:
        return super().post(*([(self.members[peer], x) for peer, x in part] for part in (sends, receives)))

    @staticmethod
    def of(mesh: ParallelMesh | DeviceMesh) -> GridChannel:
        """Return the channel of a mesh with the axes of `SpAxes`. Collective for a torch DeviceMesh of both axes."""
        axes, grid = _grid(mesh)
        if isinstance(mesh, ParallelMesh):
            group = mesh.group("sp")
        else:
            group = (grid if len(axes) == 1 else grid._flatten("sp")).get_group()
        if grid.size() == 1:
            return GridChannel(None, (0,))
        ranks = grid.mesh.t() if axes == ["ulysses", "ring"] else grid.mesh
        in_group = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
        return GridChannel(group, [in_group[rank] for rank in torch.flatten(ranks).tolist()])


def ulysses_ranks(mesh: ParallelMesh | DeviceMesh) -> list[list[int]]:
    """Return the global ranks of each ulysses group of this rank's grid."""
    axes, grid = _grid(mesh)
    return grid.mesh.movedim(axes.index("ulysses"), -1).reshape(-1, grid.mesh.shape[axes.index("ulysses")]).tolist()


class StepKeeper:
    """Runner of layers on a mesh whose calls pass their steps to `keep`."""

    keep: Keep = staticmethod(compute_now)

    @contextmanager
    def keeping(self, keep: Keep) -> Iterator[None]:
        """Pass the steps of calls to `keep`: `KeepResults` in a checkpoint's forward, its replay in recomputation."""
        outside, self.keep = self.keep, keep
        try:
            yield
        finally:
            self.keep = outside


def shard_sequence(
    x: Tensor, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag", dim: int = 1, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return this rank's shard of a global tensor that every sequence-parallel rank holds; no communication.

    `x.shape[dim]` is the global length; the shard has length / (ring * ulysses), rounded up with zeros at the end of
    the sequence, which `cu_seqlens` must hide: [0, length] for one document. The balanced and the auto layout depend on
    them, as in `shard_batch`; with documents of its own for every row, rows are the first dimension. Differentiable.
    Raises ValueError for an unknown layout, and without `cu_seqlens` for these two or a length that it cannot divide.
    """
    axes = SpAxes.of(mesh)
    _check_documents(layout, cu_seqlens)
    if cu_seqlens is not None and (missing := axes.padding(layout, x.shape[dim])):
        x = pad(x.movedim(dim, -1), (0, missing)).movedim(-1, dim)
    return select_tokens(x, axes.positions(axes.layout(layout, x.shape[dim], documents_of(cu_seqlens))), dim)


def _check_documents(layout: str, cu_seqlens: Tensor | None) -> None:
    if parse_layout(layout)[0] in OF_DOCUMENTS and cu_seqlens is None:
        raise ValueError(
            f"layout={layout!r} depends on the documents: pass the cu_seqlens that shard_batch gets; one document per "
            "row is torch.tensor([0, length])"
        )


def select_tokens(x: Tensor, positions: Tensor, dim: int = 1) -> Tensor:
    """Select the tokens at `positions`, (1, tokens) for all rows or (rows, tokens), along `dim`; rows are the first
    dimension. Raises ValueError if there are other numbers of rows."""
    if len(positions) == 1:
        return x.index_select(dim, positions[0].to(x.device))
    if len(positions) != len(x) or not dim:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} must have {len(positions)} rows, as cu_seqlens has")
    return torch.stack([row.index_select(dim - 1, own.to(x.device)) for row, own in zip(x, positions, strict=True)])


def unshard_sequence(
    x: Tensor,
    mesh: ParallelMesh | DeviceMesh,
    layout: str = "zigzag",
    dim: int = 1,
    cu_seqlens: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """Gather all ranks' shards in global order: the inverse of `shard_sequence`. Collective. The gradient is that of
    the sum of all ranks' losses: the ranks' gradients are summed, and each gets its shard.

    length: of the sequence, without the tokens that `shard_sequence` or `shard_batch` added; None keeps these.
    """
    axes = SpAxes.of(mesh)
    _check_documents(layout, cu_seqlens)
    if axes.ranks == 1:
        return x if length is None else x.narrow(dim, 0, length)
    ordered = axes.layout(layout, x.shape[dim] * axes.ranks, documents_of(cu_seqlens))
    grid = [(r, u) for r in range(axes.ring) for u in range(axes.ulysses)]
    order = [torch.cat([ordered.positions(*rank, row) for rank in grid]).argsort() for row in range(ordered.rows)]
    gathered = _Gather.apply(x.movedim(dim, 0), axes).movedim(0, dim)
    whole = select_tokens(gathered, torch.stack(order), dim)
    return whole if length is None else whole.narrow(dim, 0, length)


class _Gather(torch.autograd.Function):
    """(s, ...) of each rank -> (ring * ulysses * s, ...), ulysses innermost."""

    @staticmethod
    def forward(ctx, x: Tensor, axes: SpAxes) -> Tensor:
        ctx.axes = axes
        for group in (axes.ulysses_group, axes.ring_group):
            if group is not None:
                x = gather_rows(x, group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        for group in (ctx.axes.ring_group, ctx.axes.ulysses_group):
            if group is not None:
                total = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
                reduce_scatter(total, grad.contiguous(), group=group)
                grad = total
        return grad, None


def shard_batch(
    batch: Mapping[str, Tensor], mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag"
) -> dict[str, Tensor]:
    """Return this rank's shard of a batch that all sequence-parallel ranks hold; no communication.

    Args:
        batch: `input_ids` (B, S) of global length S; optionally `labels` (B, S), unshifted as in transformers, -100 for
            tokens without a target; optionally `cu_seqlens`, the boundaries of packed documents, integers of shape
            (documents + 1,) for all rows or (B, documents + 1) padded by repeating the last, and with them
            `prefix_tree`, as for `UnifiedSPAttention`.

    Returns:
        `input_ids`, `position_ids` (counted from each document's start, or its root's), `shift_labels` if there are
        labels (token t's target is label t + 1 of the same document, else -100), all (B, S / (ring * ulysses)), and
        `cu_seqlens` and `prefix_tree` unchanged, on the CPU. Pass them to the model as keyword arguments,
        `shift_labels` to the loss. Rows of a length that the layout cannot divide get tokens without a label behind the
        last document; `cu_seqlens` hide them, and are added if missing.

    Raises ValueError for missing or unknown keys, mismatched shapes, or invalid `cu_seqlens`.
    """
    _check(batch)
    axes, cu_seqlens = SpAxes.of(mesh), batch.get("cu_seqlens")
    rows, length = batch["input_ids"].shape
    missing = axes.padding(layout, length)
    if missing and cu_seqlens is None:
        cu_seqlens = torch.tensor([0, length])
    elif missing:
        document_starts(cu_seqlens, rows, length)  # the documents end where there are tokens
    ids, seq_len = pad(batch["input_ids"], (0, missing)), length + missing
    starts = document_starts(cu_seqlens, rows, seq_len)
    local = axes.positions(axes.layout(layout, seq_len, documents_of(cu_seqlens)))
    tree = batch.get("prefix_tree")
    origins = starts if tree is None else document_starts(cu_seqlens, rows, seq_len, prefix_tree=tree)
    positions = (local - select_tokens(origins, local)).to(ids.device)
    sharded = {"input_ids": select_tokens(ids, local), "position_ids": positions}
    if "labels" in batch:
        labels = pad(batch["labels"], (0, missing))
        sharded["shift_labels"] = select_tokens(_shifted(labels, starts, cu_seqlens), local)
    if cu_seqlens is not None:
        sharded["cu_seqlens"] = cu_seqlens.cpu()
    if tree is not None:
        sharded["prefix_tree"] = tree.cpu()
    return sharded


def split_rows(batch: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Split the batch by rows into `parts` equal micro-batches."""
    pieces = {key: value.chunk(parts) for key, value in batch.items()}
    return [{key: chunks[part] for key, chunks in pieces.items()} for part in range(parts)]


def document_starts(
    cu_seqlens: Tensor | None,
    rows: int,
    seq_len: int,
    positions: Tensor | None = None,
    prefix_tree: Tensor | None = None,
) -> Tensor:
    """Return where the document of each token starts, after the last boundary that boundary: (rows, tokens) of the
    tokens at `positions`, (1, tokens) for all rows or (rows, tokens); None for all. With a prefix tree, as many tokens
    earlier as precede the document in those it continues."""
    parents = rows_of(prefix_tree, "prefix_tree", "documents")
    spec = AttentionSpec(documents=documents_of(cu_seqlens), parents=parents)
    violation = spec.document_violation(rows, seq_len)
    if violation:
        raise ValueError(violation)
    positions = torch.arange(seq_len).unsqueeze(0) if positions is None else positions
    starts = torch.zeros(rows, positions.shape[1], dtype=torch.int64)
    for row, own in enumerate(positions.expand(rows, -1).contiguous()):
        boundaries = torch.tensor(spec.row_documents(row, seq_len))
        origins = boundaries - torch.tensor([*spec.row_depths(row, seq_len), 0]) if parents else boundaries
        starts[row] = origins[torch.searchsorted(boundaries, own, right=True) - 1]
    return starts


def _shifted(labels: Tensor, starts: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return each token's target: the next label if the next token is in the same document, else -100."""
    shifted = torch.full_like(labels, IGNORED_LABEL)
    same = starts[:, 1:] == starts[:, :-1]
    if cu_seqlens is not None:  # after the last boundary there is only padding
        ends = cu_seqlens.cpu().reshape(-1, cu_seqlens.shape[-1])[:, -1:]
        same = same & (torch.arange(1, labels.shape[1]) < ends)
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
            f"{tuple(batch['input_ids'].shape)}: they are shifted here, before the sequence is sharded"
        )
    for key in sorted(set(batch) - {"input_ids", "labels", "cu_seqlens", "prefix_tree"}):
        hint = {
            "attention_mask": ": drop padding and pack documents, with their boundaries in cu_seqlens",
            "position_ids": ": they are computed from cu_seqlens",
        }.get(key, ": shard it with shard_sequence")
        violations.append(f"{key} is not a key of shard_batch{hint}")
    if violations:
        raise ValueError("; ".join(violations))


def documents_of(cu_seqlens: Tensor | None) -> tuple[tuple[int, ...], ...] | None:
    """Return `AttentionSpec.documents` for a `cu_seqlens` tensor; raises ValueError for an invalid one."""
    return rows_of(cu_seqlens, "cu_seqlens", "documents + 1")


def rows_of(x: Tensor | None, name: str, columns: str) -> tuple[tuple[int, ...], ...] | None:
    """Return the rows of an integer tensor, one for all rows or one for each; raises ValueError for any other."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be an integer tensor, got {type(x).__name__}")
    if x.dim() not in (1, 2) or x.dtype.is_floating_point or x.dtype == torch.bool:
        raise ValueError(
            f"{name} must be integers of shape ({columns},) or (batch, {columns}), got {x.dtype} {tuple(x.shape)}"
        )
    rows = x.tolist()
    return tuple(map(tuple, rows)) if x.dim() == 2 else (tuple(rows),)
