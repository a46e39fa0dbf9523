"""The memory of one pipeline stage: what a forward leaves, what is whole, and the crests of a backward.

Memory is followed from crest to crest, each a sum of what lives then:

    loss            all kept activations, the head whole, a chunk's logits, the head's float32 gradient
    loss backward   the same gradient scaled, and in the compute dtype; the first layer gathered ahead
    a layer         its recomputed activations and their gradients, whole weights and gradients, shards reduced so far
    the root        the embedding's and the head's gradients, and their float32 copy that is reduced

It counts storage of tensors as an allocator hands it out, without the allocator's own gaps, and follows
`parallel.fsdp`, `usp.losses.cross_entropy`, `usp.model.recompute` and torch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from usp.cost.job import Job, LayerShape
from usp.cost.traffic.sharding import FLOAT32, StageUnits, Unit, stage_units

from .activations import LayerActivations, layer_activations, norm_activations


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


class StageMemory:
    """The crests of one pipeline stage's backward.

    Attributes:
        groups: what FSDP2 gathers together. kept, host: what one micro-batch's forward leaves here, and on the host.
    """

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.size = job, job.dtype.itemsize
        self.cast = self.size if self.size < FLOAT32 else 0
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
        # What torch's pipeline receives into, for each micro-batch, which it keeps.
        self.buffers = (2 - self.first - self.last) * job.micro_batches * self.handed

    def standing(self, later: bool) -> int:
        """What is whole while other stages work: parameters, and gradients that are added up."""
        parameters = 0 if self.job.zero == 3 else self.numel * self.size
        return parameters + (self.numel * FLOAT32 if self.adds_up and later else 0)

    @property
    def logits(self) -> int:
        """Of a chunk, with what its product or its gradient takes, and the gradient of hidden states."""
        chunk = min(self.job.loss_chunk, self.job.tokens) * self.head // self.job.model.hidden_size
        product = self.head * self.size if self.cast else 0
        return self.hidden + max(chunk * (FLOAT32 + self.cast), chunk * self.size + product)

    def moments(self, later: bool) -> Iterator[Moment]:
        """Crests of a micro-batch, beside the state and what other micro-batches left.

        later: whether another micro-batch's backward has run before.
        """
        reduces = later or not self.adds_up
        yield from self._loss(later) if self.last else ()
        yield from self.layer_moments(later, reduces)
        yield from self._root() if reduces else ()

    def _loss(self, later: bool) -> Iterator[Moment]:
        summed = self.numel * FLOAT32 if self.adds_up and later else 0
        whole = self._whole(len(self.layers)) + self._ahead(len(self.layers) - 1) + self._left_over(later) + summed
        kept = self.before[-1] + self.own + self.ends
        yield Moment("loss", whole=whole, activations=kept, transient=self.logits)
        scaled = self.head * FLOAT32 + self.hidden
        yield Moment("loss backward", whole=whole + self.head * self.cast, activations=kept, transient=scaled)
        entering = self.job.outer_tokens * self.job.model.hidden_size
        kept += norm_activations(self.job, self.job.outer_tokens, self.job.model.hidden_size) - self.ends
        yield Moment(
            "last norm backward",
            whole=whole + self.head * self.size,
            activations=kept,
            transient=entering * (self.size + 4 * FLOAT32),
        )

    def layer_moments(self, later: bool, reduces: bool) -> Iterator[Moment]:
        """Those of the layers. reduces: whether gradients are reduced, and not added up for a later micro-batch."""
        root_gradient = self.head * self.size if self.last else 0
        gradients = 0
        reducing = self._left_over(later)
        if self.adds_up and later:
            reducing += self.numel * FLOAT32
        for index in reversed(range(len(self.layers))):
            layer, shape = self.layers[index], self.shapes[index]
            units = self.units_of(index)
            numel = sum(unit.numel for unit in units)
            held = index + 1 if reduces else len(self.layers)
            whole = self._whole(held, current=index) + self._ahead(index - 1) + root_gradient
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
            if not reduces:
                reducing += 0 if later else numel * FLOAT32
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

    def units_of(self, index: int) -> list[Unit]:
        """What FSDP2 gathers of one layer."""
        experts = self.units.experts[index]
        return [self.units.layers[index], *([] if experts is None else [experts])]

    def _whole(self, layers: int, current: int | None = None) -> int:
        """Gathered parameters: the root's, and those of the first `layers` layers, in stage 3 of `current` alone."""
        kept = range(layers) if self.job.zero < 3 else () if current is None else (current,)
        numel = sum(unit.numel for index in kept for unit in self.units_of(index))
        root = 0 if self.units.root is None else self.units.root.numel
        return (numel + root) * self.size

    def _ahead(self, index: int) -> int:
        """The buffer of the layer that is gathered ahead."""
        if self.job.zero < 3 or index < 0:
            return 0
        unit = (self.units_of(index))[-1]
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
