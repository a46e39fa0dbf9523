"""The memory of a pipeline rank with split backwards: zero-bubble (arXiv 2401.10241, section 2).

torch's `stage_backward_input` keeps the whole graph, and the output gradient of every operator with weights;
`stage_backward_weight` starts from these and frees both. The first stage has no inputs to differentiate, so its weight
half is the whole backward.

    weight gradients   are in the compute dtype, until the input half of a later backward passes FSDP2's hooks, which
                       add them to a float32 sum, unit by unit
    stages             are unsharded from the first forward to the reduction after the stage's last backward
    receive buffers    stay for the whole step, and so do their gradients; where the V turns, a rank sends nothing to
                       itself: the output is the next stage's input, the input's gradient the earlier stage's gradient

Once every gradient sum exists, micro-batches of the steady state repeat the same moments, but for the gradients of
receive buffers, which each leaves behind: the last of them has the peak, and those between count as bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from usp.cost.job import Job
from usp.cost.traffic.order import Schedule, actions
from usp.cost.traffic.sharding import FLOAT32

from .activations import norm_work, split_layer
from .stage_memory import Moment, StageMemory


def split_moments(job: Job, rank: int, stages: Mapping[int, StageMemory]) -> Iterator[Moment]:
    """Yield the peaks of a step, the optimizer's last, without parameters and optimizer states."""
    return pipeline_moments(job, unrepeated(Schedule.of(job, rank)), stages)


def pipeline_moments(job: Job, schedule: Schedule, stages: Mapping[int, StageMemory]) -> Iterator[Moment]:
    """Yield the peaks of a job in the schedule's micro-batches alone: the first, and the last as they end the step."""
    return _Rank(job, {number: _Stage(stage) for number, stage in stages.items()}).run(schedule)


def unrepeated(schedule: Schedule) -> Schedule:
    """Return a schedule with the same peaks and as few micro-batches.

    Three more than the first rank has in flight fill its steady state three times: in the last, every stage has
    gradients in both dtypes.
    """
    return replace(schedule, micro_batches=min(schedule.micro_batches, 2 * schedule.pp + 2))


@dataclass(eq=False)
class _Stage:
    """The state of one stage."""

    memory: StageMemory
    fresh: bool = False  # there are gradients that are not yet in the float32 sums
    summed: bool = False  # there are float32 sums
    weights: int = 0  # weight halves so far
    reduced: bool = False  # the unsharded gradients have been reduced and freed

    @property
    def whole(self) -> int:
        """Return the bytes of unsharded parameters and gradients."""
        memory = self.memory
        each = memory.size + self.fresh * memory.size + self.summed * FLOAT32
        return 0 if self.reduced else memory.numel * each

    def summing(self, index: int) -> int:
        """Return `whole` during the backward of layer `index`, when later layers have accumulated their gradients."""
        if not self.fresh:
            return self.whole
        memory = self.memory
        done = self._after[index]
        return self.whole - done * memory.size + (0 if self.summed else done * FLOAT32)

    @cached_property
    def _after(self) -> list[int]:
        """The elements of all layers after each one."""
        numel = [sum(unit.numel for unit in units) for units in self.memory.units.layers]
        return [sum(numel) - first for first in accumulate(numel)]


