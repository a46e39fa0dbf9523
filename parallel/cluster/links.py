"""Alpha-beta model of communication time on given hardware, by tier, with all groups of an axis active at once.

All ranks run the same program, so the groups of an axis communicate simultaneously. Ranks are placed in order, so that
adjacent ranks share a host. The traffic that crosses a tier follows from the ranks:

    exchange   all-to-all: a rank sends the same amount to each peer, to peers on different tiers at the same time.
    gather     a ring over the ranks in order: data crosses a tier wherever two neighbours are on different sides.
    reduce     the same. With `parallel_rings`, members inside a tier share the crossing (NCCL); else one link has it.
    send       a message to the next rank, in ring attention or a pipeline.

The slowest tier determines the time, and within it the slower of a device's link and the link that devices share. A
kind of message that achieves a fraction of a device's `send` rate achieves the same fraction of the shared rate.

A device's link to its host carries copies of offloaded data, and the messages of tiers that are `on_host_link`.

Point-to-point messages that are sent at once: a device sends over the link of the tier that connects it with the
receiver, and the devices of an inner tier share what leaves it. The busiest link determines the time, plus a latency
per message of the busiest device. A reallocation is a sequence of such rounds (`reallocation`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from usp.parallel.reallocation.realloc_plan import ONWARD_DELAY, ReallocPlan

from .hardware import Hardware, Link

_Tree = tuple[str, tuple[int, ...]]  # the name of hardware, and the devices of its tiers, innermost first
Links = Mapping[tuple[int, int], float]  # bytes by (sender, receiver), global ranks


def transfer_seconds(
    hardware: Hardware, ranks: Sequence[int], kind: str, nbytes: float, steps: float, active: Sequence[int]
) -> float:
    """Return the time in which each of `ranks` sends `nbytes` to the others, while all similar groups do the same.

    Args:
        ranks: global ranks of one group, in order.
        kind: "send", "gather", "reduce" or "exchange".
        steps: number of message latencies: n - 1 for an all-gather, reduce-scatter or all-to-all over n ranks, twice
            that for an all-reduce, 1 for a single message; times the number of calls.
        active: global ranks of all groups that send at the same time.
    """
    if len(ranks) < 2:
        return 0.0
    crossing = _crossing(hardware, ranks, kind)
    links: dict[int, Link] = {level: getattr(hardware.tiers[level], kind) for level in crossing}
    together, seconds = active if isinstance(active, range) else tuple(active), 0.0
    for level, (device_part, domain_part) in crossing.items():
        tier = hardware.tiers[level]
        inner = _most_together(together, hardware.tiers[level - 1].devices) if level else 1
        on_link = nbytes * device_part / links[level].bytes_per_second
        rate = tier.shared_bytes_per_second * links[level].bytes_per_second / tier.send.bytes_per_second
        shared = nbytes * domain_part * inner / rate
        seconds = max(seconds, on_link, shared)
    return seconds / hardware.link_efficiency + steps * max(link.alpha_seconds for link in links.values())


def host_link_seconds(hardware: Hardware, ranks: Sequence[int], kind: str, nbytes: float) -> float:
    """Return the time for which each of `ranks`, that sends as in `transfer_seconds`, occupies its link to the host in
    either direction."""
    if len(ranks) < 2:
        return 0.0
    crossing = _crossing(hardware, ranks, kind).items()
    parts = (part for level, (part, _) in crossing if hardware.tiers[level].on_host_link)
    return nbytes * sum(parts) / hardware.host_link_bytes_per_second


@lru_cache(maxsize=256)
def _most_together(ranks: Sequence[int], devices: int) -> int:
    """Return the largest number of ranks inside one tier of `devices`."""
    return max(Counter(rank // devices for rank in ranks).values())


def overlap_of(hardware: Hardware, ranks: Sequence[int]) -> float:
    """Return the `overlap` of the outermost tier between `ranks`."""
    return hardware.tiers[level_between(hardware, min(ranks), max(ranks))].overlap if len(ranks) > 1 else 1.0


def level_between(hardware: Hardware, a: int, b: int) -> int:
    """Return the index of the innermost tier that connects two ranks. Raise ValueError if the last tier connects too
    few devices."""
    return _level(_tree(hardware), a, b)


def _tree(hardware: Hardware) -> _Tree:
    return hardware.name, tuple(tier.devices for tier in hardware.tiers)


def _level(tree: _Tree, a: int, b: int) -> int:
    name, numbers = tree
    for level, devices in enumerate(numbers):
        if not devices or a // devices == b // devices:
            return level
    raise ValueError(
        f"{name} connects {numbers[-1]} devices, too few for rank {max(a, b)}: add a tier with devices=0, such as the "
        f"network between hosts"
    )


def _crossing(hardware: Hardware, ranks: Sequence[int], kind: str) -> dict[int, tuple[float, float]]:
    """Return, by tier, the fractions of a rank's bytes that use its own link and that leave the inner tier."""
    tree, ranks = _tree(hardware), ranks if isinstance(ranks, range) else tuple(ranks)
    if kind == "exchange":
        return _exchanged(tree, ranks)
    return _passed_on(tree, ranks, shared=kind in ("gather", "reduce") and hardware.parallel_rings)


