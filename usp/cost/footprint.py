"""How much memory a rank of a training step takes: what stays, and the most at one time, by category.

Memory is followed from crest to crest, each a sum of what lives then:

    loss            all kept activations, the head whole, a chunk's logits, the head's float32 gradient
    loss backward   the same gradient scaled, and in the compute dtype; the first layer gathered ahead
    a layer         its recomputed activations and their gradients, whole weights and gradients, shards reduced so far
    the root        the embedding's and the head's gradients, and their float32 copy that is reduced
    optimiser       gradients' shards, and AdamW's one temporary per element (torch's foreach)

It counts storage of tensors as an allocator hands it out, without the allocator's own gaps, and follows
`parallel.fsdp`, `usp.loss`, `usp.activations` and torch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from .activations import LayerActivations, layer_activations
from .job import Job
from .order import actions
from .sharding import FLOAT32, StageUnits, Unit, stage_units


@dataclass(frozen=True)
class Moment:
    """Bytes that live at one crest of a step.

    Attributes:
        gradients: shards that the optimiser will read; whole: gathered parameters, whole gradients, and the buffers in
            which both travel; activations: what forwards left for backwards; transient: the rest.
    """

    name: str
    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    whole: int = 0
    activations: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        return (
            self.parameters + self.optimizer + self.gradients + self.whole + self.activations + self.transient
        )


@dataclass(frozen=True)
class Footprint:
    """A rank's memory in one step; bytes.

    Attributes:
        parameters, gradients, optimizer: float32 shards of weights, of gradients, and AdamW's two moments.
        activations: kept between forward and backward, all micro-batches in flight.
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
    stages = {stage: _Stage(job, rank, stage) for stage in job.stages(rank)}
    shard = sum(unit.shard for stage in stages.values() for unit in stage.units)
    moments = [moment for stage in stages.values() for moment in stage.moments(stages, shard)]
    largest = max(sum(unit.shard for stage in stages.values() for unit in stage.units if (unit.axis == axis))
                  for axis in ("fsdp", "efsdp"))  # fmt: skip
    moments.append(
        Moment("optimiser", shard * FLOAT32, 2 * shard * FLOAT32, shard * FLOAT32, transient=largest * FLOAT32)
    )
    kept = sum(stage.kept * stage.in_flight for stage in stages.values())
    return Footprint(
        parameters=shard * FLOAT32,
        gradients=shard * FLOAT32,
        optimizer=2 * shard * FLOAT32,
        activations=0 if job.ac_offload else kept,
        host=kept if job.ac_offload else 0,
        moments=tuple(moments),
    )
