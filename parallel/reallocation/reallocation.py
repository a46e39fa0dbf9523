"""Execution of a reallocation plan: weights move from one layout to another, each missing byte sent exactly once.

    round 0    pack | transfer ........... | unpack
    round 1           pack | transfer .............. | unpack
    round 2                                  pack | transfer ...

Every route carries the same share of its bytes in every round, so that no round waits for one busy rank, and messages
of at most two rounds are in memory. What has crossed to a host in round n is sent on inside the host in round n + 2,
from the parameter that it was received into, while later shares cross. Large pieces are separate messages, sent from or
received into the parameter directly if contiguous there. Small and strided pieces are packed and unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from usp.parallel.groups import ProcessGroups, agree

from .boxes import Box, local_part
from .param_layout import ParamLayout
from .realloc_plan import ONWARD_DELAY, ReallocPlan, Route

_SEPARATE_BYTES = 512 << 10  # size from which a piece is a separate message: below, packing it is cheaper


class BoxPiece(NamedTuple):
    """A box of a parameter that is sent as a unit, in row-major order."""

    name: str
    box: Box


class Round(NamedTuple):
    """Pieces that one rank sends and receives, in order, by peer."""

    sends: dict[int, list[BoxPiece]]
    receives: dict[int, list[BoxPiece]]


def rank_rounds(plan: ReallocPlan, rank: int) -> list[Round]:
    """Return a rank's part of a plan; sender and receiver derive the same pieces in the same order. Pure."""
    passing: dict[Route, list[BoxPiece]] = {}
    for move in plan.moves:
        own = [transfer for transfer in move.transfers if any(rank in hop for hop in transfer.route.hops)]
        for name in move.names:
            for route, box in own:
                passing.setdefault(route, []).append(BoxPiece(name, box))
    rounds = [Round({}, {}) for _ in range(plan.rounds)]
    for route, pieces in sorted(passing.items()):
        for number, share in enumerate(_shares(pieces, plan)):
            for hop, (sender, receiver) in enumerate(route.hops):
                sends, receives = rounds[number + (ONWARD_DELAY if hop else 0)]
                if rank == sender:
                    sends.setdefault(receiver, []).extend(share)
                elif rank == receiver:
                    receives.setdefault(sender, []).extend(share)
    for of_peers in (side for of_round in rounds for side in of_round):
        for pieces in of_peers.values():  # elements are aligned in messages, because large ones come first
            pieces.sort(key=lambda piece: -plan.wire_dtype(piece.name).itemsize)
    return rounds


