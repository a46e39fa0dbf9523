"""How much memory a rank of a training step takes: what stays, and the most at one time, by category.

The crests of a stage are in `stage_memory`, those of a pipeline whose backwards come in halves in `split_backward`; the
last is the optimiser's: gradients' shards, and AdamW's one temporary per element (torch's foreach).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from usp.cost.job import Job
from usp.cost.traffic.order import actions
from usp.cost.traffic.sharding import FLOAT32

from .split_backward import split_moments
from .stage_memory import Moment, StageMemory

AXES = ("fsdp", "efsdp")


@dataclass(frozen=True)
class Footprint:
    """A rank's memory in one step; bytes.

    Attributes:
        parameters, gradients, optimizer: float32 shards of weights, of gradients, and AdamW's two moments.
        activations: kept between forward and backward, all micro-batches in flight; host: in the host's memory.
        moments: the crests; the highest is the peak.
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
    """The memory of `rank`."""
    stages = {stage: StageMemory(job, stage) for stage in job.stages(rank)}
    shards = sum(unit.shard for stage in stages.values() for unit in stage.groups)
    by_axis = [sum(u.shard for stage in stages.values() for u in stage.groups if u.axis == a) for a in AXES]
    state = Moment("", shards * FLOAT32, 2 * shards * FLOAT32)
    most, others = _in_flight(job, rank, {number: stage.kept for number, stage in stages.items()})
    away, _ = _in_flight(job, rank, {number: stage.host for number, stage in stages.items()})
    crests = split_moments(job, rank, stages) if job.splits_backwards else _moments(job, stages, others)
    moments = [replace(moment, parameters=state.parameters, optimizer=state.optimizer) for moment in crests]
    # AdamW's foreach takes the parameters of one mesh at a time.
    moments[-1] = replace(moments[-1], transient=moments[-1].transient + max(by_axis) * FLOAT32)
    return Footprint(
        parameters=state.parameters,
        gradients=state.parameters,
        optimizer=state.optimizer,
        activations=most,
        host=away,
        moments=tuple(moments),
    )


def _moments(job: Job, stages: Mapping[int, StageMemory], others: Mapping[tuple[int, bool], int]) -> Iterator[Moment]:
    """The crests of whole backwards, beside what `others` says; the optimiser's last."""
    buffers = sum(stage.buffers for stage in stages.values())
    shards = sum(unit.shard for stage in stages.values() for unit in stage.groups) * FLOAT32
    for (number, later), beside in others.items():
        elsewhere = sum(stage.standing(later) for other, stage in stages.items() if other != number)
        for moment in stages[number].moments(later):
            yield replace(
                moment,
                gradients=shards if later and job.zero >= 2 else moment.gradients,
                whole=moment.whole + elsewhere,
                activations=moment.activations + beside,
                transient=moment.transient + buffers,
            )
    yield Moment("optimiser", gradients=shards, transient=buffers)


def _in_flight(job: Job, rank: int, each: Mapping[int, int]) -> tuple[int, dict[tuple[int, bool], int]]:
    """(the most that forwards have left at one time; for each stage the most beside the micro-batch whose backward
    runs, first where that is the stage's first, then at the later ones), where a stage's forward leaves `each`."""
    live, most = 0, 0
    others: dict[tuple[int, bool], int] = {}
    for action in actions(job, rank):
        kept = each[action.stage]
        if action.kind == "forward":
            live += kept
            most = max(most, live)
        elif action.kind != "inputs":  # zero bubble's first half gives nothing up that its second half needs
            key = action.stage, action.micro_batch > 0
            others[key] = max(others.get(key, 0), live - kept)
            live -= kept
    return most, others
