"""Execution of a reallocation plan: weights move from one layout to another, each missing byte sent exactly once.

    round 0    pack | transfer ........... | unpack
    round 1           pack | transfer .............. | unpack
    round 2                                  pack | transfer ...

Every link sends the same share of its bytes in every round, so that no round waits for one busy rank, and messages of
at most two rounds are in memory. Large pieces are separate messages, sent from or received into the parameter directly
if contiguous there. Small and strided pieces are packed and unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.agree import agree
from parallel.groups import ProcessGroups

from .boxes import Box, local_part
from .param_layout import ParamLayout
from .realloc_plan import ReallocPlan

_SEPARATE_BYTES = 512 << 10  # size from which a piece is a separate message: below, packing it is cheaper


class Piece(NamedTuple):
    """A box of a parameter that is sent as a unit, in row-major order."""

    name: str
    box: Box


class Round(NamedTuple):
    """Pieces that one rank sends and receives, in order, by peer."""

    sends: Mapping[int, Sequence[Piece]]
    receives: Mapping[int, Sequence[Piece]]


def rank_rounds(plan: ReallocPlan, rank: int) -> list[Round]:
    """Return a rank's part of a plan; sender and receiver derive the same pieces in the same order. Pure."""
    sends: dict[int, list[Piece]] = {}
    receives: dict[int, list[Piece]] = {}
    for move in plan.moves:
        own = [transfer for transfer in move.transfers if rank in (transfer.sender, transfer.receiver)]
        for name in move.names:
            for sender, receiver, box in own:
                peers, peer = (sends, receiver) if sender == rank else (receives, sender)
                peers.setdefault(peer, []).append(Piece(name, box))
    shares = [{peer: _shares(pieces, plan) for peer, pieces in sorted(peers.items())} for peers in (sends, receives)]
    return [Round(*({peer: parts[n] for peer, parts in side.items()} for side in shares)) for n in range(plan.rounds)]