def _shares(pieces: Sequence[BoxPiece], plan: ReallocPlan) -> list[list[BoxPiece]]:
    """Divide pieces, in order, into the plan's shares, which are equally large up to its grain."""
    itemsizes = [plan.wire_dtype(piece.name).itemsize for piece in pieces]
    total = sum(piece.box.numel * itemsize for piece, itemsize in zip(pieces, itemsizes, strict=True))
    shares: list[list[BoxPiece]] = [[] for _ in range(plan.shares)]
    number = sent = 0
    for (name, box), itemsize in zip(pieces, itemsizes, strict=True):
        row = box.numel // box.sizes[0] if box.sizes else 1
        whole = row if row * itemsize <= plan.grain else 1
        done = 0
        while done < box.numel:
            count = min(box.numel - done, (total * (number + 1) // plan.shares - sent) // itemsize)
            if done + count < box.numel:
                count -= count % whole
            shares[number] += [BoxPiece(name, part) for part in box.run(done, done + count)]
            done, sent = done + count, sent + count * itemsize
            number += done < box.numel  # the rest belongs to the next share
    return shares


class Traffic(NamedTuple):
    """Bytes of a rank in a run: sent, received, and those from other hosts; its `lacking_bytes`, its host's."""

    sent: int
    received: int
    crossed: int
    minimum: int
    host_minimum: int


class Reallocation:
    """Executes a plan, any number of times. Must be created on every rank of the world, in the same order.

    Args:
        groups: the process groups; the plan runs in the group of the ranks that send or receive.

    Raises RanksDisagree on every rank, if they have different plans.
    """

    def __init__(self, plan: ReallocPlan, groups: ProcessGroups, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        agree(plan.identity, [dist.group.WORLD], "the plan of a reallocation", device)
        self.plan = plan
        self._rank, self._device = dist.get_rank(), device
        self._group = groups.get(plan.ranks) if plan.ranks else None
        if self._group is not None:
            dist.barrier(self._group)  # NCCL needs a collective of the whole group before point-to-point messages
        self._pieces = rank_rounds(plan, self._rank)
        self._rounds = [
            (self._messages(sends, received=False), self._messages(receives, received=True))
            for sends, receives in self._pieces
        ]
        self._kept = [
            (name, index, self._slices(name, index, box), self._slices(name, -1, box))
            for name, index, box in plan.kept(self._rank)
        ]

    @cached_property
    def traffic(self) -> Traffic:
        """The bytes of this rank in a run."""
        plan, rank = self.plan, self._rank
        sent, received, crossed = (x.get(rank, 0) for x in (plan.sent_bytes, plan.received_bytes, plan.crossed_bytes))
        return Traffic(sent, received, crossed, plan.lacking_bytes(rank), plan.host_lacking_bytes(rank))

    @torch.no_grad()
    def run(
        self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]] = ()
    ) -> None:
        """Copy the weights of `src` to `dst`. Collective over the ranks of all layouts; other ranks may call it too.

        Values are bitwise equal, unless `dst` has a smaller dtype: then they are rounded before being sent.

        Args:
            src, dst, copies: parameters of this rank in the plan's layouts. `dst` must not share memory with others.

        Raises ValueError before anything is sent, listing every parameter of this rank that is missing, or whose local
        part does not have the shape and dtype of the plan.
        """
        held = self._held(src, dst, copies)
        pending = _Pending([], [], [])
        for sends, receives in self._rounds:
            posted = self._post(sends, receives, held)
            pending.wait()
            pending = posted
        self._copy_kept(held)  # while the last round is transferred
        pending.wait()

    def _held(
        self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]]
    ) -> list[dict[str, Tensor]]:
        """Return this rank's part of each layout of the plan; raise ValueError as `run`."""
        names, tensors = ("src", *("a copy" for _ in self.plan.copies), "dst"), (src, *copies, dst)
        return [_local_parts(*one, self._rank) for one in zip(tensors, self.plan.layouts, names, strict=True)]

    def _copy_kept(self, held: Sequence[Mapping[str, Tensor]]) -> None:
        for name, index, old, new in self._kept:
            held[-1][name][new].copy_(held[index][name][old])

    def _post(
        self, sends: Sequence[_Message], receives: Sequence[_Message], held: Sequence[Mapping[str, Tensor]]
    ) -> _Pending:
        """Start sending parts of `held` to peers and receiving parts of it from peers."""
        operations, sent, received = [], [], []
        for message in receives:
            buffer, copies = _buffer(message, held, self._device)
            received += copies
            operations.append(dist.P2POp(dist.irecv, buffer, message.peer, self._group))
        for message in sends:
            buffer, copies = _buffer(message, held, self._device)
            for values, part in copies:
                values.copy_(part)
            operations.append(dist.P2POp(dist.isend, buffer, message.peer, self._group))
            sent.append(buffer)
        return _Pending(dist.batch_isend_irecv(operations) if operations else [], sent, received)

    def _messages(self, peers: Mapping[int, Sequence[BoxPiece]], *, received: bool) -> list[_Message]:
        messages = []
        for peer, pieces in peers.items():
            small, dtypes = [], []
            for name, box in pieces:
                index = -1 if received else self.plan.source(name, self._rank, box)
                place, dtype = (index, name, self._slices(name, index, box)), self.plan.wire_dtype(name)
                if box.numel * dtype.itemsize < _SEPARATE_BYTES:
                    small.append(place)
                    dtypes.append(dtype)
                else:
                    messages.append(_Message(peer, [place], [dtype]))
            if small:
                messages.append(_Message(peer, small, dtypes))
        return messages

    def _slices(self, name: str, index: int, box: Box) -> tuple[slice, ...]:
        """Return where a box is in this rank's part of a parameter in a layout."""
        return box.slices(self.plan.layouts[index].boxes[name][self._rank])


class _Message(NamedTuple):
    """Pieces sent together: the layout and parameter of each, its slices of this rank's part, and its dtype."""

    peer: int
    places: Sequence[tuple[int, str, tuple[slice, ...]]]
    dtypes: Sequence[torch.dtype]


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
    message: _Message, held: Sequence[Mapping[str, Tensor]], device: torch.device
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return a message's bytes, and its pieces in them with their parts of `held`: none if no copy is needed."""
    parts = [held[index][name][slices] for index, name, slices in message.places]
    only, dtype = parts[0], message.dtypes[0]
    if len(parts) == 1 and only.dtype == dtype and only.is_contiguous() and only.device.type == device.type:
        return only.view(-1).view(torch.uint8), []
    sizes = [part.numel() * dtype.itemsize for part, dtype in zip(parts, message.dtypes, strict=True)]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    pieces = zip(buffer.split(sizes), message.dtypes, parts, strict=True)
    return buffer, [(values.view(dtype).view(part.shape), part) for values, dtype, part in pieces]


def _local_parts(tensors: Mapping[str, Tensor], layout: ParamLayout, what: str, rank: int) -> dict[str, Tensor]:
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
