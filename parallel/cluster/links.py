"""How long communication takes on given hardware: alpha-beta by tier, for every group of an axis at once.

Groups of one axis run at the same time, because all ranks run the same program. A rank's place is its number: devices
of a host are neighbours. What crosses a tier is counted from the ranks themselves:

    exchange   an all-to-all: a rank sends each peer as much; peers of several tiers are sent to at the same time.
    gather     a ring over the ranks in order: what one rank sends crosses a tier wherever two neighbours are apart.
    reduce     the same. With `parallel_rings` members inside a tier share the crossing (NCCL), else one link has it.
    send       a message to the next rank, of an attention's ring or a pipeline.

The slowest tier counts, and in it the slower of a device's link and what its inner tier's devices share. A kind that
gets less of a link than single messages do gets as much less of what is shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from .hardware import Hardware, Link

KINDS = ("send", "gather", "reduce", "exchange")


def transfer_seconds(
    hardware: Hardware, ranks: Sequence[int], kind: str, nbytes: float, steps: float, world_size: int
) -> float:
    """Seconds in which each of `ranks` sends `nbytes` to the others, as all groups like it do.

    Args:
        ranks: global, of one group, in order.
        kind: one of KINDS.
        steps: how many times a message's alpha counts: n - 1 for an all-gather or a reduce-scatter over n ranks, twice
            that for an all-reduce, n - 1 peers for an all-to-all, 1 for a message; times the calls.
    """
    if len(ranks) < 2:
        return 0.0
    crossing = _exchanged(hardware, ranks) if kind == "exchange" else _passed_on(hardware, ranks, kind)
    links: dict[int, Link] = {level: getattr(hardware.tiers[level], kind) for level in crossing}
    seconds = 0.0
    for level, (device_part, domain_part) in crossing.items():
        tier, inner = hardware.tiers[level], _inner(hardware, level, world_size)
        on_link = nbytes * device_part / links[level].bytes_per_second
        rate = tier.shared_bytes_per_second * links[level].bytes_per_second / tier.send.bytes_per_second
        shared = nbytes * domain_part * inner / rate
        seconds = max(seconds, on_link, shared)
    return seconds / hardware.link_efficiency + steps * max(link.alpha_seconds for link in links.values())


def overlap_of(hardware: Hardware, ranks: Sequence[int]) -> float:
    """The part of what `ranks` send each other beside compute that takes nothing from it: the outermost tier's."""
    return hardware.tiers[level_of(hardware, min(ranks), max(ranks))].overlap if len(ranks) > 1 else 1.0


def level_of(hardware: Hardware, a: int, b: int) -> int:
    """The innermost tier that joins two ranks.

    Raises:
        ValueError: where the last tier joins too few devices.
    """
    for level, tier in enumerate(hardware.tiers):
        if not tier.devices or a // tier.devices == b // tier.devices:
            return level
    raise ValueError(
        f"{hardware.name} joins {hardware.tiers[-1].devices} devices, too few for rank {max(a, b)}: add a tier with "
        f"devices=0, such as the network between hosts"
    )


def _inner(hardware: Hardware, level: int, world_size: int) -> int:
    """How many of the devices that share a way out into this tier take part."""
    return min(hardware.tiers[level - 1].devices if level else 1, world_size)


def _exchanged(hardware: Hardware, ranks: Sequence[int]) -> dict[int, tuple[float, float]]:
    """By tier: the part of a rank's bytes on its own link, and of a device's bytes that leaves the inner tier."""
    worst: dict[int, float] = {}
    for rank in ranks:
        levels = Counter(map(partial(level_of, hardware, rank), (other for other in ranks if other != rank)))
        for level, count in levels.items():
            worst[level] = max(worst.get(level, 0.0), count / (len(ranks) - 1))
    return {level: (part, sum(worst[other] for other in worst if other >= level)) for level, part in worst.items()}


def _passed_on(hardware: Hardware, ranks: Sequence[int], kind: str) -> dict[int, tuple[float, float]]:
    """The same for what each rank sends to the next."""
    levels = {level_of(hardware, a, b) for a, b in pairwise([*ranks, ranks[0]])}
    crossing = {}
    for level in levels:
        size = hardware.tiers[level - 1].devices if level else 1
        together = max(Counter(rank // size for rank in ranks).values())
        spread = together if kind in ("gather", "reduce") and hardware.parallel_rings else 1
        crossing[level] = (1.0 / spread, 1.0 / together)
    return crossing
