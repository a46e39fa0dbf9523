"""The traffic of a step by formula: bytes of one rank by pass, axis and collective."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, compress, pairwise
from typing import Literal, NamedTuple

from usp.attention import AttentionSpec, HeadPlan, UnifiedPlan, ring_schedule
from usp.model.facts import NO_ATTENTION, ParameterShape

from .job import ADAPTER, PASSES, Job, Pass, Schedule, actions, shared

FLOAT32 = 4  # bytes: of sharded parameters and of gradient reductions
FLOAT64 = INT64 = 8
_ring = lru_cache(maxsize=256)(ring_schedule)  # which does not depend on the Ulysses degree


class Sent(NamedTuple):
    """Payload bytes that leave one rank."""

    axis: str  # of the mesh
    collective: str  # the name of torch's c10d operator
    nbytes: int
    calls: int = 1  # messages or collectives, including those in which this rank sends nothing

    def times(self, number: int) -> Sent:
        return Sent(self.axis, self.collective, number * self.nbytes, number * self.calls)


def all_reduce(axis: str, nbytes: int, ranks: int, functional: bool = False) -> Sent:
    """Return an all-reduce of `nbytes`: a reduce-scatter and an all-gather. functional: as DTensor redistributes."""
    return Sent(axis, "all_reduce" if functional else "allreduce_", 2 * (nbytes * (ranks - 1) // ranks))


def merged(parts: Iterable[Sent], job: Job | None = None) -> tuple[Sent, ...]:
    """Return one entry per axis and collective, the most bytes first; with a job without its groups of one rank."""
    nbytes, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for part in parts:
        if job is None or job.extents[part.axis][0] > 1:
            nbytes[part[:2]] += part.nbytes
            calls[part[:2]] += part.calls
    found = [Sent(*key, nbytes[key], number) for key, number in calls.items() if number]
    return tuple(sorted(found, key=lambda sent: (-sent.nbytes, sent.axis, sent.collective)))


class Unit(NamedTuple):
    """Parameters that are gathered together over one axis, after tensor or expert parallelism."""

    axis: str
    ranks: int  # number of shards
    numel: int  # gathered elements, without padding
    shard: int  # elements that a rank stores and sends to each other rank in a gather, with padding
    trained_numel: int  # of `numel`, the elements with gradients: with LoRA, those of adapters
    trained_shard: int  # of `shard`, likewise
    summed_over_tp: tuple[int, ...]  # elements of each gradient that is summed over tp first
    float8: int = 0  # of `numel`, the elements of weights that are gathered in float8; no rank has padding of these

    def gathered(self, itemsize: int) -> int:
        """Return the bytes of the whole unit, of weights that else have `itemsize` bytes each."""
        return self.numel * itemsize - self.float8 * (itemsize - 1)

    def sent(self, itemsize: int) -> int:
        """Return the bytes that a rank sends to each other one in a gather."""
        return self.shard * itemsize - self.float8 // self.ranks * (itemsize - 1)

    @property
    def reduced(self) -> int:
        """Elements of the buffers that reduce the gradients."""
        return self.trained_shard * self.ranks


def _sum_of(name: str) -> cached_property[int]:
    """Return the sum of an attribute of all units of a stage."""
    return cached_property(lambda stage: sum(getattr(unit, name) for unit in stage.all))


@dataclass(frozen=True)
class StageUnits:
    """The units of one pipeline stage: of the root, if it has parameters, and of each layer and its experts, if any."""

    root: tuple[Unit, ...]
    layers: tuple[tuple[Unit, ...], ...]

    @cached_property
    def all(self) -> tuple[Unit, ...]:
        return tuple(unit for units in (self.root, *self.layers) for unit in units)

    numel = _sum_of("numel")
    shard = _sum_of("shard")
    trained_numel = _sum_of("trained_numel")
    trained_shard = _sum_of("trained_shard")
    reduced = _sum_of("reduced")
    float8 = _sum_of("float8")

    def gathered(self, itemsize: int) -> int:
        """Return the sum of `Unit.gathered`."""
        return self.numel * itemsize - self.float8 * (itemsize - 1)

    @cached_property
    def largest_gradient(self) -> int:
        """The most elements of a unit's reduced gradient on a rank."""
        return max(unit.trained_shard for unit in self.all)

    @cached_property
    def repeated(self) -> Counter[Unit]:
        """How many equal units the layers have."""
        return Counter(chain(*self.layers))

    @cached_property
    def around(self) -> StageUnits:
        """The root."""
        return StageUnits(self.root, ())

    @cached_property
    def largest(self) -> StageUnits:
        """The layer with the most elements."""
        return max((StageUnits(layer, ()) for layer in set(self.layers)), key=lambda units: units.numel)


