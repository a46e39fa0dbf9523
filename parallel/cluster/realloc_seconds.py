"""The time of point-to-point messages by link tier, and of a reallocation from its plan.

A device sends over the link of the tier that connects it with the receiver, and the devices of an inner tier share what
leaves it. Messages on different links go at once, so the busiest link determines the time, plus a latency per message
of the busiest device. A reallocation is a sequence of such rounds (`parallel.reallocation.reallocation`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.reallocation.realloc_plan import ONWARD_DELAY, ReallocPlan

from .hardware import Hardware
from .links import level_between

Links = Mapping[tuple[int, int], float]  # bytes by (sender, receiver), global ranks


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
    """Return the time in which all of `links` are sent at once, one message each.

    Raises:
        ValueError: if the hardware connects too few devices.
    """
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

    What crosses to a host in one round is sent on inside it `ONWARD_DELAY` rounds later.

    Raises:
        ValueError: if the hardware connects too few devices.
    """
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
