"""Which rank sends which box of which parameter to whom, so that weights of one layout come to lie in another. Pure.

    needs      of each receiver: its box in the new layout, less what it holds already, cut where holders change
    holders    of each need: those on the receiver's host, if there are any, else all
    sender     the only holder; of several, the one that has least to send so far

Layers repeat, so parameters of the same shape on the same boxes are planned once. Nothing is sent that its receiver
holds, and nothing twice, so the bytes are the fewest that can be. Broadcasting each box to all that hold it in the new
layout, as ReaL does (arXiv 2406.14088), sends up to 7/6 of them where replicas share a host.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .boxes import Box
from .param_layout import Kind, ParamLayout, holdings


class Need(NamedTuple):
    """A box that a rank lacks, and the nearest ranks that hold all of it, ascending."""

    receiver: int
    box: Box
    holders: tuple[int, ...]


class _Pattern(NamedTuple):
    """Parameters of one shape, on the same boxes."""

    names: tuple[str, ...]
    itemsize: int
    needs: Sequence[Need]


class Transfer(NamedTuple):
    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Moves:
    """The same transfers for each of some parameters, whose elements have `itemsize` bytes."""

    names: tuple[str, ...]
    itemsize: int
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class ReallocPlan:
    """What moves from `src` to `dst`, in `rounds` of which none makes a rank send or receive above `bucket_bytes`.

    Attributes:
        links: bytes by (sender, receiver).
        grain: each round takes a share of every link that is even to so many bytes, so that elements, and rows of up to
            that size, stay whole.
        minimum_bytes: the fewest bytes that any plan could send: what ranks hold in `dst` and not in `src`, counted
            from the two layouts alone.
    """

    src: ParamLayout
    dst: ParamLayout
    bucket_bytes: int
    ranks_per_host: int
    moves: tuple[Moves, ...]
    links: Mapping[tuple[int, int], int]
    rounds: int
    grain: int
    minimum_bytes: int

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """By rank; ranks that send nothing are absent."""
        return _sums((sender, size) for (sender, _), size in self.links.items())

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """By rank; ranks that receive nothing are absent."""
        return _sums((receiver, size) for (_, receiver), size in self.links.items())

    def lacking_bytes(self, rank: int) -> int:
        """What a rank holds in `dst` and not in `src`, counted from the two layouts alone: it can receive no less."""
        return sum(
            _lacking(rank, self.src.boxes[name], boxes) * self.wire_dtype(name).itemsize
            for name, boxes in self.dst.boxes.items()
            if rank in boxes
        )

    def wire_dtype(self, name: str) -> torch.dtype:
        """What a parameter travels in: of its two dtypes the shorter one, that of `dst` where they are as long."""
        return _wire_dtype(self.src.parameters[name], self.dst.parameters[name])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that send or receive, ascending: the others do not wait for them."""
        return tuple(sorted(self.sent_bytes.keys() | self.received_bytes.keys()))

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """What the plan was made of: plans of equal identity are equal."""
        return (self.src.digest, self.dst.digest, self.bucket_bytes, self.ranks_per_host)

    @property
    def total_bytes(self) -> int:
        return sum(self.links.values())

    @property
    def extra_bytes(self) -> int:
        """Memory that a rank needs at most beside its parameters: messages of up to two rounds, sent and received."""
        message = min(self.bucket_bytes, max((*self.sent_bytes.values(), *self.received_bytes.values()), default=0))
        return message * 2 * min(self.rounds, 2)

    def kept(self, rank: int) -> dict[str, Box]:
        """What a rank holds in both layouts, by name: copied on the rank, or not at all where it `may_share`."""
        boxes = {}
        for name, held in self.dst.boxes.items():
            before = self.src.boxes[name]
            if rank in held and rank in before and (common := held[rank].overlap(before[rank])):
                boxes[name] = common
        return boxes

    def may_share(self, rank: int) -> tuple[str, ...]:
        """Parameters of which a rank has the same box, in the same dtype, before and after: they may share memory."""
        held = ((name, boxes) for name, boxes in self.dst.boxes.items() if rank in boxes)
        same = (name for name, boxes in held if boxes[rank] == self.src.boxes[name].get(rank))
        return tuple(name for name in same if self.src.parameters[name] == self.dst.parameters[name])

    def predicted_seconds(self, bandwidth_intra: float, bandwidth_inter: float, latency: float) -> float:
        """Time of the slowest rank, sending and receiving at once: bytes over bandwidth, and a latency per round.

        Args:
            bandwidth_intra, bandwidth_inter: bytes per second and direction of a rank, inside its host and out of it.
            latency: seconds.
        """
        seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        for (sender, receiver), size in self.links.items():
            near = sender // self.ranks_per_host == receiver // self.ranks_per_host
            for end in (("sends", sender), ("receives", receiver)):
                seconds[end] += size / (bandwidth_intra if near else bandwidth_inter)
        return self.rounds * latency + max(seconds.values(), default=0)


