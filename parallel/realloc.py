"""Weights from one layout into another, as `realloc_plan` says: every byte that a rank lacks, sent to it once.

    round 0    pack | fly ............ | unpack
    round 1           pack |             fly ............ | unpack
    round 2                                pack |           fly ...

A round is one all-to-all of bytes between the ranks that take part. Every link sends the same share of its bytes in
every round, so no round waits for one busy rank, and messages of two rounds at most are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import agree
from .boxes import Box, local_part
from .groups import ProcessGroups
from .param_layout import ParamLayout
from .realloc_plan import ReallocPlan

_ALONE = 64 << 10  # bytes from which a piece has a message of its own


class Piece(NamedTuple):
    """A box of a parameter that travels as a whole, row-major."""

    name: str
    box: Box


class Round(NamedTuple):
    """What one rank sends and receives: pieces, in order, by peer."""

    sends: Mapping[int, Sequence[Piece]]
    receives: Mapping[int, Sequence[Piece]]


def rank_rounds(plan: ReallocPlan, rank: int) -> list[Round]:
    """A rank's part of a plan. Sender and receiver find the same pieces in the same order. Pure."""
    sends: dict[int, list[Piece]] = {}
    receives: dict[int, list[Piece]] = {}
    for move in plan.moves:
        out = [transfer for transfer in move.transfers if transfer.sender == rank]
        into = [transfer for transfer in move.transfers if transfer.receiver == rank]
        for name in move.names:
            for transfer in out:
                sends.setdefault(transfer.receiver, []).append(Piece(name, transfer.box))
            for transfer in into:
                receives.setdefault(transfer.sender, []).append(Piece(name, transfer.box))
    shares = [{peer: _shares(pieces, plan) for peer, pieces in sorted(peers.items())} for peers in (sends, receives)]
    return [Round(*({peer: parts[n] for peer, parts in side.items()} for side in shares)) for n in range(plan.rounds)]


