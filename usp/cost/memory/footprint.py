"""The memory of a rank in a training step: what stays, and the peak, by category.

`stage_memory` has the peaks of a stage, `split_backward` those of a pipeline with split backwards. The last peak is the
optimizer's, with all gradient shards; the fused AdamW needs no temporaries.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache

from usp.cost.job import Job
from usp.cost.traffic.order import Schedule, actions
from usp.cost.traffic.sharding import FLOAT32, stage_units

from .activations import LayerActivations
from .split_backward import split_moments
from .stage_memory import Moment, StageMemory


@dataclass(frozen=True)
class Footprint:
    """A rank's memory in one step, in bytes.

    Attributes:
        parameters, gradients, optimizer: float32 shards of weights and gradients, and AdamW's two moments, on the
            device, or with `--optim-offload` on the host.
        activations: saved between forward and backward on the device, over all micro-batches in flight.
        host: the peak of host memory.
        moments: the peaks of the step on the device; `peak` is the highest.
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
    shards = _shards(stages)
    flights, before = _in_flight(Schedule.of(job, rank))
    kept = {number: stage.kept for number, stage in stages.items()}
    others = {key: _most(found, kept) for key, found in before.items()}
    peaks = split_moments(job, rank, stages) if job.splits_backwards else _moments(job, stages, others, shards)
    different = dict.fromkeys(peaks)  # micro-batches have the same ones over and over
    held = 0 if job.config.optim_offload else shards
    moments = tuple(moment._replace(parameters=held, optimizer=2 * held) for moment in different)
    if job.config.optim_offload:
        largest = FLOAT32 * max(unit.shard for stage in stages.values() for unit in stage.groups)
        moments = moments[:-1]  # the host updates the weights
        if not (_reduces_each(job) and job.dims.dp_replicate > 1):
            # What is not yet reduced over replicas stays on the device.
            moments = tuple(moment._replace(gradients=min(moment.gradients, largest)) for moment in moments)
    host = _on_host(job, rank, stages)
    return Footprint(shards, shards, 2 * shards, activations=_most(flights, kept), host=host, moments=moments)


def rank_host_bytes(job: Job, rank: int) -> int:
    """Return `Footprint.host` of `rank`."""
    return _on_host(job, rank, {stage: StageMemory(job, stage) for stage in job.stages(rank)})


def _on_host(job: Job, rank: int, stages: Mapping[int, StageMemory]) -> int:
    saved = _most(_in_flight(Schedule.of(job, rank))[0], {number: stage.host for number, stage in stages.items()})
    if not job.config.optim_offload:
        return saved
    shards = _shards(stages)
    # With one reduction, gradients arrive as activations are freed.
    return 3 * shards + (saved + shards if _reduces_each(job) else max(saved, shards))


def _shards(stages: Mapping[int, StageMemory]) -> int:
    """Return the bytes of all gradient shards."""
    return FLOAT32 * sum(stage.units.shard for stage in stages.values())


def _reduces_each(job: Job) -> bool:
    """Return whether every one of several micro-batches reduces its gradients."""
    return job.config.zero >= 2 and job.config.micro_batches > 1


def largest_footprint(job: Job) -> tuple[Footprint, int]:
    """Return (the memory of the pipeline stage that needs most, the first rank that has it)."""
    found = ((footprint(job, rank), rank) for rank in job.ranks("pp", 0))
    return max(found, key=lambda pair: pair[0].peak.total)


def least_saved_bytes(job: Job, layer: int) -> int:
    """Return a lower bound of the peak on the first rank, with ZeRO stage 1 to 3 and any option that saves memory.

    layer: from `least_layer_bytes`, of a job with the same micro-batches, ring, ulysses, tp and ep.
    """
    held = sum(stage_units(job, stage).shard for stage in job.stages(0))
    shards = 0 if job.config.optim_offload else FLOAT32 * held
    return 3 * shards + max(shards, layer)


def least_bytes(job: Job, layers: Mapping[int, LayerActivations]) -> int:
    """Return a lower bound of the peak on the first rank: what its first stage's last layer needs in the backward.

    layers: from `different_activations`, of a job with the same micro-batches, ring, ulysses, tp, ep and recomputation.
    """
    last = layers[job.model.alike[job.stage_layers[0][-1]]]
    kept = {
        stage: sum(layers[kind].kept * number for kind, number in job.kinds(stage).items())
        * (not job.config.ac_offload)
        for stage in job.stages(0)
    }
    units = [stage_units(job, stage) for stage in job.stages(0)]
    whole = 0 if job.config.zero == 3 else job.dtype.itemsize * sum(stage.numel for stage in units)
    if job.splits_backwards:  # the first rank begins with so many forwards of its first stage
        flights = (2 * job.dims.pp - 1) * kept[0]
    else:
        _, others = _in_flight(Schedule.of(job, 0))
        flights = kept[0] + max(_most(found, kept) for (stage, _), found in others.items() if stage == 0)
        flights += max(last.mlp, last.norm, last.attention)
    held = 0 if job.config.optim_offload else 3 * FLOAT32 * sum(stage.shard for stage in units)
    return held + whole + flights


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
            yield moment._replace(gradients=gradients).plus(whole=idle, activations=kept, transient=buffers)
    yield Moment("optimizer", gradients=shards, transient=buffers)


Flight = tuple[tuple[int, int], ...]  # stages, each with the number of its micro-batches between forward and backward


def _most(flights: Set[Flight], each: Mapping[int, int]) -> int:
    """Return the most bytes in flight, where a stage's forward saves `each` bytes."""
    return max(sum(number * each[stage] for stage, number in flight) for flight in flights)


@lru_cache(maxsize=4096)
def _in_flight(schedule: Schedule) -> tuple[Set[Flight], Mapping[tuple[int, bool], Set[Flight]]]:
    """Return (what is in flight after each forward, {(stage, whether an earlier backward of it has run): the other
    micro-batches in flight during its backwards})."""
    live: Counter[int] = Counter()
    after: set[Flight] = set()
    others: defaultdict[tuple[int, bool], set[Flight]] = defaultdict(set)
    for action in actions(schedule):
        if action.kind == "forward":
            live[action.stage] += 1
            after.add(tuple(live.items()))
        elif action.kind != "inputs":  # the backward of the inputs frees nothing that the backward of the weights needs
            live[action.stage] -= 1
            others[action.stage, action.micro_batch > 0].add(tuple(live.items()))
    return after, others
