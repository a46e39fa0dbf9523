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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from .activations import LayerActivations, layer_activations, norm_activations
from .job import Job, LayerShape
from .order import actions
from .sharding import FLOAT32, StageUnits, Unit, stage_units

AXES = ("fsdp", "efsdp")


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
        return self.parameters + self.optimizer + self.gradients + self.whole + self.activations + self.transient


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
    moments = []
    for (number, later), beside in others.items():
        elsewhere = sum(stage.standing(later) for other, stage in stages.items() if other != number)
        for moment in stages[number].moments(later):
            moments.append(
                replace(
                    moment,
                    parameters=state.parameters,
                    optimizer=state.optimizer,
                    gradients=state.parameters if later and job.zero >= 2 else moment.gradients,
                    whole=moment.whole + elsewhere,
                    activations=moment.activations + beside,
                )
            )
    # AdamW's foreach takes the parameters of one mesh at a time.
    temporary = max(by_axis) * FLOAT32
    moments.append(replace(state, name="optimiser", gradients=state.parameters, transient=temporary))
    return Footprint(
        parameters=state.parameters,
        gradients=state.parameters,
        optimizer=state.optimizer,
        activations=most,
        host=away,
        moments=tuple(moments),
    )


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


class StageMemory:
    """The crests of one pipeline stage's backward.

    Attributes:
        groups: what FSDP2 gathers together. kept, host: what one micro-batch's forward leaves here, and on the host.
    """

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.size = job, job.dtype.itemsize
        self.units: StageUnits = stage_units(job, stage)
        self.groups = [unit for unit in (self.units.root, *self.units.layers, *self.units.experts) if unit is not None]
        self.first, self.last = stage == 0, stage == len(job.stage_layers) - 1
        self.shapes = [job.model.layers[index] for index in job.stage_layers[stage]]
        per_shape = cache(lambda shape: layer_activations(job, shape))
        self.layers: list[LayerActivations] = [per_shape(shape) for shape in self.shapes]
        facts, hidden = job.model.facts, job.model.hidden_size
        self.hidden = job.tokens * hidden * self.size
        self.handed = 0 if job.dims.pp == 1 else job.outer_tokens * hidden * self.size
        tables = 2 * job.tokens * facts.head_dim * self.size  # rotary cosines and sines
        self.head = facts.vocab_size // job.dims.tp * hidden
        ends = norm_activations(job, job.outer_tokens, hidden) + self.hidden + self.head * FLOAT32 if self.last else 0
        layers = [0 if job.ac_offload else layer.kept for layer in self.layers]
        self.before = [sum(layers[: index + 1]) for index in range(len(layers))]
        self.own = tables + self.handed
        self.kept = sum(layers) + self.own + ends
        self.host = sum(layer.kept for layer in self.layers) if job.ac_offload else 0
        self.ends = ends
        self.adds_up = job.zero < 2 and job.micro_batches > 1  # gradients, whole, before the last reduces them
        self.numel = sum(unit.numel for unit in self.groups)

    def standing(self, later: bool) -> int:
        """What is whole while other stages work: parameters, and gradients that are added up."""
        parameters = 0 if self.job.zero == 3 else self.numel * self.size
        return parameters + (self.numel * FLOAT32 if self.adds_up and later else 0)

    def moments(self, later: bool) -> Iterator[Moment]:
        """Crests of a micro-batch, beside the state and what other micro-batches left.

        later: whether another micro-batch's backward has run before.
        """
        buffers = 0 if self.job.dims.pp == 1 else (2 - self.first - self.last) * self.job.micro_batches * self.handed
        found = [*(self._loss(later) if self.last else ()), *self._layer_moments(later)]
        if later or not self.adds_up:
            found += self._root()
        return (replace(moment, transient=moment.transient + buffers) for moment in found)

    def _loss(self, later: bool) -> Iterator[Moment]:
        summed = self.numel * FLOAT32 if self.adds_up and later else 0
        whole = self._whole(len(self.layers)) + self._ahead(len(self.layers) - 1) + self._left_over(later) + summed
        chunk = min(self.job.loss_chunk, self.job.tokens) * self.head // self.job.model.hidden_size
        cast = self.size if self.size < FLOAT32 else 0
        kept = self.before[-1] + self.own + self.ends
        product = self.head * self.size if self.size < FLOAT32 else 0
        transient = self.hidden + max(chunk * (FLOAT32 + cast), chunk * self.size + product)
        yield Moment("loss", whole=whole, activations=kept, transient=transient)
        scaled = self.head * FLOAT32 + self.hidden
        yield Moment("loss backward", whole=whole + self.head * cast, activations=kept, transient=scaled)
        entering = self.job.outer_tokens * self.job.model.hidden_size
        kept += norm_activations(self.job, self.job.outer_tokens, self.job.model.hidden_size) - self.ends
        yield Moment(
            "last norm backward",
            whole=whole + self.head * self.size,
            activations=kept,
            transient=entering * (self.size + 4 * FLOAT32),
        )

    def _layer_moments(self, later: bool) -> Iterator[Moment]:
        root_gradient = self.head * self.size if self.last else 0
        gradients = 0
        reducing = self._left_over(later)
        if self.adds_up and later:
            reducing += self.numel * FLOAT32
        for index in reversed(range(len(self.layers))):
            layer, shape = self.layers[index], self.shapes[index]
            units = self._units(index)
            numel = sum(unit.numel for unit in units)
            whole = self._whole(index + 1, current=index) + self._ahead(index - 1) + root_gradient
            kept = self.before[index] + self.own
            mlp = numel * _mlp_share(shape) // sum(p.numel for p in (*shape.parameters, *shape.experts))
            for name, added, weights in (
                ("MLP backward", layer.mlp, mlp // 3),
                ("norm backward", layer.norm, mlp),
                ("attention backward", layer.attention, mlp),
            ):
                yield Moment(
                    name, gradients=gradients, whole=whole + reducing + weights * self.size, activations=kept,
                    transient=added,
                )  # fmt: skip
            if self.adds_up and not later:
                reducing += numel * FLOAT32
                continue
            reducing = sum(unit.shard * unit.ranks for unit in units) * FLOAT32
            reducing += self.numel * FLOAT32 if self.adds_up else 0
            after = self._whole(index, current=None) + self._ahead(index - 1) + root_gradient
            gradients += sum(unit.shard for unit in units) * FLOAT32
            yield Moment(
                "layer reduced", gradients=gradients, whole=after + reducing + numel * self.size,
                activations=kept - (0 if self.job.ac_offload else layer.kept), transient=self.hidden,
            )  # fmt: skip

    def _root(self) -> Iterator[Moment]:
        if self.units.root is None:
            return
        root = self.units.root
        each = FLOAT32 if self.adds_up else self.size
        copies = root.numel * each + root.shard * root.ranks * FLOAT32
        shards = sum(unit.shard for unit in self.groups if unit is not root) * FLOAT32
        yield Moment("root reduced", gradients=shards, whole=copies)

    def _units(self, index: int) -> list[Unit]:
        experts = self.units.experts[index]
        return [self.units.layers[index], *([] if experts is None else [experts])]

    def _whole(self, layers: int, current: int | None = None) -> int:
        """Gathered parameters: the root's, and those of the first `layers` layers, in stage 3 of `current` alone."""
        kept = range(layers) if self.job.zero < 3 else () if current is None else (current,)
        numel = sum(unit.numel for index in kept for unit in self._units(index))
        root = 0 if self.units.root is None else self.units.root.numel
        return (numel + root) * self.size

    def _ahead(self, index: int) -> int:
        """The buffer of the layer that is gathered ahead."""
        if self.job.zero < 3 or index < 0:
            return 0
        unit = (self._units(index))[-1]
        return unit.shard * unit.ranks * self.size if unit.ranks > 1 else 0

    def _left_over(self, later: bool) -> int:
        """The buffer of the last reduction, which stays until the next: that of the micro-batch before."""
        root = self.units.root
        if root is None or self.job.zero < 2 or not later:
            return 0
        return root.shard * root.ranks * FLOAT32


def _mlp_share(shape: LayerShape) -> int:
    """Elements of a layer's MLP, or of its router and experts."""
    return sum(p.numel for p in (*shape.parameters, *shape.experts) if p.name.startswith("mlp"))
