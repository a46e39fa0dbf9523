"""The memory of a rank in a training step: what stays, and the peak, by category.

`stage_memory` has the peaks of a stage, `split_backward` those of a pipeline with split backwards. The last peak is the
optimizer's: gradient shards, and the one temporary per element of torch's foreach AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from usp.cost.job import Job
from usp.cost.traffic.order import Schedule, actions
from usp.cost.traffic.sharding import FLOAT32

from .split_backward import split_moments
from .stage_memory import Moment, StageMemory

AXES = ("fsdp", "efsdp")


@dataclass(frozen=True)
class Footprint:
    """A rank's memory in one step, in bytes.

    Attributes:
        parameters, gradients, optimizer: float32 shards of weights and gradients, and AdamW's two moments.
        activations: saved between forward and backward, over all micro-batches in flight; host: in host memory.
        moments: the peaks of the step; `peak` is the highest.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    host: int
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def footprint(job: Job, rank: int) -> Footprint:
    """Return the memory of `rank`."""
    stages = {stage: StageMemory(job, stage) for stage in job.stages(rank)}
    by_axis = [FLOAT32 * sum(u.shard for stage in stages.values() for u in stage.groups if u.axis == a) for a in AXES]
    shards = sum(by_axis)
    most, others = _in_flight(job, rank, {number: stage.kept for number, stage in stages.items()})
    host, _ = _in_flight(job, rank, {number: stage.host for number, stage in stages.items()})
    peaks = split_moments(job, rank, stages) if job.splits_backwards else _moments(job, stages, others, shards)
    moments = [replace(moment, parameters=shards, optimizer=2 * shards) for moment in peaks]
    # foreach AdamW updates the parameters of one mesh at a time.
    moments[-1] = moments[-1].plus(transient=max(by_axis))
    return Footprint(shards, shards, 2 * shards, activations=most, host=host, moments=tuple(moments))


def _moments(
    job: Job, stages: Mapping[int, StageMemory], others: Mapping[tuple[int, bool], int], shards: int
) -> Iterator[Moment]:
    """Yield the peaks of unsplit backwards, with the activations `others` of other micro-batches; the optimizer's last.

    shards: bytes of all gradient shards.
    """
    buffers = sum(stage.buffers for stage in stages.values())
    for (number, later), kept in others.items():
        idle = sum(stage.idle(later) for other, stage in stages.items() if other != number)
        for moment in stages[number].moments(later):
            gradients = shards if later and job.config.zero >= 2 else moment.gradients
            yield replace(moment, gradients=gradients).plus(whole=idle, activations=kept, transient=buffers)
    yield Moment("optimizer", gradients=shards, transient=buffers)


def _in_flight(job: Job, rank: int, each: Mapping[int, int]) -> tuple[int, dict[tuple[int, bool], int]]:
    """Return (the maximum of the saved activations in flight, {(stage, whether an earlier backward of it has run): the
    maximum of other micro-batches' activations during a backward}), where a stage's forward saves `each` bytes."""
    live, most = 0, 0
    others: dict[tuple[int, bool], int] = {}
    for action in actions(Schedule.of(job, rank)):
        kept = each[action.stage]
        if action.kind == "forward":
            live += kept
            most = max(most, live)
        elif action.kind != "inputs":  # the backward of the inputs frees nothing that the backward of the weights needs
            key = action.stage, action.micro_batch > 0
            others[key] = max(others.get(key, 0), live - kept)
            live -= kept
    return most, others
