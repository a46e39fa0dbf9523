"""The memory of one pipeline stage: saved activations, unsharded parameters and gradients, and the peaks of a backward.

Each peak is the sum of what is alive at that moment:

    loss            all saved activations, the unsharded head, a chunk's logits, the head's float32 gradient
    loss backward   the same gradient scaled, and in the compute dtype; the prefetched last layer
    a layer         its recomputed activations and their gradients, unsharded weights and gradients, reduced shards
    the root        the gradients of embedding and head, and their float32 copy that is reduced

Only tensor storage counts, without allocator fragmentation. The formulas follow `parallel.fsdp`,
`usp.losses.cross_entropy`, `usp.model.recompute` and torch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from usp.cost.job import Job
from usp.cost.traffic.sharding import FLOAT32, stage_units

from .activations import layer_activations, norm_activations


class Moment(NamedTuple):
    """Bytes alive at one peak of a step.

    Attributes:
        gradients: reduced shards; whole: unsharded parameters and gradients, and their communication buffers;
            activations: saved for backwards; transient: the rest.
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

    def plus(self, **added: int) -> Moment:
        """Return this moment with more bytes of some categories."""
        return self._replace(**{name: getattr(self, name) + nbytes for name, nbytes in added.items()})


class StageMemory:
    """The memory of one pipeline stage.

    Attributes:
        groups: the units of FSDP2.
        kept, host: bytes that one micro-batch's forward saves on the device, and in host memory.
    """

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.size = job, job.dtype.itemsize
        self.cast = self.size if self.size < FLOAT32 else 0
        self.units = stage_units(job, stage)
        self.groups = self.units.all
        self.first, self.last = stage == 0, stage == len(job.stage_layers) - 1
        self.kinds = [job.model.alike[index] for index in job.stage_layers[stage]]
        self.shapes = [job.model.layers[kind] for kind in self.kinds]
        by_kind = {kind: layer_activations(job, job.model.layers[kind]) for kind in set(self.kinds)}
        self.layers = [by_kind[kind] for kind in self.kinds]
        facts, hidden = job.model.facts, job.model.hidden_size
        self.hidden = job.tokens * hidden * self.size
        self.handed = 0 if job.dims.pp == 1 else job.outer_tokens * hidden * self.size
        tables = 2 * job.tokens * facts.head_dim * self.size  # rotary cosines and sines
        self.head = facts.vocab_size // job.dims.tp * hidden
        self.norm = norm_activations(job, job.outer_tokens, hidden)
        self.ends = self.norm + self.hidden + self.head * FLOAT32 if self.last else 0
        layers, away = [layer.kept for layer in self.layers], job.config.ac_offload
        # Of a layer and those before it; offloaded, only the layer's and the previous one's are on the device.
        self.before = [a + b for a, b in zip(layers, [0, *layers], strict=False)] if away else list(accumulate(layers))
        self.own = tables + self.handed
        self.kept = (0 if away else sum(layers)) + self.own + self.ends
        self.host = sum(layers) if away else 0
        self.accumulates = (
            job.config.zero < 2 and job.config.micro_batches > 1
        )  # unsharded gradients, until the last backward
        self.numel = self.units.numel
        # torch's pipeline keeps its receive buffers, one per micro-batch.
        self.buffers = (2 - self.first - self.last) * job.config.micro_batches * self.handed

    def inside(self, index: int) -> bool:
        """Return whether a layer is inside a run of equal ones: its peaks lie between those of the run's ends, because
        all that stays grows or shrinks by the same amount from layer to layer."""
        around = self.kinds[max(0, index - 2) : index + 3]
        return len(around) == 5 and len(set(around)) == 1

    def accumulated(self, later: bool) -> int:
        """Return the bytes of the accumulated unsharded gradients once an earlier backward has run."""
        return self.numel * FLOAT32 if self.accumulates and later else 0

    def idle(self, later: bool) -> int:
        """Return the bytes of unsharded parameters and accumulated gradients while other stages run."""
        return (0 if self.job.config.zero == 3 else self.numel * self.size) + self.accumulated(later)

    @property
    def logits(self) -> int:
        """Return the bytes of a chunk's logits, of their product or gradient, and of the hidden states' gradient."""
        chunk = min(self.job.config.loss_chunk, self.job.tokens) * self.head // self.job.model.hidden_size
        product = self.head * self.size if self.cast else 0
        return self.hidden + max(chunk * (FLOAT32 + self.cast), chunk * self.size + product)

    def moments(self, later: bool) -> Iterator[Moment]:
        """Yield the peaks of one micro-batch, without optimizer states and other micro-batches' activations.

        later: whether another micro-batch's backward has run before.
        """
        reduces = later or not self.accumulates
        yield from self._loss(later) if self.last else ()
        yield from self.layer_moments(later, reduces)
        yield from self._root() if reduces else ()

    def _loss(self, later: bool) -> Iterator[Moment]:
        whole = self._whole(len(self.layers)) + self._prefetched(len(self.layers) - 1)
        whole += self._last_reduction(later) + self.accumulated(later)
        kept = self.before[-1] + self.own
        saved = kept + self.ends
        yield Moment("loss", whole=whole, activations=saved, transient=self.logits)
        scaled = self.head * FLOAT32 + self.hidden
        yield Moment("loss backward", whole=whole + self.head * self.cast, activations=saved, transient=scaled)
        transient = self.job.outer_tokens * self.job.model.hidden_size * (self.size + 4 * FLOAT32)
        whole += self.head * self.size
        yield Moment("last norm backward", whole=whole, activations=kept + self.norm, transient=transient)

    def layer_moments(self, later: bool, reduces: bool) -> Iterator[Moment]:
        """Yield the peaks of the layers, except for those `inside` a run of equal ones.

        reduces: whether gradients are reduced rather than accumulated.
        """
        root_gradient = self.head * self.size if self.last else 0
        gradients = 0
        reducing = self._last_reduction(later) + self.accumulated(later)
        for index in reversed(range(len(self.layers))):
            layer, parts = self.layers[index], (*self.shapes[index].parameters, *self.shapes[index].experts)
            units = self.units.layers[index]
            numel = sum(unit.numel for unit in units)
            if self.inside(index):
                if reduces:
                    gradients += sum(unit.shard for unit in units) * FLOAT32
                else:
                    reducing += 0 if later else numel * FLOAT32
                continue
            held = index + 1 if reduces else len(self.layers)
            whole = self._whole(held, current=index) + self._prefetched(index - 1) + root_gradient
            kept = self.before[index] + self.own
            mlp = numel * sum(p.numel for p in parts if p.name.startswith("mlp")) // sum(p.numel for p in parts)
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
            reducing += self.accumulated(later=True)
            after = self._whole(index) + self._prefetched(index - 1) + root_gradient
            gradients += sum(unit.shard for unit in units) * FLOAT32
            yield Moment(
                "layer reduced", gradients=gradients, whole=after + reducing + numel * self.size,
                activations=kept - layer.kept, transient=self.hidden,
            )  # fmt: skip

    def _root(self) -> Iterator[Moment]:
        each = FLOAT32 if self.accumulates else self.size
        shards = sum(unit.shard for units in self.units.layers for unit in units) * FLOAT32
        for root in self.units.root:
            copies = root.numel * each + root.shard * root.ranks * FLOAT32
            yield Moment("root reduced", gradients=shards, whole=copies)

    def _whole(self, layers: int, current: int | None = None) -> int:
        """Return the bytes of the gathered parameters: root and first `layers` layers, under ZeRO-3 only `current`."""
        kept = range(layers) if self.job.config.zero < 3 else () if current is None else (current,)
        units = [*self.units.root, *(unit for index in kept for unit in self.units.layers[index])]
        return sum(unit.numel for unit in units) * self.size

    def _prefetched(self, index: int) -> int:
        """Return the bytes of the gather buffer of a prefetched layer."""
        if self.job.config.zero < 3 or index < 0:
            return 0
        unit = self.units.layers[index][-1]
        return unit.shard * unit.ranks * self.size if unit.ranks > 1 else 0

    def _last_reduction(self, later: bool) -> int:
        """Return the bytes of the previous micro-batch's last reduction buffer, which the next reduction frees."""
        if self.job.config.zero < 2 or not later:
            return 0
        return sum(root.shard * root.ranks for root in self.units.root) * FLOAT32