@shared(lambda job, stage: (job.sharding, stage))
def stage_units(job: Job, stage: int) -> StageUnits:
    """Return the units that `apply_fsdp` makes of a pipeline stage."""
    model = job.model
    layers = {kind: model.layers[kind] for kind, _ in job.kinds(stage)}
    made = {kind: _units(job, layer.parameters, layer.experts) for kind, layer in layers.items()}
    root = _units(job, model.around_layers(stage == 0, stage == job.last_stage))
    return StageUnits(root, tuple(made[model.alike[index]] for index in job.stage_layers[stage]))


@shared(lambda job, rank, of: (job.sharding, job.place("pp", rank), of))
def elements(job: Job, rank: int, of: Literal["shard", "trained_shard", "trained_numel"]) -> int:
    """Return the sum of an attribute of `StageUnits` over the stages of a rank."""
    return sum(getattr(stage_units(job, stage), of) for stage in job.stages(rank))


def _units(
    job: Job, parameters: tuple[ParameterShape, ...], experts: tuple[ParameterShape, ...] = ()
) -> tuple[Unit, ...]:
    """Return the unit of `parameters` and that of `experts`, if there are any."""
    tp, units = job.dims.tp, []
    if parameters:
        trained = [not job.frozen or ADAPTER in p.name for p in parameters]
        partial = [tp > 1 and p.partial_gradient(job.config.tp_sequence_parallel) for p in parameters]
        summed = tuple(p.numel for p, *both in zip(parameters, trained, partial, strict=True) if all(both))
        gathered = [p for p in parameters if job.config.fp8 == "tensor" and p.float8("tensor", tp)]
        float8 = sum(math.prod(p.local(tp)) for p in gathered)
        units.append(_unit(job, "fsdp", [p.local(tp) for p in parameters], trained, summed)._replace(float8=float8))
    if experts:
        shapes = [(p.shape[0] // job.dims.ep, *p.shape[1:]) for p in experts]
        units.append(_unit(job, "efsdp", shapes, [not job.frozen] * len(shapes)))
    return tuple(units)


def _unit(
    job: Job, axis: str, shapes: list[tuple[int, ...]], trained: list[bool], summed_over_tp: tuple[int, ...] = ()
) -> Unit:
    ranks, shards = job.degree(axis) if job.config.zero else 1, []
    for shape in shapes:
        # As in parallel.fsdp: if there are fewer experts than ranks, their rows are sharded where they divide evenly.
        dim = 1 if axis == "efsdp" and shape[0] < ranks and shape[1] % ranks == 0 else 0
        shards.append(-(-shape[dim] // ranks) * (math.prod(shape) // shape[dim]))
    sizes = [math.prod(shape) for shape in shapes]
    numel, shard = (sum(compress(each, trained)) for each in (sizes, shards))
    return Unit(axis, ranks, sum(sizes), sum(shards), numel, shard, summed_over_tp)


ByPass = Mapping[Pass, Sequence[Sent]]
_GATHERING: tuple[Pass, ...] = ("count", "forward", "backward")  # as `Gathers`


def gathering(job: Job, rank: int) -> Hashable:
    """Return what determines the traffic of a rank's parameters."""
    replicas = job.config.zero, job.dims.dp_replicate, job.degree("loss")
    return job.sharding, job.schedule(rank), *replicas, job.dtype, job.trained, job.counts_choices


@shared(gathering)
def fsdp_traffic(job: Job, rank: int) -> ByPass:
    """Return the gathers of parameters and the reductions of gradients in a step of `rank`, also over tp."""
    parts: defaultdict[Pass, list[Sent]] = defaultdict(list)
    for unit, gathers, number in _gathered(job, rank):
        for kind, sent in _unit_traffic(job, unit, gathers):
            parts[kind] += [sent.times(number)] if job.degree(sent.axis) > 1 else []
    return {kind: merged(sents) for kind, sents in parts.items()}


@shared(lambda job, rank: (gathering(job, rank), job.weights))
def fsdp_copies(job: Job, rank: int) -> Mapping[Pass, int]:
    """Return the bytes that FSDP2 reads and writes in a step of `rank` to cast shards and to copy what is gathered into
    parameters, and to copy and add up reduced gradients."""
    found, size, casts = Counter[Pass](), job.dtype.itemsize, job.weights != job.dtype
    reductions = job.config.micro_batches if job.config.zero >= 2 else 1
    for unit, gathers, number in _gathered(job, rank):
        copied = 2 * unit.gathered(size) if casts or unit.ranks > 1 else 0
        copied += casts * (job.weights.itemsize + size) * unit.shard
        found.update({kind: number * times * copied for kind, times in zip(_GATHERING, gathers, strict=True)})
        added = (3 * (reductions - 1) + 2 * reductions * (unit.ranks == 1)) * unit.trained_shard
        found["backward"] += number * FLOAT32 * added * job.trained
    return found


def _gathered(job: Job, rank: int) -> Iterator[tuple[Unit, Gathers, int]]:
    """Yield the units of `rank` that differ, how often a step gathers each, and how many there are."""
    for stage in job.stages(rank):
        units, gathers = stage_units(job, stage), gather_counts(job, rank, stage)
        # Experts run before the rest of their layer.
        last, apart = units.layers[-1][0], gathers.last != gathers.layer
        yield from ((unit, gathers.layer, each - (apart and unit == last)) for unit, each in units.repeated.items())
        yield from [(last, gathers.last, 1)] * apart
        yield from ((unit, gathers.root, 1) for unit in units.root)


def tied_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """Yield the sum of the tied embedding's gradient over the first and the last stage, if they are on two ranks."""
    ends = {0, job.last_stage}
    if job.frozen or not job.model.facts.tied or job.dims.pp == 1 or len(ends & {*job.stages(rank)}) != 1:
        return
    (rows, columns), (axis, ranks) = job.model.embedding[0].local(job.dims.tp), ("fsdp", job.degree("fsdp"))
    each, place = (rows, 0) if job.config.zero == 0 else (-(-rows // ranks), job.place(axis, rank))
    if own := max(0, min(each, rows - place * each)):
        yield all_reduce("ends", own * columns * FLOAT32, 2)


def matrix_elements(job: Job, stage: int) -> tuple[int, int]:
    """Return the elements in the shards of a stage that the optimizer updates by whole matrices: of matrices, and of
    experts."""
    matrices = experts = 0.0
    if job.optimizer.of_matrices:
        for index, (unit, *others) in zip(job.stage_layers[stage], stage_units(job, stage).layers, strict=True):
            trained = [p for p in job.model.layers[index].parameters if ADAPTER in p.name or not job.frozen]
            share = sum(p.numel for p in trained if len(p.shape) == 2) / max(1, sum(p.numel for p in trained))
            matrices += unit.trained_shard * share
            experts += sum(other.trained_shard for other in others)
    return round(matrices), round(experts)


def matrix_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """Yield the shards of matrices that go to the rank that updates them and back; most experts are whole."""
    ranks, elements = job.degree("fsdp"), sum(matrix_elements(job, stage)[0] for stage in job.stages(rank))
    if (special := job.optimizer.of_matrices) and elements and job.config.zero and ranks > 1:
        yield Sent("fsdp", "alltoall_base_", special.sent * elements * (ranks - 1) // ranks, calls=2)


def scale_traffic(job: Job, rank: int) -> Iterator[Sent]:
    """Yield the maxima of the weights that are gathered in float8, of each stage together."""
    for stage in job.stages(rank) if job.config.fp8 == "tensor" else ():
        layers = (job.model.layers[index] for index in job.stage_layers[stage])
        weights = sum(p.float8("tensor", job.dims.tp) for layer in layers for p in layer.parameters)
        for axis in ("fsdp", "tp") if job.config.zero else ("tp",):
            yield all_reduce(axis, weights * FLOAT32, job.degree(axis))


class Gathers(NamedTuple):
    """How often a unit is gathered in the passes of a step."""

    counting: int = 0
    forward: int = 0
    backward: int = 0


class StageGathers(NamedTuple):
    """The gathers of the root, of each unit of the layers, and of the last of these."""

    root: Gathers
    layer: Gathers
    last: Gathers


def gather_counts(job: Job, rank: int, stage: int) -> StageGathers:
    """Return how often torch's FSDP2 gathers the units of a stage of `rank` in a step.

    ZeRO-3 frees a layer after each pass and gathers it ahead of the next; the root is freed after backwards only. The
    other stages of ZeRO, and torch's zero-bubble schedule, keep all from the first forward to the last backward. A
    backward prefetches the unit that forwards used before: without a root, the first layer's prefetches the last layer,
    unless it is of the step's first forward, and the next forward need not gather that.
    """
    number, counting = job.config.micro_batches, int(job.counts_choices)
    if job.splits_backwards:
        return StageGathers(*[Gathers(counting, 1)] * 3)
    if not job.trained:
        return StageGathers(Gathers(0, 1), *[Gathers(0, number if job.config.zero == 3 else 1)] * 2)
    turns, drained = _turns(job.schedule(rank), stage)
    rootless = not job.model.around_layers(stage == 0, stage == job.last_stage)
    prefetches = rootless and len(job.stage_layers[stage]) > 1
    if job.config.zero < 3:
        once = Gathers(counting, 1)
        return StageGathers(once, once, Gathers(counting, 1, int(prefetches and drained)))
    layer = last = Gathers(counting * number, number, number)
    if prefetches:
        last = Gathers(counting * number, number - turns + drained, number + turns)
    return StageGathers(Gathers(counting, 1 + turns, number - 1 - turns), layer, last)


@lru_cache(maxsize=4096)
def _turns(schedule: Schedule, stage: int) -> tuple[int, bool]:
    """Return (the forwards of a stage after one of its backwards, whether one follows when none is in flight)."""
    kinds = [action.kind for action in actions(schedule) if action.stage == stage]
    turns, live, drained = 0, 0, False
    for kind, following in pairwise(kinds):
        live += 1 if kind == "forward" else -1
        turns += (kind, following) == ("backward", "forward")
        drained |= live == 0
    return turns, drained


def _unit_traffic(job: Job, unit: Unit, gathers: Gathers) -> Iterator[tuple[Pass, Sent]]:
    if unit.ranks > 1:
        gathered = Sent(unit.axis, "_allgather_base_", unit.sent(job.dtype.itemsize) * (unit.ranks - 1))
        for kind, times in zip(_GATHERING, gathers, strict=True):
            if times:
                yield kind, gathered.times(times)
    for sent in _reductions(job, unit) if job.trained else ():
        yield "backward", sent


def _reductions(job: Job, unit: Unit) -> Iterator[Sent]:
    zero, several = job.config.zero, job.config.micro_batches > 1 or job.config.pp_schedule == "zero-bubble"
    reductions = job.config.micro_batches if zero >= 2 else 1
    # Gradients of several backwards are accumulated in float32 before they are reduced.
    itemsize = FLOAT32 if zero < 2 and several else job.dtype.itemsize
    for numel in unit.summed_over_tp:
        yield all_reduce("tp", numel * itemsize, job.dims.tp, functional=True).times(reductions)
    if not unit.trained_numel:
        return
    if unit.ranks > 1:
        nbytes = unit.trained_shard * (unit.ranks - 1) * FLOAT32
        yield Sent(unit.axis, "_reduce_scatter_base_", nbytes).times(reductions)
    replicas = "loss" if zero == 0 else "dp_replicate"
    yield all_reduce(replicas, unit.trained_shard * FLOAT32, job.degree(replicas))


def attention_spec(job: Job, window: int) -> AttentionSpec:
    """Return the attention of a layer."""
    return AttentionSpec(causal=True, window=(window - 1, -1) if window else (-1, -1), documents=job.documents)


def attention_plan(job: Job, rank: int, window: int) -> UnifiedPlan:
    """Return the execution plan of a layer's attention for one sequence; `job.rows` of them take as many times more."""
    facts, tp, spec = job.model.facts, job.dims.tp, attention_spec(job, window)
    heads = HeadPlan(facts.num_heads // tp, facts.num_kv_heads // tp, job.dims.ulysses)
    ring = _ring(replace(job.layout, ulysses=1), spec, 1, job.place("ring", rank))
    return UnifiedPlan(job.layout, spec, heads, 1, job.place("ulysses", rank), ring)


@shared(lambda job, rank, window: (job.micro_batch, job.place("ring", rank), job.place("ulysses", rank), window))
def attention_traffic(job: Job, rank: int, window: int) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """Return the traffic of one layer's attention for one micro-batch in (forward, backward): Ulysses exchanges q, k, v
    and the output, the ring passes keys and values; and their gradients, the ring's in float32."""
    if window == NO_ATTENTION:  # the states that other mixers pass on are few bytes
        return (), ()
    plan, facts = attention_plan(job, rank, window), job.model.facts
    wire = plan.wire_bytes(facts.head_dim, job.dtype, facts.value_dim)
    keys = sum(len(step.send_held) + len(step.send_own) for step in plan.ring.steps)
    grads = sum(len(step.grad_send) for step in plan.ring.steps)

    def exchanged(nbytes: int) -> Sent:
        return Sent("ulysses", "alltoall_base_", job.rows * nbytes, calls=2)

    ring = Sent("ring", "send", job.rows * wire.keys, keys)
    gradients = Sent("ring", "send", job.rows * wire.grads, grads)
    return (
        (exchanged(wire.seq_to_heads + wire.heads_to_seq), ring),
        (exchanged(wire.dout_to_heads + wire.grads_to_seq), ring, gradients),
    )


def activation_parts(job: Job, rank: int) -> defaultdict[Pass, list[Sent]]:
    """Return the part of `pass_parts` that does not depend on how parameters are sharded over dp."""
    parts: defaultdict[Pass, list[Sent]] = defaultdict(list)
    for stage in job.stages(rank):
        for kind, sents in _stage_traffic(job, rank, stage).items():
            if (kind == "forward" or job.trained) and (kind != "count" or job.counts_choices):
                parts[kind] += [sent.times(job.config.micro_batches) for sent in sents]
    return parts


def pass_parts(job: Job, rank: int) -> ByPass:
    """Return what `rank` sends in each pass of all micro-batches, without groups of one rank; not `merged`."""
    parts = activation_parts(job, rank)
    for kind, sents in fsdp_traffic(job, rank).items():
        parts[kind] += sents
    if job.trained:
        parts["forward"] += _sums(job, FLOAT64, "loss")
        parts["update"] += [*tied_traffic(job, rank), *matrix_traffic(job, rank), *scale_traffic(job, rank)]
        parts["update"] += _sums(job, FLOAT64, "pp", "loss", "tp")
    if job.counts_choices and job.last_stage in job.stages(rank):
        parts["count"] += _choice_sums(job)
    return {kind: [s for s in parts[kind] if job.extents[s.axis][0] > 1] for kind in PASSES}


def layer_traffic(job: Job, rank: int, index: int) -> ByPass:
    """Return the traffic of a layer's activations for one micro-batch, groups of one rank included. Recomputation
    repeats the collectives around attention and a dense MLP, except the last, whose result is not saved."""
    entering, leaving = attention_traffic(job, rank, job.model.facts.windows[index])
    experts = bool(job.model.layers[index].experts)
    alike = job.dims.ep > 1 and job.dims.tp > 1 and not job.config.tp_sequence_parallel  # the tokens of tp ranks
    tokens = -(-job.outer_tokens // job.dims.tp) if alike else job.outer_tokens
    blocks, exchanges = 1 if experts else 2, list(expert_traffic(job, tokens, alike, job.ep_chunks)) if experts else []
    forward = [*entering, *_tensor_traffic(job, blocks, blocks), *exchanges]
    recompute: list[Sent] = []
    if job.config.ac != "none":
        recompute += entering if job.config.ac == "full" else ()
        recompute += [*_tensor_traffic(job, blocks, 1), *exchanges]
    backward = [*leaving, *_tensor_traffic(job, blocks, blocks), *exchanges[1:]]
    return {"forward": forward, "recompute": recompute, "backward": backward}


@shared(
    lambda job, rank, stage: (
        *(job.work, job.place("ring", rank), job.place("ulysses", rank), stage),
        *(job.dims.pp, job.pipeline, job.degree("loss")),
    )
)
def _stage_traffic(job: Job, rank: int, stage: int) -> ByPass:
    """Return what a stage sends for one micro-batch, besides parameters and their gradients, without groups of one."""
    parts: defaultdict[Pass, list[Sent]] = defaultdict(list)
    for index, number in job.kinds(stage):
        for kind, sent in layer_traffic(job, rank, index).items():
            parts[kind] += [each.times(number) for each in sent]
    if job.output != "cache":  # the document boundaries are compared in each forward (`usp.parallel.agree`)
        parts["forward"] += _sums(job, 2 * INT64, "ulysses", "ring")
    if stage == 0:  # the embedding is a sum, because each tensor-parallel rank has its own rows of the vocabulary
        parts["forward"] += _tensor_traffic(job, 0, 1)
        parts["backward"] += _tensor_traffic(job, 1, 0)
    parts["count"] = list(parts["forward"])
    # Hidden states go to the next stage and their gradients to the previous one, if these are on another rank.
    messages = [Sent("pp", "send", job.outer_tokens * job.model.hidden_size * job.dtype.itemsize)]
    messages += [Sent("pp", "send", 2 * job.model.facts.num_experts * FLOAT32)] if job.balance else []
    if stage < job.last_stage and stage + 1 not in job.stages(rank):
        parts["forward"] += messages
        parts["count"] += messages
    if stage > 0 and stage - 1 not in job.stages(rank):
        parts["backward"] += messages
    if stage == job.last_stage:
        head, gradients = _head_traffic(job, rank)
        parts["count"] += _tensor_traffic(job, 1, 0)
        parts["forward"] += [*(_tensor_traffic(job, 1, 0) if job.output != "cache" else ()), *head]
        parts["backward"] += gradients
    return {kind: merged(sent, job) for kind, sent in parts.items()}


def _sums(job: Job, nbytes: int, *axes: str) -> list[Sent]:
    return [all_reduce(axis, nbytes, job.degree(axis)) for axis in axes]


def _hidden(job: Job) -> int:
    """Return the bytes of a ring x ulysses rank's hidden states, before tp shards them."""
    return job.tokens * job.model.hidden_size * job.dtype.itemsize


def _tensor_traffic(job: Job, gathers: int, sums: int) -> Iterator[Sent]:
    """Yield hidden states gathered and summed over tp; a gather is free if each tp rank has all hidden states."""
    tp = job.dims.tp
    if job.config.tp_sequence_parallel:
        nbytes = _hidden(job) // tp * (tp - 1)
        yield Sent("tp", "all_gather_into_tensor", nbytes).times(gathers)
        yield Sent("tp", "reduce_scatter_tensor", nbytes).times(sums)
    else:
        yield all_reduce("tp", _hidden(job), tp, functional=True).times(sums)


def _head_traffic(job: Job, rank: int) -> tuple[list[Sent], list[Sent]]:
    """Return the traffic of the output head in (forward, backward), the routers' auxiliary loss included."""
    tp, forward = job.dims.tp, []
    gradients = [all_reduce("tp", _hidden(job), tp)]
    if job.output in ("loss", "logprobs"):
        tokens = job.tokens if job.output == "loss" else job.labelled_tokens(rank)
        sizes = Counter(min(job.config.loss_chunk, tokens - at) for at in range(0, tokens, job.config.loss_chunk))
        sums = 2 if job.output == "loss" else 3  # the sum of exponentials, the target's logit, and that of the entropy
        for chunk, number in sizes.items():
            forward += [all_reduce("tp", numbers * chunk * FLOAT32, tp).times(number) for numbers in (1, sums)]
    if job.balance:
        forward += _sums(job, FLOAT32, "tp") if job.config.tp_sequence_parallel else []
        forward += [] if job.counts_choices else _choice_sums(job)
    if job.output == "loss":  # its forward computes the gradients
        return forward + gradients, []
    return forward, gradients if job.output == "logprobs" else []


def _choice_sums(job: Job) -> list[Sent]:
    """Return the sums of the routers' choices over the ranks that route different tokens."""
    axes = ("loss", "tp") if job.config.tp_sequence_parallel else ("loss",)
    return _sums(job, job.model.facts.num_experts * FLOAT32, *axes)


def expert_traffic(job: Job, tokens: int, gathers: bool, chunks: int = 1) -> Iterator[Sent]:
    """Yield the counts of rows, and the rows of `tokens` to the experts and back, which in a backward are gradients, in
    messages for each of the `chunks` of experts.
    Tensor-parallel ranks with the same tokens send a part of them each, and one that `gathers` gets all results. If
    routers are uneven, rows are those of the busiest rank, which receives as many as it sends back.
    """
    ep, itemsize, rows = job.dims.ep, job.dtype.itemsize, job.expert_rows(tokens)
    yield Sent("ep", "alltoall_base_", job.model.facts.num_experts * (ep - 1) // ep * INT64)
    yield Sent("ep", "alltoall_base_", 2 * (rows * (ep - 1) // ep) * job.model.hidden_size * itemsize, 2 * chunks)
    if gathers:
        yield Sent("tp", "_allgather_base_", tokens * job.model.hidden_size * itemsize * (job.dims.tp - 1))


def step_traffic(job: Job, rank: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in one step, without groups of one rank, the most bytes first."""
    return merged(chain(*pass_parts(job, rank).values()))


def block_traffic(job: Job, rank: int) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """Return what the first decoder layer of `rank` sends in a step: (for parameters, for activations)."""
    stage, number = job.stages(rank)[0], job.config.micro_batches
    layer, gathers = stage_units(job, stage).layers[0], gather_counts(job, rank, stage).layer
    inside = chain(*layer_traffic(job, rank, job.stage_layers[stage][0]).values())
    parameters = (sent for unit in layer for _, sent in _unit_traffic(job, unit, gathers))
    return merged(parameters, job), merged((sent.times(number) for sent in inside), job)
