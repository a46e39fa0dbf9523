"""Seconds of communication, and which of it overlaps with compute.

What overlaps in the implementation overlaps here; `OVERLAPS_WITH` names it per axis, and the rest is exposed:

    ring             a ring step's compute hides the transfer of the next step's keys and values, and in the backward
                     also of the previous step's gradients; the last gradients are exposed (`attention.ring`)
    parameter axes   a layer's compute hides the gather of the next layer and the reduction of the previous one (FSDP2),
                     if collectives run on their own streams; the first gather and the last reduction are exposed, and
                     so are sums of scalars such as token counts
    host             a layer's compute hides the copies of what its neighbours offload (`host`)
    the rest         Ulysses, tp, ep and pp are exposed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel import Hardware, transfer_seconds
from usp.cost.job import Job
from usp.cost.traffic.sent import Sent

_LAYERS = "the compute of the neighbouring layers"
OVERLAPS_WITH: Mapping[str, str] = {  # axes that are not listed are exposed
    "ring": "the attention of the previous ring step",
    **dict.fromkeys(("fsdp", "efsdp", "dp_replicate", "loss", "host"), _LAYERS),
}
_KINDS: Mapping[str, tuple[str, int]] = {  # kind of transfer, and its steps over n ranks as a multiple of n - 1
    **dict.fromkeys(("send", "broadcast_"), ("send", 0)),
    **dict.fromkeys(("alltoall_base_", "all_to_all_single"), ("exchange", 1)),
    **dict.fromkeys(("allgather_", "_allgather_base_", "all_gather_into_tensor"), ("gather", 1)),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), ("reduce", 1)),
    **dict.fromkeys(("allreduce_", "all_reduce"), ("gather", 2)),
}


def exposure(axis: str) -> str:
    """Return `exposed`, or what the communication of an axis overlaps with."""
    return f"overlaps with {OVERLAPS_WITH[axis]}" if axis in OVERLAPS_WITH else "exposed"


def of_parameters(part: Sent) -> bool:
    """Check whether a layer's parameters or gradients are sent rather than scalars."""
    return OVERLAPS_WITH.get(part.axis) == _LAYERS and part.nbytes > 64 * part.calls


@dataclass(frozen=True)
class Overlap:
    """Which communication overlaps with compute. False models a system that waits for it."""

    ring: bool = True
    fsdp: bool = True


OVERLAP = Overlap()  # what the implementation overlaps


@dataclass(frozen=True)
class TransferSeconds:
    """The time of one axis' communication: exposed, and overlapped with compute."""

    exposed: float = 0.0
    overlapped: float = 0.0

    def __add__(self, other: TransferSeconds) -> TransferSeconds:
        return TransferSeconds(self.exposed + other.exposed, self.overlapped + other.overlapped)

    def times(self, number: float) -> TransferSeconds:
        return TransferSeconds(number * self.exposed, number * self.overlapped)

    def with_free_part(self, free: float) -> TransferSeconds:
        """Expose the part of the overlapped time that slows down the compute; the part `free` does not."""
        return TransferSeconds(self.exposed + (1 - free) * self.overlapped, free * self.overlapped)


def overlapped(transfers: Sequence[float], compute: Sequence[float]) -> TransferSeconds:
    """Overlap each transfer with the compute at the same position; what takes longer than its compute is exposed."""
    hiding = [*compute, *([0.0] * len(transfers))]
    exposed = sum(max(0.0, transfer - seconds) for transfer, seconds in zip(transfers, hiding, strict=False))
    return TransferSeconds(exposed, sum(transfers) - exposed)


def overlapped_in_pieces(transfer: float, compute: float, pieces: int) -> TransferSeconds:
    """Overlap each of the equal pieces of a transfer with the previous piece of compute; the first is exposed."""
    first = transfer / pieces
    exposed = first + (pieces - 1) * max(0.0, first - compute / pieces)
    return TransferSeconds(exposed, transfer - exposed)


def sent_seconds(job: Job, hardware: Hardware, sent: Sent, rank: int) -> float:
    """Return the time of an axis' collectives of one kind, one after another.

    Raises:
        KeyError: for a collective that `parallel.wire` does not know either.
    """
    kind, rounds = _KINDS[sent.collective]
    ranks = job.linked(job.ranks(sent.axis, rank))
    steps = sent.calls * (rounds * (len(ranks) - 1) if rounds else 1)
    return transfer_seconds(hardware, ranks, kind, sent.nbytes, steps, job.global_ranks)