def _shares(pieces: Sequence[Piece], plan: ReallocPlan) -> list[list[Piece]]:
    """Pieces in order, cut into a share of as many bytes for each round; elements stay whole."""
    itemsizes = [plan.dst.parameters[piece.name].dtype.itemsize for piece in pieces]
    total = sum(piece.box.numel * itemsize for piece, itemsize in zip(pieces, itemsizes, strict=True))
    shares: list[list[Piece]] = [[] for _ in range(plan.rounds)]
    number = sent = 0
    for piece, itemsize in zip(pieces, itemsizes, strict=True):
        done = 0
        while done < piece.box.numel:
            count = min(piece.box.numel - done, (total * (number + 1) // plan.rounds - sent) // itemsize)
            shares[number] += [Piece(piece.name, box) for box in piece.box.run(done, done + count)]
            done, sent = done + count, sent + count * itemsize
            number += done < piece.box.numel  # the next element belongs to the next round
    return shares


class Reallocation:
    """Executes a plan, as often as it is asked to. Every rank of the world makes it, in the same order as others.

    Args:
        groups: of the process; what moves does so in the group of just the ranks that send or receive.
        device: where the parameters lie.

    Raises:
        RuntimeError: on every rank, if they do not have the same plan.
    """

    def __init__(self, plan: ReallocPlan, groups: ProcessGroups, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        agree(plan.identity, [dist.group.WORLD], "the plan of a reallocation", device)
        self.plan = plan
        self._rank, self._device = dist.get_rank(), device
        self._group = groups.get(plan.ranks) if plan.ranks else None
        self._rounds = [
            (_messages(sends, plan.src, self._rank), _messages(receives, plan.dst, self._rank))
            for sends, receives in rank_rounds(plan, self._rank)
        ]
        src, dst, rank = plan.src.boxes, plan.dst.boxes, self._rank
        self._kept = [
            (name, box.slices(src[name][rank]), box.slices(dst[name][rank])) for name, box in plan.kept(rank).items()
        ]

    @torch.no_grad()
    def run(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
        """Fill `dst` with the weights of `src`, bit by bit. Collective over the ranks of both; others may call it too.

        `dst` may share memory with `src` where `ReallocPlan.may_share` says so, and nowhere else.

        Args:
            src, dst: what this rank holds, as the plan's layouts say; empty where it holds nothing.

        Raises:
            ValueError: naming every parameter of this rank that is missing, or whose local part has another shape or
                dtype than the plan was made for; before anything is sent.
        """
        before = _local_parts(src, self.plan.src, self._rank, "src")
        after = _local_parts(dst, self.plan.dst, self._rank, "dst")
        if self._group is None:
            self._keep(before, after)
            return
        flying: _Flight | None = None
        for sends, receives in self._rounds:
            posted = _post(sends, receives, before, after, self._group)
            if flying:
                flying.land()
            else:
                self._keep(before, after)
            flying = posted
        assert flying is not None
        flying.land()

    def _keep(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        for name, old, new in self._kept:
            if before[name].data_ptr() != after[name].data_ptr():
                after[name][new].copy_(before[name][old])


class _Message(NamedTuple):
    """Pieces that travel together: for each, its parameter, where it lies in what this rank holds, and its bytes."""

    peer: int
    parts: Sequence[tuple[str, tuple[slice, ...], int]]

    @property
    def sizes(self) -> list[int]:
        return [size for _, _, size in self.parts]


def _messages(peers: Mapping[int, Sequence[Piece]], layout: ParamLayout, rank: int) -> list[_Message]:
    messages = []
    for peer, pieces in peers.items():
        small = []
        for name, box in pieces:
            size = box.numel * layout.parameters[name].dtype.itemsize
            part = (name, box.slices(layout.boxes[name][rank]), size)
            if size < _ALONE:
                small.append(part)
            else:
                messages.append(_Message(peer, [part]))
        if small:
            messages.append(_Message(peer, small))
    return messages


class _Flight(NamedTuple):
    """Messages under way, and where those go that were not received in their place."""

    works: Sequence[dist.Work]
    sent: Sequence[Tensor]  # must live until they have left
    landing: Sequence[tuple[Tensor, Sequence[Tensor]]]

    def land(self) -> None:
        for work in self.works:
            work.wait()
        for buffer, parts in self.landing:
            for values, part in zip(buffer.split([part.nbytes for part in parts]), parts, strict=True):
                part.copy_(values.view(part.dtype).view(part.shape))


def _post(
    sends: Sequence[_Message],
    receives: Sequence[_Message],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    group: dist.ProcessGroup,
) -> _Flight:
    """A piece alone in its message and in one run of memory needs no buffer there, whatever it is at the other end."""
    operations, sent, landing = [], [], []
    for peer, places in receives:
        parts = [after[name][slices] for name, slices, _ in places]
        if len(parts) == 1 and parts[0].is_contiguous():
            buffer = parts[0].view(-1).view(torch.uint8)
        else:
            buffer = parts[0].new_empty(sum(size for _, _, size in places), dtype=torch.uint8)
            landing.append((buffer, parts))
        operations.append(dist.P2POp(dist.irecv, buffer, peer, group))
    for peer, places in sends:
        parts = [before[name][slices] for name, slices, _ in places]
        if len(parts) == 1 and parts[0].is_contiguous():
            buffer = parts[0].view(-1).view(torch.uint8)
        else:
            buffer = parts[0].new_empty(sum(size for _, _, size in places), dtype=torch.uint8)
            for values, part in zip(buffer.split([part.nbytes for part in parts]), parts, strict=True):
                values.view(part.dtype).view(part.shape).copy_(part)
        operations.append(dist.P2POp(dist.isend, buffer, peer, group))
        sent.append(buffer)
    return _Flight(dist.batch_isend_irecv(operations) if operations else [], sent, landing)


def _local_parts(tensors: Mapping[str, Tensor], layout: ParamLayout, rank: int, what: str) -> dict[str, Tensor]:
    parts, violations = {}, []
    for name, boxes in layout.boxes.items():
        if rank not in boxes:
            continue
        if name not in tensors:
            violations.append(f"{name} is missing")
            continue
        part, wanted = local_part(tensors[name]), (boxes[rank].sizes, layout.parameters[name].dtype)
        if (tuple(part.shape), part.dtype) != wanted:
            violations.append(f"{name} is {tuple(part.shape)} {part.dtype} and must be {wanted[0]} {wanted[1]}")
        parts[name] = part
    if violations:
        raise ValueError(f"{what} on rank {rank} must be what its layout says: {'; '.join(violations)}")
    return parts
