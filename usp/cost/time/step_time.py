"""The time of a step on given hardware: the sum of its passes, with pipeline bubble and optimizer.

The slowest pipeline stage sets the pace, and the schedule the bubble (`parallel.bubble_fraction`). Where ranks share
processors, ranks that wait leave them to the others, so a step takes at least the compute of all ranks together.
`transfers` says which communication overlaps with compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel import Hardware, bubble_fraction
from usp.cost.job import Job
from usp.cost.traffic.sharding import gather_counts

from .attention_time import attention_kernels
from .compute import Seconds, dtype_name
from .host import host_copies, host_update_seconds, launch_wait
from .model_flops import model_flops
from .pass_seconds import Layers, PassSeconds, different_layers, pass_seconds
from .transfers import OVERLAP, Overlap, TransferSeconds


@dataclass(frozen=True)
class StepTime:
    """The seconds of one optimizer step of the slowest rank, by component.

    Attributes:
        compute: of kernels; communication: by axis.
        bubble: waiting for other pipeline stages.
        causal_flops: model FLOPs per device, without recomputation and without the masked half of attention.
        peak: FLOP/s of a device.
        kernels: from `attention_kernels`.
    """

    compute: Seconds
    communication: Mapping[str, TransferSeconds] = field(hash=False)
    bubble: float
    optimizer: float
    causal_flops: float
    peak: float
    kernels: tuple[str, ...] = ()

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(transfers.exposed for transfers in self.communication.values())

    @property
    def total(self) -> float:
        return self.compute.total + self.exposed + self.bubble + self.optimizer

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, counting the visible half of a causal mask as arXiv 2405.07719v5 does."""
        return self.causal_flops / self.total / self.peak

    @property
    def bound(self) -> str:
        """The component that takes most of the step."""
        parts = {
            "compute": self.compute.total + self.optimizer,
            "pipeline bubble": self.bubble,
            **{f"communication over {axis}": transfers.exposed for axis, transfers in self.communication.items()},
        }
        return max(parts, key=lambda part: parts[part])


def step_seconds(job: Job, hardware: Hardware, overlap: Overlap = OVERLAP, layers: Layers | None = None) -> StepTime:
    """Predict the time of a step.

    layers: from `different_layers`, of a job with the same micro-batches, ring, ulysses, tp, ep and recomputation.

    Raises:
        ValueError: if the hardware has no peak for the job's dtype, or connects too few devices.
    """
    layers = layers or different_layers(job, hardware)
    found = [_rank_seconds(job, hardware, overlap, rank, layers) for rank in _different_ranks(job, hardware)]
    slowest, _ = max(found, key=lambda pair: pair[0].total)
    compute, fraction = slowest.compute, bubble_fraction(job.config.pp_schedule, job.dims.pp, job.config.micro_batches)
    bubble = slowest.total * fraction / (1 - fraction)
    if hardware.crowding > 1:
        compute = _mean_compute(job, hardware, overlap, layers)
        bubble = max(0.0, (slowest.compute.total + bubble) / hardware.crowding - compute.total)
    return StepTime(
        compute=compute,
        communication=slowest.communication,
        bubble=bubble,
        optimizer=max(optimizer for _, optimizer in found),
        causal_flops=model_flops(job) / job.world_size,
        peak=hardware.peak(dtype_name(job.dtype)),
        kernels=attention_kernels(job, hardware),
    )


def _rank_seconds(
    job: Job, hardware: Hardware, overlap: Overlap, rank: int, layers: Layers
) -> tuple[PassSeconds, float]:
    """Return (the sum of a rank's passes but the optimizer, the optimizer)."""
    passes = pass_seconds(job, hardware, rank, overlap, layers)
    update, number = passes.pop("update"), job.config.micro_batches
    backward = sum(passes[kind].compute.total for kind in ("recompute", "backward") if kind in passes)
    found = sum(passes.values(), PassSeconds(communication=update.communication))
    found += PassSeconds(
        communication=host_copies(job, hardware, rank, passes["forward"].compute.total / number, backward / number)
    )
    optimizer = host_update_seconds(job, hardware, rank) if job.config.optim_offload else update.compute.total
    return found + PassSeconds(launch_wait(job, hardware, rank, found.total)), optimizer


def _different_ranks(job: Job, hardware: Hardware) -> list[int]:
    """Return `Job.slowest_ranks`, and of those that compute and send the same over the same links only the first."""
    last, devices = len(job.stage_layers) - 1, [tier.devices for tier in hardware.tiers if tier.devices]
    placed = job.global_ranks

    def does(rank: int) -> tuple[object, ...]:
        stages = job.stages(rank)
        return tuple(placed[rank] % number for number in devices), tuple(
            (
                tuple(job.kinds(stage).items()),
                gather_counts(job, rank, stage),
                (stage == 0, stage == last, stage - 1 in stages, stage + 1 in stages),
            )
            for stage in stages
        )

    different: dict[tuple[object, ...], int] = {}
    for rank in job.slowest_ranks:
        different.setdefault(does(rank), rank)
    return list(different.values())


def _mean_compute(job: Job, hardware: Hardware, overlap: Overlap, layers: Layers) -> Seconds:
    """Return the mean over all stages and ring ranks; along the other axes compute is even."""
    ranks = [first + rank for first in job.ranks("pp", 0) for rank in job.ranks("ring", 0)]
    each = (_rank_seconds(job, hardware, overlap, rank, layers)[0].compute for rank in ranks)
    return sum(each, Seconds()).times(1 / len(ranks))
