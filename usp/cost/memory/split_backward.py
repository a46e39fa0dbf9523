"""The memory of a pipeline rank whose backwards come in halves: zero-bubble (arXiv 2401.10241, section 2).

torch's `stage_backward_input` keeps the whole graph, and at every operator that has weights the gradient that came to
it; `stage_backward_weight` starts there, and lets both go. The first stage has no inputs to differentiate, and does all
of its backward in the second half.

    weights of an operator    arrive as a gradient in the compute dtype, which stays one until a backward of the inputs
                              passes FSDP2's hooks: they add it to a float32 sum, unit after unit
    stages                    are whole from the first forward to the reduction, after the stage's last backward
    what is received          stays the step over, with its gradient; at the turn of the V, where a rank hands over to
                              itself, the next stage's input is the output, and the earlier stage's gradient the input's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from usp.cost.job import Job
from usp.cost.traffic.order import Action, actions
from usp.cost.traffic.sharding import FLOAT32

from .activations import norm_work, split_layer
from .stage_memory import Moment, StageMemory


def split_moments(job: Job, rank: int, stages: Mapping[int, StageMemory]) -> Iterator[Moment]:
    """The crests of a step, the optimiser's last, beside its states and parameters."""
    return _Rank(job, {number: _Stage(stage) for number, stage in stages.items()}).run(actions(job, rank))


@dataclass(eq=False)
class _Stage:
    """Attributes:
    fresh: whether gradients have come that are in no sum; summed: whether there are sums.
    weights: backwards of the weights so far; reduced: whether all is given up.
    """

    memory: StageMemory
    fresh: bool = False
    summed: bool = False
    weights: int = 0
    reduced: bool = False

    @property
    def whole(self) -> int:
        """Parameters and gradients."""
        memory = self.memory
        each = memory.size + self.fresh * memory.size + self.summed * FLOAT32
        return 0 if self.reduced else memory.numel * each

    def summing(self, index: int) -> int:
        """What `whole` changes to while layer `index` works, and those after it have added their gradients up."""
        if not self.fresh:
            return self.whole
        memory = self.memory
        done = sum(unit.numel for later in range(index + 1, len(memory.layers)) for unit in memory.units_of(later))
        return self.whole - done * memory.size + (0 if self.summed else done * FLOAT32)


class _Rank:
    """Attributes:
    activations: what forwards left. halves: what backwards of inputs left. buffers: what is received into.
    """

    def __init__(self, job: Job, stages: Mapping[int, _Stage]) -> None:
        self.job, self.stages = job, stages
        self.turns = job.dims.pp - 1 in stages  # from this stage to the next without a message
        self.activations = self.halves = self.gradients = 0
        self.buffers = sum(stage.memory.buffers for stage in stages.values())
        self.split = cache(lambda shape: split_layer(job, shape))

    def run(self, order: list[Action]) -> Iterator[Moment]:
        for action in order:
            stage = self.stages[action.stage]
            if action.kind == "forward":
                yield from self._forward(stage)
            elif action.kind == "inputs":
                yield from () if stage.memory.first else self._inputs(stage)
            else:
                yield from self._whole_backward(stage) if stage.memory.first else self._weights(stage)
                stage.weights += 1
                if stage.weights == self.job.micro_batches:
                    yield from self._reduce(stage)
        yield self._moment("optimiser", 0, stage)

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
        if self.turns and self._early(stage):
            self.buffers -= memory.handed  # the output takes the place of what the next stage would receive into
        if memory.last:
            yield self._moment("loss", memory.logits, stage)

    def _early(self, stage: _Stage) -> bool:
        return stage is self.stages[self.job.dims.pp - 1]

    def _inputs(self, stage: _Stage) -> Iterator[Moment]:
        memory, left = stage.memory, 0
        if memory.last:
            scaled = memory.head * (FLOAT32 + memory.cast) + memory.hidden
            yield self._moment("loss, inputs", scaled, stage)
            entering = self.job.outer_tokens * self.job.model.hidden_size
            yield self._moment("last norm, inputs", memory.hidden + norm_work(entering), stage)
            left = memory.hidden + entering * memory.size
        for index in reversed(range(len(memory.layers))):
            layer = self.split(memory.shapes[index])
            for name, added in layer.crests:
                yield self._moment(name, left + added, stage, stage.summing(index))
            left += layer.left + layer.passed
        stage.summed, stage.fresh = stage.summed or stage.fresh, False
        self.halves += self._left(stage) + memory.handed  # the input's gradient stays
        if self.turns and not self._early(stage):
            self.buffers -= memory.handed  # the input's gradient takes the place of what would be received

    def _left(self, stage: _Stage) -> int:
        """What a backward of the inputs leaves for that of the weights."""
        memory = stage.memory
        layers = [self.split(shape) for shape in memory.shapes]
        ends = memory.hidden + self.job.outer_tokens * self.job.model.hidden_size * memory.size if memory.last else 0
        return ends + sum(layer.left + layer.passed for layer in layers) - layers[0].passed

    def _weights(self, stage: _Stage) -> Iterator[Moment]:
        """The crest is its end: the graph goes as a whole, when its last weights are done."""
        memory = stage.memory
        self.halves -= self._left(stage)
        if memory.cast:
            stage.fresh = True
        else:
            stage.summed = True  # a float32 gradient is its own sum
        scaled = memory.head * FLOAT32 + memory.hidden if memory.last else 0
        freed = sum(self.split(shape).inputs for shape in memory.shapes)
        yield self._moment("weights", scaled - freed, stage)
        self.activations -= memory.kept
        if self.turns and self._early(stage):
            self.buffers += memory.handed

    def _whole_backward(self, stage: _Stage) -> Iterator[Moment]:
        memory = stage.memory
        self.activations -= memory.kept
        beside = self._moment("", 0, stage, whole=0)
        for moment in memory.layer_moments(later=stage.summed, reduces=False):
            yield replace(
                moment,
                gradients=self.gradients,
                whole=moment.whole + beside.whole,
                activations=moment.activations + beside.activations,
                transient=moment.transient + beside.transient,
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
