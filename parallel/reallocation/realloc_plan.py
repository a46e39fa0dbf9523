"""Plan of a reallocation: the boxes that ranks send to each other to move parameters to another layout. Pure.

    needs      what a rank lacks and a rank of its host holds: from there
               what a whole host lacks: once from another host to one of the ranks that need it, which sends it on to
               the others of its host
    holders    of each need: all ranks that hold it, of the receiver's host if there are any
    choice     of holder and first receiver, where there are several: those with the least to send and to receive so far

Parameters with the same shape and boxes are planned once, because layers repeat. No rank receives what it already
holds, or anything twice, and no byte crosses to a host twice, so both the bytes in total and those between hosts are
minimal. Broadcasting each box to all its holders in the new layout, as ReaL does (arXiv 2406.14088), sends up to 7/6 as
much if replicas share a host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from .boxes import Box
from .param_layout import Kind, ParamLayout, holdings

_Key = TypeVar("_Key", int, tuple[int, int])

BUCKET_BYTES = 64 << 20  # buffer memory of a reallocation, per rank
ONWARD_DELAY = 2  # rounds until a received box is sent on: the messages of two rounds are in flight at any time
_CHOICES = 4096  # of routes of parameters with the same shape and boxes: more do not balance them better
_PIPELINE_ROUNDS = 8  # where boxes are sent on: of 8 + 2 rounds, all but the last 2 keep the link between hosts busy
_PIPELINE_BYTES = 2 << 20  # from another host to a rank in a round: fewer are not worth a round


class Route(NamedTuple):
    """The ranks that a box passes.

    Attributes:
        onward: ranks on the receiver's host to which the receiver sends the box on.
    """

    sender: int
    receiver: int
    onward: tuple[int, ...] = ()

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The (sender, receiver) of each time that the box is sent."""
        return ((self.sender, self.receiver), *((self.receiver, rank) for rank in self.onward))


class Need(NamedTuple):
    """A box that ranks of one host lack, and the nearest ranks that hold all of it; ranks ascend."""

    receivers: tuple[int, ...]
    box: Box
    holders: tuple[int, ...]

    @property
    def has_choice(self) -> bool:
        return len(self.receivers) > 1 or len(self.holders) > 1


class _Pattern(NamedTuple):
    """Parameters with the same shape and boxes."""

    names: tuple[str, ...]
    itemsize: int
    needs: Sequence[Need]


class Transfer(NamedTuple):
    route: Route
    box: Box


@dataclass(frozen=True)
class Moves:
    """Transfers that are the same for several parameters, whose elements have `itemsize` bytes."""

    names: tuple[str, ...]
    itemsize: int
    transfers: tuple[Transfer, ...]


class TierBytes(NamedTuple):
    """Bytes by tier: between hosts and inside them."""

    between: int
    inside: int


