"""Plan of a reallocation: the boxes that ranks send to each other to move parameters to another layout. Pure.

    needs      of each receiver: its box in the new layout minus what it already holds, split where the holders change
    holders    of each need: those on the receiver's host, if any, otherwise all
    sender     the only holder, or the one of several holders with the least to send so far

Parameters with the same shape and boxes are planned once, because layers repeat. No rank receives what it already
holds, or anything twice, so the number of bytes is minimal. Broadcasting each box to all its holders in the new layout,
as ReaL does (arXiv 2406.14088), sends up to 7/6 as much if replicas share a host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .boxes import Box
from .param_layout import Kind, ParamLayout, holdings


class Need(NamedTuple):
    """A box that a rank has to receive, and the nearest ranks that hold all of it, ascending."""

    receiver: int
    box: Box
    holders: tuple[int, ...]


class _Pattern(NamedTuple):
    """Parameters with the same shape and boxes."""

    names: tuple[str, ...]
    itemsize: int
    needs: Sequence[Need]


class Transfer(NamedTuple):
    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Moves:
    """Transfers that are the same for several parameters, whose elements have `itemsize` bytes."""

    names: tuple[str, ...]
    itemsize: int
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class ReallocPlan:
    """Transfers from `src` to `dst`, in rounds in each of which no rank sends or receives more than `bucket_bytes`.

    Attributes:
        links: bytes by (sender, receiver).
        grain: the bytes of a link are divided over rounds evenly up to this number of bytes, so that elements, and
            rows of up to this size, are not split.
    """

    src: ParamLayout
    dst: ParamLayout
    bucket_bytes: int
    ranks_per_host: int
    moves: tuple[Moves, ...]
    links: Mapping[tuple[int, int], int]
    rounds: int
    grain: int

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes sent by rank, without ranks that send nothing."""
        return _sums((sender, size) for (sender, _), size in self.links.items())

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes received by rank, without ranks that receive nothing."""
        return _sums((receiver, size) for (_, receiver), size in self.links.items())

    def lacking_bytes(self, rank: int) -> int:
        """Return the bytes that a rank holds in `dst` but not in `src`: the minimum that it has to receive."""
        return sum(
            _lacking(rank, self.src.boxes[name], boxes) * self.wire_dtype(name).itemsize
            for name, boxes in self.dst.boxes.items()
            if rank in boxes
        )

    @property
    def minimum_bytes(self) -> int:
        """Minimum that any plan has to send, computed from the two layouts without the transfers."""
        return sum(map(self.lacking_bytes, self.dst.ranks))

    def wire_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a parameter is sent: the smaller of its two dtypes, or that of `dst` if equal."""
        return _wire_dtype(self.src.parameters[name], self.dst.parameters[name])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that send or receive, ascending; other ranks do not wait for them."""
        return tuple(sorted(self.sent_bytes.keys() | self.received_bytes.keys()))

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """Inputs of the plan: plans with equal identities are equal."""
        return (self.src.digest, self.dst.digest, self.bucket_bytes, self.ranks_per_host)

    @property
    def total_bytes(self) -> int:
        return sum(self.links.values())

    @property
    def extra_bytes(self) -> int:
        """Maximum additional memory of a rank: messages of up to two rounds, sent and received."""
        message = min(self.bucket_bytes, max((*self.sent_bytes.values(), *self.received_bytes.values()), default=0))
        return message * 2 * min(self.rounds, 2)

    def kept(self, rank: int) -> dict[str, Box]:
        """Return the boxes that a rank holds in both layouts, by name, which are copied locally."""
        boxes = {}
        for name, held in self.dst.boxes.items():
            before = self.src.boxes[name]
            if rank in held and rank in before and (common := held[rank].overlap(before[rank])):
                boxes[name] = common
        return boxes


def plan_realloc(src: ParamLayout, dst: ParamLayout, *, bucket_bytes: int, ranks_per_host: int) -> ReallocPlan:
    """Plan the transfers that turn layout `src` into layout `dst`.

    Floating-point parameters may change dtype: weights trained in float32 can be sent in bfloat16.

    Args:
        bucket_bytes: maximum that a rank sends, and maximum that it receives, in a round.
        ranks_per_host: rank r is on host r // ranks_per_host.

    Raises:
        ValueError: listing all parameters of `dst` that are missing from `src`, have another shape there, have another
            dtype and are not both floating-point, or have elements that no rank holds; for a bucket too small for the
            number of peers.
    """
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host} must be at least 1")
    violations = _differences(src, dst)
    problems = list(violations.values())
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in sorted(dst.parameters.keys() - violations.keys()):
        kinds = (src.parameters[name].dtype, dst.parameters[name])
        pattern = (*kinds, *src.boxes[name].items(), None, *dst.boxes[name].items())
        alike.setdefault(pattern, []).append(name)
    patterns = []
    for names in alike.values():
        held, wanted = src.boxes[names[0]], dst.boxes[names[0]]
        needs = list(_needs(held, wanted, ranks_per_host))
        found = _sums((need.receiver, need.box.numel) for need in needs)
        for rank in wanted:
            if missing := _lacking(rank, held, wanted) - found.get(rank, 0):
                problems.append(f"no rank holds {missing} elements of {', '.join(names)} that rank {rank} needs")
        itemsize = _wire_dtype(src.parameters[names[0]], dst.parameters[names[0]]).itemsize
        patterns.append(_Pattern(tuple(names), itemsize, needs))
    if problems:
        raise ValueError(f"the parameters cannot be reallocated: {'; '.join(problems)}")
    moves = _choose_senders(patterns)
    links: Counter[tuple[int, int]] = Counter()
    for move in moves:
        for sender, receiver, box in move.transfers:
            links[sender, receiver] += box.numel * move.itemsize * len(move.names)
    rounds, grain = _rounds(links, bucket_bytes, max((move.itemsize for move in moves), default=1))
    return ReallocPlan(src, dst, bucket_bytes, ranks_per_host, moves, dict(links), rounds, grain)


def _wire_dtype(src: Kind, dst: Kind) -> torch.dtype:
    return src.dtype if src.dtype.itemsize < dst.dtype.itemsize else dst.dtype


def _differences(src: ParamLayout, dst: ParamLayout) -> dict[str, str]:
    """Return the parameters of `dst` that `src` cannot provide, with the reason."""
    found = {}
    for name, kind in dst.parameters.items():
        held = src.parameters.get(name)
        if held is None:
            found[name] = f"{name} is missing from src"
            continue
        convertible = held.dtype.is_floating_point and kind.dtype.is_floating_point
        if held.shape != kind.shape or not (held.dtype == kind.dtype or convertible):
            found[name] = f"{name} is {held.shape} {held.dtype} in src and {kind.shape} {kind.dtype} in dst"
    return found


def _needs(held: Mapping[int, Box], wanted: Mapping[int, Box], ranks_per_host: int) -> Iterator[Need]:
    parts = holdings(held)
    for receiver, box in wanted.items():
        for part in parts:
            if receiver in part.ranks or (common := part.box.overlap(box)) is None:
                continue
            near = tuple(rank for rank in part.ranks if rank // ranks_per_host == receiver // ranks_per_host)
            yield Need(receiver, common, near or part.ranks)


def _lacking(rank: int, held: Mapping[int, Box], wanted: Mapping[int, Box]) -> int:
    """Count the elements that a rank needs and does not hold."""
    common = wanted[rank].overlap(held[rank]) if rank in held else None
    return wanted[rank].numel - (common.numel if common else 0)


def _choose_senders(patterns: Sequence[_Pattern]) -> tuple[Moves, ...]:
    """Assign needs with a single holder first, then the others, large boxes first, to the least loaded holder.

    Moves are sorted by descending element size, so that elements are aligned in messages.
    """
    loads: Counter[int] = Counter()
    moves = []
    for names, itemsize, needs in patterns:
        transfers = tuple(Transfer(holders[0], receiver, box) for receiver, box, holders in needs if len(holders) == 1)
        for transfer in transfers:
            loads[transfer.sender] += transfer.box.numel * itemsize * len(names)
        moves.append(Moves(names, itemsize, transfers))
    several = [p._replace(needs=[need for need in p.needs if len(need.holders) > 1]) for p in patterns]
    for pattern in sorted(several, key=lambda p: -max((need.box.numel * p.itemsize for need in p.needs), default=0)):
        moves += _least_loaded(pattern, loads)
    return tuple(sorted((move for move in moves if move.transfers), key=lambda move: -move.itemsize))


def _least_loaded(pattern: _Pattern, loads: Counter[int]) -> list[Moves]:
    """Choose the senders of each parameter, updating the loads; equal choices share one `Moves`."""
    chosen: dict[tuple[int, ...], list[str]] = {}
    for name in pattern.names:
        senders = []
        for need in pattern.needs:
            sender = min(need.holders, key=loads.__getitem__)
            loads[sender] += need.box.numel * pattern.itemsize
            senders.append(sender)
        chosen.setdefault(tuple(senders), []).append(name)
    moves = []
    for choice, names in chosen.items():
        transfers = (Transfer(s, need.receiver, need.box) for s, need in zip(choice, pattern.needs, strict=True))
        moves.append(Moves(tuple(names), pattern.itemsize, tuple(transfers)))
    return moves


def _rounds(links: Mapping[tuple[int, int], int], bucket_bytes: int, itemsize: int) -> tuple[int, int]:
    """Return the number of rounds and the grain: how much more than its even share of a link a round may take."""
    loads: dict[tuple[str, int], list[int]] = {}
    for (sender, receiver), size in links.items():
        loads.setdefault(("sends", sender), []).append(size)
        loads.setdefault(("receives", receiver), []).append(size)
    peers = max(map(len, loads.values()), default=1)
    grain = max(itemsize, bucket_bytes // (8 * peers))
    if all(sum(sizes) <= bucket_bytes for sizes in loads.values()):
        return min(1, len(links)), grain
    spare = bucket_bytes - grain * peers
    if spare < 1:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} must be above {grain * peers}: {grain} bytes for each of up to {peers} peers "
            f"of a rank"
        )
    return max(math.ceil(sum(sizes) / spare) for sizes in loads.values()), grain


def _sums(items: Iterable[tuple[int, int]]) -> dict[int, int]:
    sums: Counter[int] = Counter()
    for rank, size in items:
        sums[rank] += size
    return dict(sorted(sums.items()))