def _shares(pieces: Sequence[Piece], plan: ReallocPlan) -> list[list[Piece]]:
    """Divide pieces, in order, into shares of equal size for all rounds, up to the plan's grain."""
    itemsizes = [plan.wire_dtype(piece.name).itemsize for piece in pieces]
    total = sum(piece.box.numel * itemsize for piece, itemsize in zip(pieces, itemsizes, strict=True))
    shares: list[list[Piece]] = [[] for _ in range(plan.rounds)]
    number = sent = 0
    for (name, box), itemsize in zip(pieces, itemsizes, strict=True):
        row = box.numel // box.sizes[0] if box.sizes else 1
        whole = row if row * itemsize <= plan.grain else 1
        done = 0
        while done < box.numel:
            count = min(box.numel - done, (total * (number + 1) // plan.rounds - sent) // itemsize)
            if done + count < box.numel:
                count -= count % whole
            shares[number] += [Piece(name, part) for part in box.run(done, done + count)]
            done, sent = done + count, sent + count * itemsize
            number += done < box.numel  # the rest belongs to the next round
    return shares


class Reallocation:
    """Executes a plan, any number of times. Must be created on every rank of the world, in the same order.

    Args:
        groups: the process groups; the plan runs in the group of the ranks that send or receive.

    Raises:
        RanksDisagree: on every rank, if they have different plans.
    """

    def __init__(self, plan: ReallocPlan, groups: ProcessGroups, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        agree(plan.identity, [dist.group.WORLD], "the plan of a reallocation", device)
        self.plan = plan
        self._rank, self._device = dist.get_rank(), device
        self._group = groups.get(plan.ranks) if plan.ranks else None
        if self._group is not None:
            dist.barrier(self._group)  # NCCL needs a collective of the whole group before point-to-point messages
        self._rounds = [
            (_messages(sends, plan.src, plan, self._rank), _messages(receives, plan.dst, plan, self._rank))
            for sends, receives in rank_rounds(plan, self._rank)
        ]
        self._kept = [
            (name, box.slices(plan.src.boxes[name][self._rank]), box.slices(plan.dst.boxes[name][self._rank]))
            for name, box in plan.kept(self._rank).items()
        ]

    @torch.no_grad()
    def run(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
        """Copy the weights of `src` to `dst`. Collective over the ranks of both; other ranks may call it too.

        Values are bitwise equal, unless `dst` has a smaller dtype: then they are rounded before being sent.

        Args:
            src, dst: parameters of this rank in the plan's two layouts, which must not share memory.

        Raises:
            ValueError: before anything is sent, listing every parameter of this rank that is missing, or whose local
                part does not have the shape and dtype of the plan.
        """
        before = _local_parts(src, self.plan.src, self._rank, "src")
        after = _local_parts(dst, self.plan.dst, self._rank, "dst")
        pending = _Pending([], [], [])
        for sends, receives in self._rounds:
            posted = self._post(sends, receives, before, after)
            pending.wait()
            pending = posted
        for name, old, new in self._kept:  # while the last round is transferred
            after[name][new].copy_(before[name][old])
        pending.wait()

    def _post(
        self,
        sends: Sequence[_Message],
        receives: Sequence[_Message],
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
    ) -> _Pending:
        """Start sending parts of `before` to peers and receiving parts of `after` from peers."""
        operations, sent, received = [], [], []
        for message in receives:
            buffer, copies = _buffer(message, after, self._device)
            received += copies
            operations.append(dist.P2POp(dist.irecv, buffer, message.peer, self._group))
        for message in sends:
            buffer, copies = _buffer(message, before, self._device)
            for values, part in copies:
                values.copy_(part)
            operations.append(dist.P2POp(dist.isend, buffer, message.peer, self._group))
            sent.append(buffer)
        return _Pending(dist.batch_isend_irecv(operations) if operations else [], sent, received)


class _Message(NamedTuple):
    """Pieces sent together: their parameters, their slices of this rank's local parts, and their dtypes."""

    peer: int
    places: Sequence[tuple[str, tuple[slice, ...]]]
    dtypes: Sequence[torch.dtype]


def _messages(
    peers: Mapping[int, Sequence[Piece]], layout: ParamLayout, plan: ReallocPlan, rank: int
) -> list[_Message]:
    messages = []
    for peer, pieces in peers.items():
        small, dtypes = [], []
        for name, box in pieces:
            place, dtype = (name, box.slices(layout.boxes[name][rank])), plan.wire_dtype(name)
            if box.numel * dtype.itemsize < _SEPARATE_BYTES:
                small.append(place)
                dtypes.append(dtype)
            else:
                messages.append(_Message(peer, [place], [dtype]))
        if small:
            messages.append(_Message(peer, small, dtypes))
    return messages


class _Pending(NamedTuple):
    """Messages in flight, and the (received values, part of a parameter) to copy once they have arrived."""

    works: Sequence[dist.Work]
    sent: Sequence[Tensor]  # send buffers must outlive the transfer
    received: Sequence[tuple[Tensor, Tensor]]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for values, part in self.received:
            part.copy_(values)


def _buffer(
    message: _Message, tensors: Mapping[str, Tensor], device: torch.device
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return a message's bytes, and its pieces in them with their parts of `tensors`: none if no copy is needed."""
    parts = [tensors[name][slices] for name, slices in message.places]
    only, dtype = parts[0], message.dtypes[0]
    if len(parts) == 1 and only.dtype == dtype and only.is_contiguous() and only.device.type == device.type:
        return only.view(-1).view(torch.uint8), []
    sizes = [part.numel() * dtype.itemsize for part, dtype in zip(parts, message.dtypes, strict=True)]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    # Elements are aligned, because large ones come first.
    pieces = zip(buffer.split(sizes), message.dtypes, parts, strict=True)
    return buffer, [(values.view(dtype).view(part.shape), part) for values, dtype, part in pieces]


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
            violations.append(f"{name} is {tuple(part.shape)} {part.dtype} but must be {wanted[0]} {wanted[1]}")
        parts[name] = part
    if violations:
        raise ValueError(f"{what} on rank {rank} must match its layout: {'; '.join(violations)}")
    return parts