def plan_realloc(src: ParamLayout, dst: ParamLayout, *, bucket_bytes: int, ranks_per_host: int) -> ReallocPlan:
    """Plan to give every rank what it holds in `dst` from what the ranks hold in `src`.

    Floating-point numbers may be of another dtype in `dst`: weights that train in float32 go out in bfloat16.

    Args:
        bucket_bytes: the most that a rank sends in a round, and the most that it receives.
        ranks_per_host: rank r is on host r // ranks_per_host.

    Raises:
        ValueError: naming all parameters of `dst` that `src` lacks, that have another shape there, or another dtype and
            are not both floating point, or of which no rank holds some elements; for a bucket that is too small for a
            few bytes of every peer.
    """
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host} must be at least 1")
    violations = _differences(src, dst)
    problems = [*violations.values()]
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in sorted(dst.parameters.keys() - violations.keys()):
        kinds = (src.parameters[name].dtype, dst.parameters[name])
        pattern = (*kinds, *src.boxes[name].items(), None, *dst.boxes[name].items())
        alike.setdefault(pattern, []).append(name)
    patterns, minimum = [], 0
    for names in alike.values():
        held, wanted = src.boxes[names[0]], dst.boxes[names[0]]
        needs = list(_needs(held, wanted, ranks_per_host))
        found: Counter[int] = Counter()
        for need in needs:
            found[need.receiver] += need.box.numel
        lacking = {rank: _lacking(rank, held, wanted) for rank in wanted}
        for rank, elements in lacking.items():
            if missing := elements - found[rank]:
                problems.append(f"no rank holds {missing} elements of {', '.join(names)} that rank {rank} needs")
        itemsize = _wire_dtype(src.parameters[names[0]], dst.parameters[names[0]]).itemsize
        minimum += sum(lacking.values()) * itemsize * len(names)
        patterns.append(_Pattern(tuple(names), itemsize, needs))
    if problems:
        raise ValueError(f"the parameters cannot be reallocated: {'; '.join(problems)}")
    moves = _choose_senders(patterns)
    links: Counter[tuple[int, int]] = Counter()
    for move in moves:
        for sender, receiver, box in move.transfers:
            links[sender, receiver] += box.numel * move.itemsize * len(move.names)
    rounds, grain = _rounds(links, bucket_bytes, max((move.itemsize for move in moves), default=1))
    return ReallocPlan(src, dst, bucket_bytes, ranks_per_host, moves, dict(links), rounds, grain, minimum)


def _wire_dtype(src: Kind, dst: Kind) -> torch.dtype:
    return src.dtype if src.dtype.itemsize < dst.dtype.itemsize else dst.dtype


def _differences(src: ParamLayout, dst: ParamLayout) -> dict[str, str]:
    """What is wrong with parameters, by name."""
    found = {}
    for name, kind in dst.parameters.items():
        there = src.parameters.get(name)
        if there is None:
            found[name] = f"{name} is not among what is held"
            continue
        convertible = there.dtype.is_floating_point and kind.dtype.is_floating_point
        if there.shape != kind.shape or not (there.dtype == kind.dtype or convertible):
            found[name] = f"{name} is held as {there.shape} {there.dtype} and wanted as {kind.shape} {kind.dtype}"
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
    """Elements that a rank wants and does not hold."""
    common = wanted[rank].overlap(held[rank]) if rank in held else None
    return wanted[rank].numel - (common.numel if common else 0)


def _choose_senders(patterns: Sequence[_Pattern]) -> tuple[Moves, ...]:
    """First what only one rank can send; then the rest, large boxes first, each from who has least to send so far.

    Large elements go first, so that messages of one dtype, and most of several, have their elements aligned.
    """
    loads: Counter[int] = Counter()
    moves = []
    for names, itemsize, needs in patterns:
        transfers = tuple(
            Transfer(need.holders[0], need.receiver, need.box) for need in needs if len(need.holders) == 1
        )
        for transfer in transfers:
            loads[transfer.sender] += transfer.box.numel * itemsize * len(names)
        moves.append(Moves(names, itemsize, transfers))
    several = [_Pattern(p.names, p.itemsize, [need for need in p.needs if len(need.holders) > 1]) for p in patterns]
    for pattern in sorted(several, key=lambda p: -max((need.box.numel * p.itemsize for need in p.needs), default=0)):
        moves += _least_loaded(pattern, loads)
    return tuple(sorted((move for move in moves if move.transfers), key=lambda move: -move.itemsize))


def _least_loaded(pattern: _Pattern, loads: Counter[int]) -> list[Moves]:
    """Choose for each parameter, adding to the loads; one `Moves` for those that chose the same."""
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
    """How many rounds the links are divided over evenly, and the grain: what a round may take of a link beyond that."""
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
            f"bucket_bytes={bucket_bytes} must be above {grain * peers}, {grain} bytes for each of up to {peers} peers "
            f"of a rank"
        )
    return max(math.ceil(sum(sizes) / spare) for sizes in loads.values()), grain


def _sums(items: Iterator[tuple[int, int]]) -> dict[int, int]:
    sums: Counter[int] = Counter()
    for rank, size in items:
        sums[rank] += size
    return dict(sorted(sums.items()))