@dataclass(frozen=True)
class ReallocPlan:
    """Transfers from `src` to `dst`, in rounds in each of which no rank sends or receives more than `bucket_bytes`.

    Attributes:
        copies: further layouts in which the values of `src` are in memory; ranks send from these as well, and keep what
            they hold there.
        routes: bytes by route.
        shares: into how many rounds the bytes of each route are divided.
        grain: they are divided evenly up to this number of bytes, so that elements, and rows of up to this size, are
            not split.
    """

    src: ParamLayout
    copies: tuple[ParamLayout, ...]
    dst: ParamLayout
    bucket_bytes: int
    ranks_per_host: int
    moves: tuple[Moves, ...]
    routes: Mapping[Route, int]
    shares: int
    grain: int

    @cached_property
    def layouts(self) -> tuple[ParamLayout, ...]:
        return (self.src, *self.copies, self.dst)

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes by (sender, receiver)."""
        return _sums((hop, size) for route, size in self.routes.items() for hop in route.hops)

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes sent by rank, without ranks that send nothing."""
        return _sums((sender, size) for (sender, _), size in self.links.items())

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes received by rank, without ranks that receive nothing."""
        return _sums((receiver, size) for (_, receiver), size in self.links.items())

    @cached_property
    def crossed_bytes(self) -> dict[int, int]:
        """Bytes received from other hosts by rank, without ranks that receive nothing from there."""
        return _sums((to, size) for (sender, to), size in self.links.items() if self.host(sender) != self.host(to))

    @property
    def tier_bytes(self) -> TierBytes:
        """Bytes that the plan sends, by tier."""
        between = sum(self.crossed_bytes.values())
        return TierBytes(between, self.total_bytes - between)

    def lacking_bytes(self, rank: int) -> int:
        """Return the bytes that a rank holds in `dst` but not before: the minimum that it has to receive."""
        return self._lacking_bytes(rank, (rank,), ())

    def host_lacking_bytes(self, rank: int) -> int:
        """Return the bytes that no rank of this one's host holds before, and no lower one there holds in `dst`.

        Their sum over the ranks of a host is the minimum that it has to receive from other hosts.
        """
        first = self.host(rank) * self.ranks_per_host
        return self._lacking_bytes(rank, range(first, first + self.ranks_per_host), range(first, rank))

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def wire_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a parameter is sent: the smaller of its two dtypes, or that of `dst` if equal."""
        return _wire_dtype(self.src.parameters[name], self.dst.parameters[name])

    @property
    def rounds(self) -> int:
        """Number of rounds; the last ones only send on what arrived before."""
        return self.shares + (ONWARD_DELAY if any(route.onward for route in self.routes) else 0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that send or receive, ascending; other ranks do not wait for them."""
        return tuple(sorted(self.sent_bytes.keys() | self.received_bytes.keys()))

    @property
    def identity(self) -> tuple[object, ...]:
        """Inputs of the plan: plans with equal identities are equal."""
        return (*(layout.digest for layout in self.layouts), self.bucket_bytes, self.ranks_per_host)

    @property
    def total_bytes(self) -> int:
        return sum(self.links.values())

    def source(self, name: str, rank: int, box: Box) -> int:
        """Return the index of the first layout in which a rank that sends a box holds all of it.

        The last layout, `dst`, is that of a box which the rank has received.
        """
        held = (layout.boxes.get(name, {}).get(rank) for layout in self.layouts)
        return next(index for index, other in enumerate(held) if other is not None and box.overlap(other) == box)

    def kept(self, rank: int) -> list[tuple[str, int, Box]]:
        """Return what a rank holds before and in `dst`, which is copied locally: disjoint boxes as (name, index, box).

        The index is that of a layout.
        """
        kept = []
        for name, wanted in self.dst.boxes.items():
            rest = [wanted[rank]] if rank in wanted else []
            for index, layout in enumerate(self.layouts[:-1]):
                held = layout.boxes.get(name, {}).get(rank)
                if held is not None:
                    kept += [(name, index, common) for part in rest if (common := part.overlap(held))]
                    rest = [outside for part in rest for outside in part.minus(held)]
        return kept

    def _lacking_bytes(self, rank: int, before: Sequence[int], after: Sequence[int]) -> int:
        """Count the bytes of a rank in `dst` that none of some ranks holds before, and none of others in `dst`."""
        total = 0
        for name, wanted in self.dst.boxes.items():
            if rank in wanted:
                held = [layout.boxes.get(name, {}).get(other) for layout in self.layouts[:-1] for other in before]
                rest = _outside(wanted[rank], filter(None, (*held, *map(wanted.get, after))))
                total += sum(box.numel for box in rest) * self.wire_dtype(name).itemsize
        return total


def plan_realloc(
    src: ParamLayout, dst: ParamLayout, *, copies: Sequence[ParamLayout] = (), bucket_bytes: int, ranks_per_host: int
) -> ReallocPlan:
    """Plan the transfers that turn layout `src` into layout `dst`.

    Floating-point parameters may change dtype: weights trained in float32 can be sent in bfloat16.

    Args:
        copies: further layouts in which the values of `src` are in memory, of any of its parameters.
        bucket_bytes: maximum that a rank sends, and maximum that it receives, in a round.
        ranks_per_host: rank r is on host r // ranks_per_host.

    Raises ValueError listing all parameters of `dst` that are missing from `src`, have another shape there, have
    another dtype and are not both floating-point, or have elements that no rank holds; parameters of a copy with
    another shape, or a dtype that neither `src` nor `dst` has; for a bucket too small for the number of routes.
    """
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host={ranks_per_host} must be at least 1")
    violations = _differences(src, copies, dst)
    problems = list(violations.values())
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in sorted(dst.parameters.keys() - violations.keys()):
        kinds = (src.parameters[name].dtype, dst.parameters[name])
        pattern = (*kinds, *_held((src, *copies), name), None, *dst.boxes[name].items())
        alike.setdefault(pattern, []).append(name)
    patterns = []
    for names in alike.values():
        held, wanted = _held((src, *copies), names[0]), dst.boxes[names[0]]
        needs = list(_needs(held, wanted, ranks_per_host))
        found = _sums((receiver, need.box.numel) for need in needs for receiver in need.receivers)
        for rank, box in wanted.items():
            lacking = _outside(box, (part for holder, part in held if holder == rank))
            if missing := sum(part.numel for part in lacking) - found.get(rank, 0):
                problems.append(f"no rank holds {missing} elements of {', '.join(names)} that rank {rank} needs")
        itemsize = _wire_dtype(src.parameters[names[0]], dst.parameters[names[0]]).itemsize
        patterns.append(_Pattern(tuple(names), itemsize, needs))
    if problems:
        raise ValueError(f"the parameters cannot be reallocated: {'; '.join(problems)}")
    moves = _choose_routes(patterns, ranks_per_host)
    routes: Counter[Route] = Counter()
    for move in moves:
        for route, box in move.transfers:
            routes[route] += box.numel * move.itemsize * len(move.names)
    shares, grain = _shares(routes, bucket_bytes, max((move.itemsize for move in moves), default=1))
    return ReallocPlan(src, tuple(copies), dst, bucket_bytes, ranks_per_host, moves, dict(routes), shares, grain)


def _wire_dtype(src: Kind, dst: Kind) -> torch.dtype:
    return src.dtype if src.dtype.itemsize < dst.dtype.itemsize else dst.dtype


def _differences(src: ParamLayout, copies: Sequence[ParamLayout], dst: ParamLayout) -> dict[str, str]:
    """Return the parameters of `dst` that the layouts before cannot provide, with the reason."""
    found = {}
    for name, kind in dst.parameters.items():
        held = src.parameters.get(name)
        if held is None:
            found[name] = f"{name} is missing from src"
            continue
        convertible = held.dtype.is_floating_point and kind.dtype.is_floating_point
        if held.shape != kind.shape or not (held.dtype == kind.dtype or convertible):
            found[name] = f"{name} is {held.shape} {held.dtype} in src and {kind.shape} {kind.dtype} in dst"
            continue
        for other in (copy.parameters[name] for copy in copies if name in copy.parameters):
            if other not in (held, kind):  # rounded values would differ from those of src
                found[name] = f"{name} is {other.shape} {other.dtype} in a copy, but must be as in src or dst"
    return found


def _held(layouts: Iterable[ParamLayout], name: str) -> list[tuple[int, Box]]:
    """Return what ranks hold of a parameter in any of the layouts."""
    return [held for layout in layouts for held in layout.boxes.get(name, {}).items()]


def _outside(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return the part of a box outside all others, as disjoint boxes."""
    rest = [box]
    for other in others:
        rest = [outside for part in rest for outside in part.minus(other)]
    return rest


def _needs(held: Iterable[tuple[int, Box]], wanted: Mapping[int, Box], ranks_per_host: int) -> Iterator[Need]:
    for part, holders in holdings(held):
        far: dict[int, list[tuple[int, Box]]] = {}  # what ranks need, by host that lacks it
        for receiver, box in wanted.items():
            if receiver in holders or (common := part.overlap(box)) is None:
                continue
            host = receiver // ranks_per_host
            if near := tuple(rank for rank in holders if rank // ranks_per_host == host):
                yield Need((receiver,), common, near)
            else:
                far.setdefault(host, []).append((receiver, common))
        for lacked in far.values():
            yield from (Need(receivers, box, holders) for box, receivers in holdings(lacked))


class _Loads:
    """Chooses routes, so that ranks share what is sent between hosts, and then what is sent at all."""

    def __init__(self, ranks_per_host: int) -> None:
        self._ranks_per_host = ranks_per_host
        self._sent: Counter[int] = Counter()
        self._out: Counter[int] = Counter()  # to other hosts
        self._in: Counter[int] = Counter()  # from other hosts

    def choose(self, need: Need, size: int) -> Route:
        """Return the route of a need of `size` bytes, and count it."""
        crosses = need.holders[0] // self._ranks_per_host != need.receivers[0] // self._ranks_per_host
        sender = min(need.holders, key=lambda rank: (crosses and self._out[rank], self._sent[rank]))
        receiver = min(need.receivers, key=lambda rank: (self._in[rank], self._sent[rank]))
        route = Route(sender, receiver, tuple(rank for rank in need.receivers if rank != receiver))
        for hop in route.hops:
            self._sent[hop[0]] += size
        if crosses:
            self._out[sender] += size
            self._in[receiver] += size
        return route


def _choose_routes(patterns: Sequence[_Pattern], ranks_per_host: int) -> tuple[Moves, ...]:
    """Assign needs without a choice first, then the others, large boxes first. Moves are sorted by descending element
    size, so that elements are aligned in messages."""
    loads = _Loads(ranks_per_host)
    moves, several = [], []
    for names, itemsize, needs in patterns:
        size = itemsize * len(names)
        fixed = [need for need in needs if not need.has_choice]
        transfers = tuple(Transfer(loads.choose(need, need.box.numel * size), need.box) for need in fixed)
        moves.append(Moves(names, itemsize, transfers))
        several.append(_Pattern(names, itemsize, [need for need in needs if need.has_choice]))
    for pattern in sorted(several, key=lambda p: -max((need.box.numel * p.itemsize for need in p.needs), default=0)):
        moves += _least_loaded(pattern, loads)
    return tuple(sorted((move for move in moves if move.transfers), key=lambda move: -move.itemsize))


def _least_loaded(pattern: _Pattern, loads: _Loads) -> list[Moves]:
    """Choose the routes of each parameter, or of several at a time; equal choices share one `Moves`."""
    names, itemsize, needs = pattern
    together = max(1, math.ceil(len(names) * len(needs) / _CHOICES))
    chosen: dict[tuple[Route, ...], list[str]] = {}
    for first in range(0, len(names), together):
        group = names[first : first + together]
        routes = tuple(loads.choose(need, need.box.numel * itemsize * len(group)) for need in needs)
        chosen.setdefault(routes, []).extend(group)
    boxes = [need.box for need in needs]
    return [Moves(tuple(some), itemsize, tuple(map(Transfer, routes, boxes))) for routes, some in chosen.items()]


def _shares(routes: Mapping[Route, int], bucket_bytes: int, itemsize: int) -> tuple[int, int]:
    """Return the number of shares and the grain: how much more than its even share of a route a round may take."""
    loads: dict[tuple[str, int], list[int]] = {}
    passed: Counter[int] = Counter()  # received and sent on
    for route, size in routes.items():
        for sender, receiver in route.hops:
            loads.setdefault(("sends", sender), []).append(size)
            loads.setdefault(("receives", receiver), []).append(size)
        passed[route.receiver] += size if route.onward else 0
    shares = min(_PIPELINE_ROUNDS, max(1, *(size // _PIPELINE_BYTES for size in passed.values()))) if routes else 0
    parts = max(map(len, loads.values()), default=1)
    grain = max(itemsize, bucket_bytes // (8 * parts))
    if all(sum(sizes) <= bucket_bytes for sizes in loads.values()):
        return shares, grain
    spare = bucket_bytes - grain * parts
    if spare < 1:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} must be above {grain * parts}: {grain} bytes for each of up to {parts} "
            f"routes through a rank"
        )
    return max(shares, *(math.ceil(sum(sizes) / spare) for sizes in loads.values())), grain


def _sums(items: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    sums: Counter[_Key] = Counter()
    for key, size in items:
        sums[key] += size
    return dict(sorted(sums.items()))
