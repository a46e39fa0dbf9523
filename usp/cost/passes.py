"""What each pass of a step, or of forwards alone, takes on one rank: traffic, FLOPs, seconds and memory."""

from __future__ import annotations

from dataclasses import dataclass

from parallel import Hardware

from .job import PASSES, Job, Pass
from .memory.footprint import footprint
from .memory.forward_memory import forward_memory
from .time.pass_flops import pass_flops
from .time.pass_seconds import PassSeconds, pass_seconds
from .traffic.pass_traffic import pass_traffic
from .traffic.sent import Sent


@dataclass(frozen=True)
class PassCost:
    """One pass of all micro-batches on a rank.

    Attributes:
        traffic: bytes that the rank sends, by axis and collective.
        peak_bytes: of device memory during the pass; 0 for a pass that does not take place.
    """

    traffic: tuple[Sent, ...]
    flops: float
    seconds: PassSeconds
    peak_bytes: int


def pass_costs(job: Job, hardware: Hardware, rank: int) -> dict[Pass, PassCost]:
    """Return what every pass takes on `rank`, a rank of the job's mesh.

    Raises:
        ValueError: if the hardware has no peak for the job's dtype, or connects too few devices.
    """
    traffic, flops, seconds = pass_traffic(job, rank), pass_flops(job, rank), pass_seconds(job, hardware, rank)
    peaks = _peaks(job, rank)
    return {kind: PassCost(traffic[kind], flops[kind], seconds[kind], peaks[kind]) for kind in PASSES}


def _peaks(job: Job, rank: int) -> dict[Pass, int]:
    """Return the peak of each pass; recomputation happens inside the backward, and shares its peak."""
    peaks = dict.fromkeys(PASSES, 0)
    if not job.trained:
        return peaks | {"forward": forward_memory(job, rank).total}
    memory = footprint(job, rank)
    backward = max(moment.total for moment in memory.moments if moment.name != "optimizer")
    state = memory.parameters + memory.optimizer
    forward = state + memory.activations  # at its end, without what it gathers
    peaks |= {"forward": forward, "backward": backward, "recompute": backward if job.config.ac != "none" else 0}
    update = max(moment.total for moment in memory.moments if moment.name == "optimizer")
    return peaks | {"update": update, "count": forward - memory.activations if job.counts_choices else 0}
