"""The traffic of FSDP2: the units of a rank's stages, and how often each is gathered in a step.

A unit is a module whose parameters are gathered together (`parallel.fsdp.apply_fsdp`): a decoder layer, a layer's
experts, and the root, which is the stage around them with the embedding, the last norm and the head.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from usp.cost.job import Job, ModelShape, ParameterShape, Pass

from .order import Schedule, actions
from .sent import Sent, all_reduce

FLOAT32 = 4  # bytes: the dtype of sharded parameters and of gradient reductions


class Unit(NamedTuple):
    """Parameters that are gathered together over one axis, after tensor or expert parallelism.

    Attributes:
        ranks: number of shards.
        numel: gathered elements, without padding.
        shard: elements that a rank stores and sends to each other rank in a gather, with padding.
        summed_over_tp: elements of each gradient that is summed over tp first.
    """

    axis: str
    ranks: int
    numel: int
    shard: int
    summed_over_tp: tuple[int, ...]


@dataclass(frozen=True)
class StageUnits:
    """The units of one pipeline stage: of the root, if it has parameters, and of each layer and its experts, if any."""

    root: tuple[Unit, ...]
    layers: tuple[tuple[Unit, ...], ...]

    @cached_property
    def all(self) -> tuple[Unit, ...]:
        return (
            *self.root,
            *(units[0] for units in self.layers),
            *(unit for _, *experts in self.layers for unit in experts),
        )

    @cached_property
    def numel(self) -> int:
        """Gathered elements of all units."""
        return sum(unit.numel for unit in self.all)

    @cached_property
    def shard(self) -> int:
        """Elements of all units that a rank stores."""
        return sum(unit.shard for unit in self.all)


class _Sharding(NamedTuple):
    """The ranks over which parameters (fsdp, tp) and experts (efsdp, ep) are sharded."""

    fsdp: int
    efsdp: int
    ep: int
    tp: int
    tp_sequence_parallel: bool


def stage_units(job: Job, stage: int) -> StageUnits:
    """Return the units that `apply_fsdp` makes of a pipeline stage."""
    over = _Sharding(
        fsdp=job.degree("fsdp") if job.config.zero else 1,
        efsdp=job.degree("efsdp") if job.config.zero else 1,
        ep=job.dims.ep,
        tp=job.dims.tp,
        tp_sequence_parallel=job.config.tp_sequence_parallel,
    )
    return _stage_units(over, job.model, job.stage_layers[stage], stage == 0, stage == len(job.stage_layers) - 1)


@lru_cache(maxsize=4096)
def _stage_units(over: _Sharding, model: ModelShape, layers: range, first: bool, last: bool) -> StageUnits:
    """Return the units of a stage, the same object for all jobs that have the same."""
    kinds = {model.alike[index] for index in layers}
    made = {kind: _units(over, model.layers[kind].parameters, model.layers[kind].experts) for kind in kinds}
    root = _units(over, model.around_layers(first, last))
    return StageUnits(root, tuple(made[model.alike[index]] for index in layers))


@lru_cache(maxsize=4096)
def _units(
    over: _Sharding, parameters: tuple[ParameterShape, ...], experts: tuple[ParameterShape, ...] = ()
) -> tuple[Unit, ...]:
    """Return the unit of `parameters` and that of `experts`, if there are any."""
    shapes = [p.local(over.tp) for p in parameters]
    summed = tuple(p.numel for p in parameters if over.tp > 1 and p.partial_gradient(over.tp_sequence_parallel))
    units = [_unit("fsdp", over.fsdp, shapes, summed)] if parameters else []
    if experts:
        units.append(_unit("efsdp", over.efsdp, [(p.shape[0] // over.ep, *p.shape[1:]) for p in experts]))
    return tuple(units)


def _unit(axis: str, ranks: int, shapes: list[tuple[int, ...]], summed_over_tp: tuple[int, ...] = ()) -> Unit:
    shard = 0
    for shape in shapes:
        # As in parallel.fsdp: if there are fewer experts than ranks, their rows are sharded where they divide evenly.
        dim = 1 if axis == "efsdp" and shape[0] < ranks and shape[1] % ranks == 0 else 0
        shard += -(-shape[dim] // ranks) * (math.prod(shape) // shape[dim])
    return Unit(axis, ranks, sum(map(math.prod, shapes)), shard, summed_over_tp)


def fsdp_traffic(job: Job, rank: int) -> Iterator[tuple[Pass, Sent]]:
    """Yield, by pass, the gathers of parameters and the reductions of gradients in a step of `rank`."""
    for stage in job.stages(rank):
        for (unit, gathers), number in Counter(_gathers(job, rank, stage)).items():
            yield from ((kind, sent.times(number)) for kind, sent in _unit_traffic(job, unit, gathers))


def fsdp_sent_bytes(job: Job, rank: int) -> int:
    """Return the bytes that `rank` sends in a step for parameters and gradients, including gradients summed over tp."""
    return sum(sent.nbytes for _, sent in fsdp_traffic(job, rank))


def block_fsdp_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """Yield the part of `fsdp_traffic` for the first decoder layer of `rank`."""
    stage = job.stages(rank)[0]
    units = stage_units(job, stage)
    first = len(units.root)
    for unit, gathers in _gathers(job, rank, stage)[first : first + len(units.layers[0])]:
        yield from (sent for _, sent in _unit_traffic(job, unit, gathers))


def tied_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """Yield the sum of the tied embedding's gradient over the first and the last stage, if they are on two ranks."""
    ends = {0, len(job.stage_layers) - 1}
    if not job.model.facts.tied or job.dims.pp == 1 or len(ends & {*job.stages(rank)}) != 1:
        return
    (rows, columns), (axis, ranks) = job.model.embedding[0].local(job.dims.tp), ("fsdp", job.degree("fsdp"))
    each, place = (rows, 0) if job.config.zero == 0 else (-(-rows // ranks), job.place(axis, rank))
    if own := max(0, min(each, rows - place * each)):
        yield all_reduce("ends", own * columns * FLOAT32, 2)


class Gathers(NamedTuple):
    """How often a unit is gathered in the passes of a step."""

    counting: int = 0
    forward: int = 0
    backward: int = 0


def _unit_traffic(job: Job, unit: Unit, gathers: Gathers) -> Iterator[tuple[Pass, Sent]]:
    if unit.ranks > 1:
        gathered = Sent(unit.axis, "_allgather_base_", unit.shard * (unit.ranks - 1) * job.dtype.itemsize)
        passes: tuple[Pass, ...] = ("count", "forward", "backward")
        yield from ((kind, gathered.times(times)) for kind, times in zip(passes, gathers, strict=True) if times)
    if job.trained:
        yield from (("backward", sent) for sent in _reductions(job, unit))


def _reductions(job: Job, unit: Unit) -> Iterator[Sent]:
    zero, several = job.config.zero, job.config.micro_batches > 1 or job.config.pp_schedule == "zero-bubble"
    reductions = job.config.micro_batches if zero >= 2 else 1
    # Gradients of several backwards are accumulated in float32 before they are reduced.
    itemsize = FLOAT32 if zero < 2 and several else job.dtype.itemsize
    for numel in unit.summed_over_tp:
        yield all_reduce("tp", numel * itemsize, job.dims.tp, functional=True).times(reductions)
    if unit.ranks > 1:
        yield Sent(unit.axis, "_reduce_scatter_base_", unit.shard * (unit.ranks - 1) * FLOAT32).times(reductions)
    replicas = "loss" if zero == 0 else "dp_replicate"
    yield all_reduce(replicas, unit.shard * FLOAT32, job.degree(replicas))


@dataclass(eq=False)
class _Group:
    """The state of a unit in FSDP2."""

    gathered: bool = False  # or prefetched
    gathers: Counter[str] = field(default_factory=Counter)
    uses: list[int] = field(default_factory=list)  # positions in the forward order whose backward is still to come

    def gather(self, kind: str) -> None:
        self.gathers[kind] += not self.gathered
        self.gathered = True


class _Fsdp2:
    """torch's FSDPParamGroup over one stage: when each unit is gathered, including prefetching in the backward.

    A backward prefetches the unit before it in the forward order. In a pipeline the forwards of other micro-batches
    come in between, so some prefetches are redundant.
    """

    def __init__(self, zero3: bool, root: int, layers: tuple[int, ...]) -> None:
        self.zero3 = zero3
        self.root = [_Group() for _ in range(root)]
        self.layers = [[_Group() for _ in range(units)] for units in layers]
        self.groups = [*self.root, *chain(*self.layers)]
        self.order: list[_Group] = []

    def forward(self, kind: str = "forward") -> None:
        for group in (*chain(*map(reversed, self.layers)), *self.root):
            group.gather(kind)
            group.gathered = not self.zero3 or group in self.root
            group.uses.append(len(self.order))
            self.order.append(group)

    def reset(self) -> None:
        """Free everything and forget the forwards, after those that only count the routers' choices."""
        for group in self.groups:
            group.gathered = False
            group.uses.clear()
        self.order.clear()

    def backward(self, last: bool) -> None:
        keeps = not (last or self.zero3)
        for group in self.root:
            self._before_backward(group)
        for layer in reversed(self.layers):
            for group in layer:
                self._before_backward(group)
            for group in layer:
                group.gathered = keeps
        for group in self.root:
            group.gathered = keeps

    def _before_backward(self, group: _Group) -> None:
        group.gather("backward")
        if group.uses and (position := group.uses.pop()) > 0:
            self.order[position - 1].gather("backward")


def _gathers(job: Job, rank: int, stage: int) -> list[tuple[Unit, Gathers]]:
    """Return how often each unit of a stage of `rank` is gathered in a step."""
    units = stage_units(job, stage)
    return list(zip([*units.root, *chain(*units.layers)], gather_counts(job, rank, stage), strict=True))


def gather_counts(job: Job, rank: int, stage: int) -> tuple[Gathers, ...]:
    """Return how often each unit of a stage of `rank` is gathered in a step: of the root, then of each layer."""
    model, layers = job.model, job.stage_layers[stage]
    root = 1 if model.around_layers(stage == 0, stage == len(job.stage_layers) - 1) else 0
    sizes = root, tuple(1 + bool(model.layers[index].experts) for index in layers)
    if job.splits_backwards:  # torch's zero-bubble schedule keeps the stage gathered
        return (Gathers(counting=1 if job.counts_choices else 0, forward=1),) * (sizes[0] + sum(sizes[1]))
    zero3, forwards = job.config.zero == 3, job.config.micro_batches if not job.trained else 0
    return _gather_counts(zero3, *sizes, Schedule.of(job, rank), stage, job.counts_choices, forwards)


@lru_cache(maxsize=4096)
def _gather_counts(
    zero3: bool, root: int, layers: tuple[int, ...], schedule: Schedule, stage: int, counts_choices: bool, alone: int
) -> tuple[Gathers, ...]:
    """Return how often each unit of the root and of the layers is gathered. root, layers: their numbers of units.

    alone: the number of forwards, if nothing else runs.
    """
    fsdp2, last = _Fsdp2(zero3, root, layers), schedule.micro_batches - 1
    if counts_choices:
        for _ in range(schedule.micro_batches):
            fsdp2.forward("counting")
        fsdp2.reset()
    for _ in range(alone):
        fsdp2.forward()
    for action in actions(schedule) if not alone else ():
        if action.stage != stage:
            continue
        if action.kind == "forward":
            fsdp2.forward()
        else:
            fsdp2.backward(last=action.micro_batch == last)
    return tuple(Gathers(**group.gathers) for group in fsdp2.groups)
