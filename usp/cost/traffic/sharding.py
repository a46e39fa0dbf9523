"""What FSDP2 gathers and reduces: the units of a rank's stages, and how often each is gathered in a step.

A unit is a module whose parameters are gathered together (`parallel.fsdp.apply_fsdp`): a decoder layer, a layer's
experts, and the stage around them with the embedding, the last norm and the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from usp.cost.job import Job, ParameterShape

from .order import Action, actions
from .sent import Sent, all_reduce

FLOAT32 = 4  # bytes: of what is kept and what is reduced


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together over one axis.

    Attributes:
        shapes: of the parameters once gathered: what tensor or expert parallelism gives this rank.
        ranks: over which each is sharded; dims: in which dim.
        axis: of the gather; replicas: the axis over which equal shards are summed, None for none.
        summed_over_tp: elements whose gradient is summed over tp first.
    """

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    dims: tuple[int, ...]
    axis: str
    replicas: str | None
    summed_over_tp: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements when gathered, without padding."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def shard(self) -> int:
        """Elements that this rank keeps and sends to each other in a gather: rows are padded to equal parts."""
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


def stage_units(job: Job, stage: int) -> StageUnits:
    """What `apply_fsdp` makes of a pipeline stage."""
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
    """(ranks of a shard, the axis that gathers, the axis that sums copies)."""
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
    # As parallel.fsdp places them: fewer experts than ranks share their rows, where those go evenly.
    dims = tuple(1 if shape[0] < ranks and shape[1] % ranks == 0 else 0 for shape in shapes)
    return Unit(shapes, ranks, dims, axis, replicas)


def fsdp_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """Gathers of parameters, and the ways of gradients."""
    for stage in job.stages(rank):
        for unit, gathered in _counts(job, rank, stage):
            yield from _unit_traffic(job, unit, gathered)


def fsdp_sent_bytes(job: Job, rank: int) -> int:
    """Bytes that `rank` sends in a step for parameters and their gradients, those summed over tp included."""
    return sum(sent.nbytes for sent in fsdp_traffic(job, rank))


def block_fsdp_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """The part of one decoder layer, the first of the rank."""
    stage = job.stages(rank)[0]
    units = stage_units(job, stage)
    counts = _counts(job, rank, stage)[0 if units.root is None else 1 :]
    for unit, gathered in counts[: 1 if units.experts[0] is None else 2]:
        yield from _unit_traffic(job, unit, gathered)


def _counts(job: Job, rank: int, stage: int) -> list[tuple[Unit, int]]:
    return gathers(job, stage_units(job, stage), [action for action in actions(job, rank) if action.stage == stage])


def _unit_traffic(job: Job, unit: Unit, gathered: int) -> Iterator[Sent]:
    reductions = job.micro_batches if job.zero >= 2 else 1
    if job.dims.tp > 1:
        # Gradients of several backwards are added up in float32 before they are reduced.
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
    """What FSDP2 knows of a unit while it runs."""

    unit: Unit
    whole: bool = False
    coming: bool = False  # a gather that nobody has waited for
    gathers: int = 0
    uses: list[int] = field(default_factory=list)  # places in the order of forwards whose backward is to come

    def gather(self) -> None:
        if not self.whole and not self.coming:
            self.coming, self.gathers = True, self.gathers + 1

    def use(self) -> None:
        self.gather()
        self.whole, self.coming = True, False


class _Fsdp2:
    """torch's FSDPParamGroup over one stage: who is gathered when, prefetching in the backward included.

    A backward prefetches what came before it in the order of forwards. In a pipeline other micro-batches' forwards
    have come in between, so that it may gather in vain.
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
                    group.whole = not self.zero3
                    self._record(group)
        if self.root is not None:
            self._record(self.root)

    def backward(self, last: bool) -> None:
        if self.root is not None:
            self._before_backward(self.root)
        for layer, experts in reversed(self.layers):
            self._before_backward(layer)
            if experts is not None:
                if self.recomputes:
                    experts.use()
                self._before_backward(experts)
                experts.whole = experts.whole and not (last or self.zero3)
            layer.whole = layer.whole and not (last or self.zero3)
        if self.root is not None:
            self.root.whole = self.root.whole and not (last or self.zero3)
        if last:
            self.order.clear()
            for group in self.groups:
                group.coming = False
                group.uses.clear()

    def _record(self, group: _Group) -> None:
        group.uses.append(len(self.order))
        self.order.append(group)

    def _before_backward(self, group: _Group) -> None:
        group.use()
        if group.uses:
            place = group.uses.pop()
            if place > 0:
                self.order[place - 1].gather()


def gathers(job: Job, units: StageUnits, order: list[Action]) -> list[tuple[Unit, int]]:
    """How often each unit of a stage is gathered while `order` runs."""
    fsdp2 = _Fsdp2(job, units)
    if job.splits_backwards:  # torch's pipeline keeps the stage whole by itself
        return [(group.unit, 1) for group in fsdp2.groups]
    for action in order:
        if action.kind == "forward":
            fsdp2.forward()
        else:
            fsdp2.backward(last=action.micro_batch == job.micro_batches - 1)
    return [(group.unit, group.gathers) for group in fsdp2.groups]