class _Rank:
    """The simulation of a rank: bytes of activations, kept by input `halves`, and of receive `buffers`."""

    def __init__(self, job: Job, stages: Mapping[int, _Stage]) -> None:
        self.job, self.stages = job, stages
        self.early = stages.get(job.dims.pp - 1)  # the stage whose next stage is on the same rank
        self.activations = self.halves = self.gradients = 0
        self.buffers = sum(stage.memory.buffers for stage in stages.values())
        self.split = cache(lambda kind: split_layer(job, job.model.layers[kind]))
        self.left = cache(self._left)

    def run(self, schedule: Schedule) -> Iterator[Moment]:
        skipped = self.job.config.micro_batches - schedule.micro_batches
        last = "forward", min(self.stages), schedule.micro_batches - 1  # begins the last turn of the steady state
        for action in actions(schedule):
            stage = self.stages[action.stage]
            if (action.kind, action.stage, action.micro_batch) == last:
                receiving = sum(not each.memory.first for each in self.stages.values()) - (self.early is not None)
                self.halves += skipped * receiving * stage.memory.handed
            if action.kind == "forward":
                yield from self._forward(stage)
            elif action.kind == "inputs":
                yield from () if stage.memory.first else self._inputs(stage)
            else:
                yield from self._whole_backward(stage) if stage.memory.first else self._weights(stage)
                stage.weights += 1
                if stage.weights == schedule.micro_batches:
                    yield from self._reduce(stage)
        yield self._moment("optimizer", 0, stage)

    def _moment(self, name: str, transient: int, stage: _Stage, whole: int | None = None) -> Moment:
        others = sum(other.whole for other in self.stages.values() if other is not stage)
        return Moment(
            name,
            gradients=self.gradients,
            whole=others + (stage.whole if whole is None else whole),
            activations=self.activations,
            transient=transient + self.halves + self.buffers,
        )

    def _forward(self, stage: _Stage) -> Iterator[Moment]:
        memory = stage.memory
        self.activations += memory.kept
        if stage is self.early:
            self.buffers -= memory.handed  # the output replaces the next stage's receive buffer
        if memory.last:
            yield self._moment("loss", memory.logits, stage)

    def _inputs(self, stage: _Stage) -> Iterator[Moment]:
        memory, left = stage.memory, 0
        if memory.last:
            scaled = memory.head * (FLOAT32 + memory.cast) + memory.hidden
            yield self._moment("loss, inputs", scaled, stage)
            entering = self.job.outer_tokens * self.job.model.hidden_size
            yield self._moment("last norm, inputs", memory.hidden + norm_work(entering), stage)
            left = memory.hidden + entering * memory.size
        for index in reversed(range(len(memory.layers))):
            layer = self.split(memory.kinds[index])
            for name, added in () if memory.inside(index) else layer.peaks:
                yield self._moment(name, left + added, stage, stage.summing(index))
            left += layer.left + layer.passed
        stage.summed, stage.fresh = stage.summed or stage.fresh, False
        self.halves += self.left(stage) + memory.handed  # the input's gradient stays
        if self.early and stage is not self.early:
            self.buffers -= memory.handed  # the input's gradient replaces the earlier stage's receive buffer

    def _left(self, stage: _Stage) -> int:
        """Return the bytes that an input half keeps for the weight half."""
        memory = stage.memory
        layers = [self.split(kind) for kind in memory.kinds]
        ends = memory.hidden + self.job.outer_tokens * self.job.model.hidden_size * memory.size if memory.last else 0
        return ends + sum(layer.left + layer.passed for layer in layers) - layers[0].passed

    def _weights(self, stage: _Stage) -> Iterator[Moment]:
        """Yield the peak of a weight half, which is at its end: the graph is freed as a whole."""
        memory = stage.memory
        self.halves -= self.left(stage)
        if memory.cast:
            stage.fresh = True
        else:
            stage.summed = True  # a float32 gradient is its own sum
        scaled = memory.head * FLOAT32 + memory.hidden if memory.last else 0
        freed = sum(self.split(kind).inputs for kind in memory.kinds)
        yield self._moment("weights", scaled - freed, stage)
        self.activations -= memory.kept
        if stage is self.early:
            self.buffers += memory.handed

    def _whole_backward(self, stage: _Stage) -> Iterator[Moment]:
        memory = stage.memory
        self.activations -= memory.kept
        others = self._moment("", 0, stage, whole=0)
        for moment in memory.layer_moments(later=stage.summed, reduces=False):
            yield others._replace(name=moment.name).plus(
                whole=moment.whole, activations=moment.activations, transient=moment.transient
            )
        stage.summed = True

    def _reduce(self, stage: _Stage) -> Iterator[Moment]:
        memory, fresh = stage.memory, stage.fresh * stage.memory.size
        left = memory.numel
        for unit in memory.groups:
            self.gradients += unit.shard * FLOAT32
            copy = unit.shard * unit.ranks * FLOAT32
            rest = left - unit.numel
            yield self._moment("reduction", 0, stage, left * FLOAT32 + rest * (memory.size + fresh) + copy)
            left = rest
        stage.reduced = True
