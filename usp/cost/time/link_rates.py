"""Alpha and beta of this machine's links, by tier and kind of message, and how much of a message computing hides.

Two message sizes give a link's alpha and beta; one rank sending by itself and all ranks sending together give the
bandwidth that the ranks of a host share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallel import Link
from usp.cost.traffic.sharding import FLOAT32

from .rounds import Timed

SMALL, LARGE = 1 << 10, 1 << 22  # bytes that a rank sends
CALLS = {SMALL: 8, LARGE: 1}  # in a turn
KINDS = ("send", "gather", "reduce", "exchange")
TOGETHER = "send from every device"


@dataclass(frozen=True)
class LinkTier:
    """The ranks that one tier of links connects.

    Attributes:
        devices: of the tier in a hardware file; 0 for any number.
        group: of this rank; ranks: its size.
        shared: whether the ranks of a host share the link. One of them is then measured by itself, too.
    """

    name: str
    devices: int
    group: dist.ProcessGroup
    ranks: int
    host_size: int
    shared: bool = False

    def timed(self, device: torch.device) -> list[Timed]:
        """Return the messages of both sizes and all kinds."""
        alone = not self.shared or dist.get_rank() % self.host_size == 0
        found = [self._timed(device, kind, nbytes, kind, alone) for kind in KINDS for nbytes in CALLS]
        if self.shared:
            found += [self._timed(device, TOGETHER, nbytes, "send", True) for nbytes in CALLS]
        return found

    def _timed(self, device: torch.device, name: str, nbytes: int, kind: str, takes_part: bool) -> Timed:
        call = _transfer(device, self.group, self.ranks, kind, nbytes) if takes_part else None
        return Timed(self._name(name, nbytes), call, CALLS[nbytes])

    def _name(self, kind: str, nbytes: int) -> str:
        return f"{self.name}, {kind} of {nbytes} bytes"

    def overlapping(
        self, device: torch.device, product: Callable[[], object], seconds: float, times: Mapping[str, float]
    ) -> list[Timed]:
        """Return a message, matrix products that take about as long, and both at once.

        Args:
            seconds: of one product. times: of what `timed` returned.
        """
        number = max(1, round(times[self._name(TOGETHER if self.shared else "send", LARGE)] / seconds))
        begin = _message(device, self.group, self.ranks, LARGE)

        def compute() -> None:
            for _ in range(number):
                product()

        def both() -> None:
            works = begin()
            compute()
            _finish(works)

        calls = {"message": lambda: _finish(begin()), "products": compute, "both": both}
        return [Timed(f"{self.name}, overlap: {name}", call, CALLS[LARGE]) for name, call in calls.items()]

    def values(self, times: Mapping[str, float]) -> dict[str, Any]:
        """Return the tier of a hardware file from the times of everything above."""
        found = {kind: self._link(kind, times) for kind in KINDS}
        message, compute, both = (times[f"{self.name}, overlap: {name}"] for name in ("message", "products", "both"))
        overlap = min(1.0, max(0.0, (message + compute - both) / min(message, compute)))
        tier = {"name": self.name, "devices": self.devices, **{kind: asdict(link) for kind, link in found.items()}}
        if self.shared:
            together = self.host_size * self._link(TOGETHER, times).bytes_per_second
            tier["shared_bytes_per_second"] = max(found["send"].bytes_per_second, together)
        return {**tier, "overlap": overlap}

    def _link(self, kind: str, times: Mapping[str, float]) -> Link:
        steps = self.ranks - 1 if kind in KINDS[1:] else 1
        small, large = (times[self._name(kind, nbytes)] for nbytes in (SMALL, LARGE))
        if large <= small:
            raise ValueError(
                f"{self._name(kind, LARGE)} took {large:.2g} s, and {SMALL} bytes {small:.2g} s: no bandwidth follows "
                "from that. Measure again while the machine does nothing else"
            )
        rate = (LARGE - SMALL) / (large - small)
        return Link(max(0.0, small - SMALL / rate) / steps, rate)


def is_latency(name: str) -> bool:
    """Check whether a time is a small message's, from which a link's alpha follows and no rate."""
    return name.endswith(f" of {SMALL} bytes")


def link_tiers(ranks: int, host_size: int) -> list[LinkTier]:
    """Return the tiers that connect `ranks`, of which `host_size` neighbours are on a host. Collective."""
    hosts = [list(range(first, first + host_size)) for first in range(0, ranks, host_size)]
    across = [list(range(place, ranks, host_size)) for place in range(host_size)]
    tiers = []
    if host_size > 1:
        tiers.append(LinkTier("inside a host", host_size, _group(hosts), host_size, host_size))
    if len(hosts) > 1:
        tiers.append(LinkTier("between hosts", 0, _group(across), len(hosts), host_size, shared=True))
    return tiers


def _group(of: list[list[int]]) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(of)
    assert group is not None
    return group


def _message(device: torch.device, group: dist.ProcessGroup, ranks: int, nbytes: int) -> Callable[[], list[dist.Work]]:
    """Return a call that starts to send `nbytes` to the group's next rank and to receive as many from the previous."""
    one = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    here, came = dist.get_rank(group), torch.empty_like(one)
    operations = [
        dist.P2POp(dist.isend, one, group=group, group_peer=(here + 1) % ranks),
        dist.P2POp(dist.irecv, came, group=group, group_peer=(here - 1) % ranks),
    ]
    return lambda: dist.batch_isend_irecv(operations)


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _transfer(
    device: torch.device, group: dist.ProcessGroup, ranks: int, kind: str, nbytes: int
) -> Callable[[], object]:
    """Return a call in which each rank of the group sends `nbytes`."""
    if kind == "send":
        begin = _message(device, group, ranks, nbytes)
        return lambda: _finish(begin())
    one = torch.zeros(nbytes // (ranks - 1) // FLOAT32, device=device)
    whole, gathered = one.repeat(ranks), one.repeat(ranks)
    if kind == "gather":
        return lambda: dist.all_gather_into_tensor(gathered, one, group=group)
    if kind == "reduce":
        return lambda: dist.reduce_scatter_tensor(one, whole, group=group)
    return lambda: dist.all_to_all_single(gathered, whole, group=group)
