"""The traffic of FSDP2: the units of a rank's stages, and how often each is gathered in a step.

A unit is a module whose parameters are gathered together (`parallel.fsdp.apply_fsdp`): a decoder layer, a layer's
experts, and the root, which is the stage around them with the embedding, the last norm and the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from usp.cost.job import Job, ParameterShape

from .order import actions
from .sent import Sent, all_reduce

FLOAT32 = 4  # bytes: the dtype of sharded parameters and of gradient reductions


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together over one axis.

    Attributes:
        shapes: of the gathered parameters, after tensor or expert parallelism.
        ranks: number of shards; dims: the sharded dim of each parameter.
        axis: of the gather; replicas: the axis over which the gradients of equal shards are summed, or None.
        summed_over_tp: elements of each gradient that is summed over tp first.
    """

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    dims: tuple[int, ...]
    axis: str
    replicas: str | None
    summed_over_tp: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """The number of gathered elements, without padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def shard(self) -> int:
        """The number of elements that a rank stores and sends to each other rank in a gather, with padding."""
        return sum(
            -(-shape[dim] // self.ranks) * (math.prod(shape) // shape[dim])
            for shape, dim in zip(self.shapes, self.dims, strict=True)
        )


@dataclass(frozen=True)
class StageUnits:
    """The units of one pipeline stage; `experts` has None for a dense layer."""

    root: Unit | None
    layers: tuple[Unit, ...]
    experts: tuple[Unit | None, ...]

    @property
    def all(self) -> list[Unit]:
        return [unit for unit in (self.root, *self.layers, *self.experts) if unit is not None]


def stage_units(job: Job, stage: int) -> StageUnits:
    """Return the units that `apply_fsdp` makes of a pipeline stage."""
    model, cuts = job.model, job.stage_layers
    first, last = stage == 0, stage == len(cuts) - 1
    root = (model.embedding if first else ()) + (model.norm + model.head if last else ())
    layers = [model.layers[index] for index in cuts[stage]]
    return StageUnits(
        root=_unit(job, root) if root else None,
        layers=tuple(_unit(job, layer.parameters) for layer in layers),
        experts=tuple(_experts(job, layer.experts) if layer.experts else None for layer in layers),
    )


def _axes(job: Job, axis: str) -> tuple[int, str, str | None]:
    """Return (number of shards, axis of the gather, axis over which replicas are summed)."""
    if job.zero == 0:
        return 1, axis, "loss"
    return job.degree(axis), axis, "dp_replicate" if job.dims.dp_replicate > 1 else None


def _unit(job: Job, parameters: tuple[ParameterShape, ...]) -> Unit:
    ranks, axis, replicas = _axes(job, "fsdp")
    partial = [p for p in parameters if job.dims.tp > 1 and p.partial_gradient(job.tp_sequence_parallel)]
    return Unit(
        shapes=tuple(p.local(job.dims.tp) for p in parameters),
        ranks=ranks,
        dims=(0,) * len(parameters),
        axis=axis,
        replicas=replicas,
        summed_over_tp=tuple(p.numel for p in partial),
    )


def _experts(job: Job, parameters: tuple[ParameterShape, ...]) -> Unit:
    ranks, axis, replicas = _axes(job, "efsdp")
    shapes = tuple((p.shape[0] // job.dims.ep, *p.shape[1:]) for p in parameters)
    # As in parallel.fsdp: if there are fewer experts than ranks, their rows are sharded where they divide evenly.
    dims = tuple(1 if shape[0] < ranks and shape[1] % ranks == 0 else 0 for shape in shapes)
    return Unit(shapes, ranks, dims, axis, replicas)


def fsdp_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """Yield the gathers of parameters and the reductions of gradients in a step of `rank`."""
    for stage in job.stages(rank):
        for unit, gathered in _gathers(job, rank, stage):
            yield from _unit_traffic(job, unit, gathered)


def fsdp_sent_bytes(job: Job, rank: int) -> int:
    """Return the bytes that `rank` sends in a step for parameters and gradients, including gradients summed over tp."""
    return sum(sent.nbytes for sent in fsdp_traffic(job, rank))


def block_fsdp_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """Yield the part of `fsdp_traffic` for the first decoder layer of `rank`."""
    stage = job.stages(rank)[0]
    units = stage_units(job, stage)
    first = 0 if units.root is None else 1
    for unit, gathered in _gathers(job, rank, stage)[first : first + (1 if units.experts[0] is None else 2)]:
        yield from _unit_traffic(job, unit, gathered)


def _unit_traffic(job: Job, unit: Unit, gathered: int) -> Iterator[Sent]:
    reductions = job.micro_batches if job.zero >= 2 else 1
    if job.dims.tp > 1:
        # Gradients of several backwards are accumulated in float32 before they are reduced.
        accumulated = job.zero < 2 and (job.micro_batches > 1 or job.pp_schedule == "zero-bubble")
        itemsize = FLOAT32 if accumulated else job.dtype.itemsize
        for numel in unit.summed_over_tp:
            yield all_reduce("tp", numel * itemsize, job.dims.tp, functional=True).times(reductions)
    if unit.ranks > 1:
        others = unit.ranks - 1
        yield Sent(unit.axis, "_allgather_base_", unit.shard * others * job.dtype.itemsize).times(gathered)
        yield Sent(unit.axis, "_reduce_scatter_base_", unit.shard * others * FLOAT32).times(reductions)
    if unit.replicas is not None and job.degree(unit.replicas) > 1:
        yield all_reduce(unit.replicas, unit.shard * FLOAT32, job.degree(unit.replicas))


@dataclass(eq=False)
class _Group:
    """The state of a unit in FSDP2."""

    unit: Unit
    gathered: bool = False
    prefetched: bool = False  # a gather has started that no computation has waited for
    gathers: int = 0
    uses: list[int] = field(default_factory=list)  # positions in the forward order whose backward is still to come

    def gather(self) -> None:
        if not self.gathered and not self.prefetched:
            self.prefetched, self.gathers = True, self.gathers + 1

    def use(self) -> None:
        self.gather()
        self.gathered, self.prefetched = True, False


class _Fsdp2:
    """torch's FSDPParamGroup over one stage: when each unit is gathered, including prefetching in the backward.

    A backward prefetches the unit before it in the forward order. In a pipeline the forwards of other micro-batches
    come in between, so some prefetches are redundant.
    """

    def __init__(self, job: Job, units: StageUnits) -> None:
        self.zero3, self.recomputes = job.zero == 3, job.ac != "none"
        self.root = None if units.root is None else _Group(units.root)
        self.layers = [
            (_Group(layer), None if experts is None else _Group(experts))
            for layer, experts in zip(units.layers, units.experts, strict=True)
        ]
        self.order: list[_Group] = []

    @property
    def groups(self) -> list[_Group]:
        inside = [group for pair in self.layers for group in pair if group is not None]
        return inside if self.root is None else [self.root, *inside]

    def forward(self) -> None:
        if self.root is not None:
            self.root.use()
        for layer, experts in self.layers:
            layer.use()
            for group in (experts, layer):
                if group is not None:
                    group.use()
                    group.gathered = not self.zero3
                    self._record(group)
        if self.root is not None:
            self._record(self.root)

    def backward(self, last: bool) -> None:
        keeps = not (last or self.zero3)
        if self.root is not None:
            self._before_backward(self.root)
        for layer, experts in reversed(self.layers):
            self._before_backward(layer)
            if experts is not None:
                if self.recomputes:
                    experts.use()
                self._before_backward(experts)
                experts.gathered = keeps
            layer.gathered = keeps
        if self.root is not None:
            self.root.gathered = keeps
        if last:
            self.order.clear()
            for group in self.groups:
                group.prefetched = False
                group.uses.clear()

    def _record(self, group: _Group) -> None:
        group.uses.append(len(self.order))
        self.order.append(group)

    def _before_backward(self, group: _Group) -> None:
        group.use()
        if group.uses:
            position = group.uses.pop()
            if position > 0:
                self.order[position - 1].gather()


def _gathers(job: Job, rank: int, stage: int) -> list[tuple[Unit, int]]:
    """Return how often each unit of a stage of `rank` is gathered in a step."""
    fsdp2 = _Fsdp2(job, stage_units(job, stage))
    if job.splits_backwards:  # torch's zero-bubble schedule keeps the stage gathered
        return [(group.unit, 1) for group in fsdp2.groups]
    for action in actions(job, rank):
        if action.stage != stage:
            continue
        if action.kind == "forward":
            fsdp2.forward()
        else:
            fsdp2.backward(last=action.micro_batch == job.micro_batches - 1)
    return [(group.unit, group.gathers) for group in fsdp2.groups]