@lru_cache(maxsize=4096)
def _exchanged(tree: _Tree, ranks: Sequence[int]) -> dict[int, tuple[float, float]]:
    worst: dict[int, float] = {}
    for rank in ranks:
        levels = Counter(_level(tree, rank, other) for other in ranks if other != rank)
        for level, count in levels.items():
            worst[level] = max(worst.get(level, 0.0), count / (len(ranks) - 1))
    return {level: (part, sum(worst[other] for other in worst if other >= level)) for level, part in worst.items()}


@lru_cache(maxsize=4096)
def _passed_on(tree: _Tree, ranks: Sequence[int], shared: bool) -> dict[int, tuple[float, float]]:
    """Return the same fractions if each rank sends to the next. shared: ranks of a tier share what leaves it."""
    levels = {_level(tree, a, b) for a, b in pairwise([*ranks, ranks[0]])}
    crossing = {}
    for level in levels:
        size = tree[1][level - 1] if level else 1
        together = max(Counter(rank // size for rank in ranks).values())
        crossing[level] = (1.0 / (together if shared else 1), 1.0 / together)
    return crossing


@dataclass(frozen=True)
class TierSeconds:
    """The time of messages that are sent at once.

    Attributes:
        links: seconds of the busiest link of each tier, innermost first; 0 for a tier without messages.
        latency: of the device with most messages.
    """

    links: tuple[float, ...]
    latency: float

    @property
    def total(self) -> float:
        return max(self.links, default=0.0) + self.latency


@dataclass(frozen=True)
class ReallocSeconds:
    """The time of a reallocation.

    Attributes:
        rounds: seconds of each kind of round, with the number of such rounds.
        copies: seconds in which the busiest rank copies what it holds already, while the last round is sent.
    """

    rounds: tuple[tuple[TierSeconds, int], ...]
    copies: float

    @property
    def total(self) -> float:
        last = self.rounds[-1][0].total if self.rounds else 0.0
        return sum(number * each.total for each, number in self.rounds) + max(0.0, self.copies - last)


def message_seconds(hardware: Hardware, links: Links) -> TierSeconds:
    """Return the time in which all of `links` are sent at once, one message each. Raise ValueError if the hardware
    connects too few devices."""
    busiest, calls = [0.0] * len(hardware.tiers), Counter[int]()
    own: defaultdict[tuple[int, int, str], float] = defaultdict(float)  # bytes by (level, device, direction)
    shared: defaultdict[tuple[int, int, str], float] = defaultdict(float)  # bytes by (level, inner tier, direction)
    latency = 0.0
    for (sender, receiver), nbytes in links.items():
        level = level_between(hardware, sender, receiver)
        inner = hardware.tiers[level - 1].devices if level else 1
        for rank, direction in ((sender, "out"), (receiver, "in")):
            own[level, rank, direction] += nbytes
            shared[level, rank // inner, direction] += nbytes
            calls[rank] += 1
        latency = max(latency, hardware.tiers[level].send.alpha_seconds)
    for (level, _, _), nbytes in own.items():
        busiest[level] = max(busiest[level], nbytes / hardware.tiers[level].send.bytes_per_second)
    for (level, _, _), nbytes in shared.items():
        busiest[level] = max(busiest[level], nbytes / hardware.tiers[level].shared_bytes_per_second)
    seconds = tuple(each / hardware.link_efficiency for each in busiest)
    return TierSeconds(seconds, latency * max(calls.values(), default=0))


def realloc_seconds(plan: ReallocPlan, hardware: Hardware) -> ReallocSeconds:
    """Return the time of a reallocation, in whose rounds every route carries an equal share of its bytes.

    What crosses to a host in one round is sent on inside it `ONWARD_DELAY` rounds later. Raise ValueError if the
    hardware connects too few devices."""
    first: Counter[tuple[int, int]] = Counter()
    onward: Counter[tuple[int, int]] = Counter()
    for route, nbytes in plan.routes.items():
        for number, hop in enumerate(route.hops):
            (onward if number else first)[hop] += nbytes
    kinds = [(first, plan.shares)]
    if onward:
        delay = min(ONWARD_DELAY, plan.shares)
        kinds = [(first, delay), (first + onward, plan.shares - delay), (onward, delay)]
    rounds = tuple(
        (message_seconds(hardware, {hop: nbytes / plan.shares for hop, nbytes in links.items()}), number)
        for links, number in kinds
        if number
    )
    held: Counter[int] = Counter()  # bytes in dst by rank
    for name, boxes in plan.dst.boxes.items():
        itemsize = plan.dst.parameters[name].dtype.itemsize
        for rank, box in boxes.items():
            held[rank] += box.numel * itemsize
    kept = max((nbytes - plan.received_bytes.get(rank, 0) for rank, nbytes in held.items()), default=0)
    return ReallocSeconds(rounds, hardware.memory_seconds(2 * max(0, kept)))
