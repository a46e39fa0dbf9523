"""The memory of a rank by formula, to rank layouts; `usp.train.dry_run` counts every tensor of the real step.

A step's peak is the highest of a few moments, each the sum of what is alive then:

    loss                 all saved activations, the unsharded head, a chunk's logits, the head's float32 gradient
    first, last layer    a backward's recomputed activations and gradients, unsharded weights and gradients, and what
                         is saved by then, or reduced
    root reduced         the float32 copies of embedding and head that are sent
    split backward       all that the input halves leave for the weight halves (zero-bubble)
    optimizer            all gradient shards

Only tensor storage counts, without fragmentation. A layer's activations are the results of its matrices and the tensors
of attention and norms around them, as transformers' Llama-like layers save them."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from operator import itemgetter, le
from typing import NamedTuple

from usp.attention import HeadPlan
from usp.model.facts import NO_ATTENTION, LayerShape, ParameterShape

from .job import ADAPTER, Job, Schedule, actions, shared
from .traffic import FLOAT32, INT64, Unit, elements, matrix_elements, stage_units

_RECURRENT = re.compile(r"A_log|conv|dt_bias")  # in the names of parameters
_ATTENTION = re.compile(r"q_proj|qkv|query|c_attn|q_a_proj|q_b_proj")
# Bytes that a recurrent layer saves per result of its products, in torch's code of the recurrence: from dry runs of
# qwen3_next (gated delta rule) and bamba (Mamba-2).
DELTA_BYTES, STATE_SPACE_BYTES = 28, 43
Flight = tuple[tuple[int, int], ...]  # (stage, micro-batches)
Backward = tuple[int, bool, bool]  # (stage, whether it is the input half, whether the stage had one before)
NORM_BYTES = 4 * FLOAT32  # per element of a norm's backward: its gradient, that of the mean square, and their sum


class LayerMemory(NamedTuple):
    """Bytes of the activations of a layer for one micro-batch."""

    saved: int  # from the forward until the backward
    backward: int  # added at the backward's peak: what is recomputed, and gradients
    left: int  # added from the input half of a split backward until its weight half: gradients of products' results


def _attention(job: Job) -> tuple[int, int, int]:
    """Return the elements of (q, k and v, the output) of attention on the busiest rank."""
    facts, tp, ulysses = job.model.facts, job.dims.tp, job.dims.ulysses
    plan, tokens = HeadPlan(facts.num_heads // tp, facts.num_kv_heads // tp, ulysses), job.tokens * ulysses
    queries, keys = tokens * plan.q_width(0), tokens * plan.kv_width(0)
    return queries * facts.head_dim, keys * (facts.head_dim + facts.value_dim), queries * facts.value_dim


def _results(job: Job, layer: LayerShape, attends: bool) -> tuple[int, int, int]:
    """Return (elements that a layer's matrices compute, those that dense MLPs begin with, bytes that recurrences,
    convolutions and latent attention save of theirs)."""
    size = job.dtype.itemsize

    def elements(parameters: list[ParameterShape]) -> int:  # what tp does not shard has a share of the tokens
        return sum((job.outer_tokens if p.tp_dim is None else job.tokens) * p.local(job.dims.tp)[0] for p in parameters)

    modules: defaultdict[str, list[ParameterShape]] = defaultdict(list)
    for p in layer.parameters:
        if ADAPTER not in p.name:
            modules[p.name.rsplit(".", 2)[0]].append(p)
    names = {p.name.rpartition(".")[2] for p in layer.parameters}
    per_result = STATE_SPACE_BYTES if "D" in names else DELTA_BYTES if "A_log" in names else size
    recurrent = {name.partition(".")[0] for name, ps in modules.items() if any(_RECURRENT.search(p.name) for p in ps)}
    mlp = others = 0
    for module, parameters in modules.items():
        linears = [p for p in parameters if len(p.shape) == 2 and min(p.shape) > 1]
        linears = [p for p in linears if p.shape[0] != job.model.facts.num_experts]  # no router
        if module.partition(".")[0] in recurrent:
            others += elements(linears) * per_result
        elif attends and any(_ATTENTION.search(p.name) for p in parameters):
            others += elements([p for p in linears if "_a_proj" in p.name]) * (2 * size + FLOAT32)
        else:
            mlp += elements(linears[:-1])  # nothing needs the result of the last
    return elements([p for p in layer.parameters if len(p.shape) == 2]), mlp, others


@shared(lambda job, index: (job.work, index))
def layer_memory(job: Job, index: int) -> LayerMemory:
    """Return the activations of a decoder layer."""
    layer, facts, size, ac = job.model.layers[index], job.model.facts, job.dtype.itemsize, job.config.ac
    attends = facts.windows[index] != NO_ATTENTION
    computed, mlp, others = _results(job, layer, attends)
    products, cast = computed * size, FLOAT32 if size < FLOAT32 else 0
    hidden = job.outer_tokens * job.model.hidden_size
    inside = job.tokens * job.model.hidden_size * size  # hidden states in a region of tp

    q, kv, out = _attention(job) if attends else (0, 0, 0)
    output = out * size * (2 if job.dims.ulysses > 1 else 1) + out // facts.value_dim * FLOAT32  # and log-sum-exp
    exchanged = (q + kv) * size
    # Gradients of the output, and of q, k and v with their float32 sums; a ring has those of a neighbour as well.
    of_attention = out * size + (q + kv) * (size + cast) + (3 * kv * (size + FLOAT32) if job.dims.ring > 1 else 0)
    # A norm saves its input in float32 and, unless its weight is frozen, normalized; compiled (`compile_layers`), less.
    lean = job.config.compile and ac == "none"
    norm = hidden * size if lean else inside + hidden * (FLOAT32 if job.frozen else FLOAT32 + size)
    norms = sum(len(p.shape) == 1 and p.name.count(".") == 1 and p.name.endswith("weight") for p in layer.parameters)
    others += max(1, norms) * norm
    if layer.norms_heads:
        others += (q + kv // 2) * (size if lean else FLOAT32 + size)

    # A gated MLP saves the results of gate and up, the activation and the product, or has those of one tile at a time.
    into_mlp = mlp * size  # results of gate and up
    lean_mlp = lean and not (layer.experts or job.config.mlp_tile)  # which are eager
    in_mlp, of_mlp = into_mlp if lean_mlp else 2 * into_mlp, float(into_mlp)
    if job.config.mlp_tile:
        in_mlp, of_mlp = 0, 3 * into_mlp * min(1.0, job.config.mlp_tile / job.layout.local_len)
    if layer.experts:
        routed, number = hidden * job.model.facts.experts_per_token, job.expert_rows(job.outer_tokens)
        rows, columns = number * job.model.hidden_size * size, number * job.model.expert_size * size
        in_mlp += routed * size + (3 * columns if job.frozen else rows + 4 * columns)
        of_mlp += routed * FLOAT32 + 2 * rows  # of the weighted sum, and the rows in transit
        into_mlp, products = into_mlp + 2 * columns, products + rows + 2 * columns

    every = others + output + exchanged + in_mlp
    saved, again = every, lean_mlp * into_mlp // 2 + lean * hidden * size
    if ac != "none":
        saved = hidden * size + (output + (exchanged if job.dims.ulysses > 1 else 0) if ac != "full" else 0)
        again = every - saved + (hidden * size if cast else 0)
    if ac == "selective":  # the operator behind a product saves what selective does
        saved += products - (0 if layer.experts else inside)
        again, in_mlp = again - into_mlp, in_mlp - into_mlp
    weights = sum(math.prod(p.local(job.dims.tp)) for p in layer.parameters if p.name.startswith("mlp"))
    weights += sum(p.numel for p in layer.experts) // job.dims.ep
    of_weights = 0 if job.frozen else weights * size
    float8 = [p.local(job.dims.tp) for p in layer.parameters if p.float8(job.config.fp8, job.dims.tp)]
    # An eager cast has two float32 copies, and MXFP8's is one kernel.
    fused = job.config.compile or job.config.fp8 == "mx"
    casts = 0 if fused else 2 * FLOAT32 * job.tokens * max(map(max, float8), default=0)
    peaks = (  # in the MLP, in the norm before it, and in attention
        of_mlp + of_weights / 3 + casts,
        NORM_BYTES * hidden - in_mlp + of_weights,
        of_attention - in_mlp - norm + of_weights,
    )
    return LayerMemory(saved, again + hidden * size + round(max(peaks)), products + 2 * hidden * size)


class Moment(NamedTuple):
    """Bytes alive at one peak of a step."""

    name: str
    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0  # reduced shards
    whole: int = 0  # unsharded parameters and gradients, and their communication buffers
    activations: int = 0  # saved for backwards
    transient: int = 0  # the rest

    @property
    def total(self) -> int:
        return sum(self[1:])


class StageBytes(NamedTuple):
    """What a micro-batch takes in one pipeline stage, whatever shards the parameters."""

    saved: int  # for its backward
    layers: int  # of this by layers, be it in host memory
    at_first: int  # saved by layers at the backward of the first layer
    at_last: int  # likewise of the last layer
    backward: int  # added by the backward of a layer
    left: int  # by the input half of a split backward for the weight half
    handed: int  # hidden states from one neighbour
    outside: int  # rotary cosines and sines, and `handed`
    head: int  # of the last stage: saved by its head,
    logits: int  # added by the head's forward and backward,
    of_head: int  # and the elements of its gradient


@shared(lambda job, stage: (job.work, job.config.ac_offload, job.dims.pp, job.pipeline, stage))
def stage_bytes(job: Job, stage: int) -> StageBytes:
    """Return what a micro-batch takes in a stage."""
    size, width, layers = job.dtype.itemsize, job.model.hidden_size, job.stage_layers[stage]
    memory = [(layer_memory(job, kind), number) for kind, number in job.kinds(stage)]
    hidden, inside = (tokens * width * size for tokens in (job.outer_tokens, job.tokens))
    handed = 0 if job.dims.pp == 1 else hidden
    outside = 2 * job.tokens * job.model.facts.head_dim * size + handed
    left = sum(number * layer.left for layer, number in memory)
    at_first = layer_memory(job, job.model.alike[layers[0]]).saved
    at_last = of_layers = sum(number * layer.saved for layer, number in memory)
    of_head = head = logits = 0
    if stage == job.last_stage:
        vocabulary, cast = job.model.facts.vocab_size // job.dims.tp, FLOAT32 if size < FLOAT32 else 0
        of_head = 0 if job.frozen else vocabulary * width
        head = job.outer_tokens * width * (FLOAT32 + size) + inside + of_head * FLOAT32
        # A chunk's logits, also in float32, or the head's gradient; or the backward of the norm before the head.
        second = size if job.stack.fused_loss else cast  # a fused loss writes only their gradient
        chunk = max(min(job.config.loss_chunk, job.tokens) * vocabulary * (size + second), of_head * size)
        norm = job.outer_tokens * width * (NORM_BYTES + size) - inside - of_head * (FLOAT32 - size)
        logits = max(inside + chunk, norm)
        left += inside + hidden
    saved = outside + head + (0 if job.config.ac_offload else at_last)
    if job.config.ac_offload:  # two layers are on the device
        at_last = min(2, len(layers)) * max(layer.saved for layer, _ in memory)
    backward = max(layer.backward for layer, _ in memory)
    return StageBytes(saved, of_layers, at_first, at_last, backward, left, handed, outside, head, logits, of_head)


def _idle(job: Job, stage: int, later: bool) -> int:
    """Return the bytes of unsharded parameters and gradients while other stages run; `later`: after a backward."""
    size, config, units = job.dtype.itemsize, job.config, stage_units(job, stage)
    sums = FLOAT32 if later and config.zero < 2 and config.micro_batches > 1 else 0
    if job.splits_backwards:
        sums = FLOAT32 + (size if size < FLOAT32 and stage > 0 else 0)
    return (0 if config.zero == 3 else units.gathered(size)) + units.trained_numel * sums


def _backward(job: Job, stage: int, later: bool) -> Iterator[tuple[str, int, int, int]]:
    """Yield what parameters and gradients take at the peaks of a stage's backward: the name of a `Moment`, gradients
    reduced by this backward alone, the `whole`, and what is added as far as the layer has not freed as much; `later`:
    another micro-batch's backward has run before."""
    units, size, zero = stage_units(job, stage), job.dtype.itemsize, job.config.zero
    accumulates = zero < 2 and job.config.micro_batches > 1  # unsharded gradients
    reduces = (later or not accumulates) and not job.splits_backwards
    root, layer = units.around, units.largest
    sums = units.trained_numel * FLOAT32 if accumulates and later else 0
    prefetched = layer.gathered(size) if zero == 3 and layer.numel > layer.shard else 0
    # What reduces gradients stays until the next reduction: the root's of the micro-batch before, or a layer's, whose
    # activations are gone.
    reducing = root.reduced * FLOAT32 if zero >= 2 and later else 0
    trained, weights = units.trained_numel - root.trained_numel, units.gathered(size) - root.gathered(size)
    whole = sums + reducing + root.gathered(size) + (prefetched if zero == 3 else weights)
    if stage == job.last_stage:
        yield "loss", 0, whole, 0
    # Of the layer before the last.
    reduction = layer.reduced * FLOAT32 - reducing if reduces and len(units.layers) > 1 else 0
    yield "last layer", 0, whole + (layer.gathered(size) if zero == 3 else 0), reduction
    whole = sums + root.gathered(size) + (layer.gathered(size) if reduces or zero == 3 else weights)
    gradients = (units.trained_shard - root.trained_shard - layer.trained_shard) * FLOAT32 if reduces else 0
    whole += FLOAT32 * (layer.reduced if reduces else 0 if later else trained - layer.trained_numel)
    yield "first layer", gradients, whole, 0
    if reduces:
        gradients += layer.trained_shard * FLOAT32
        copies = root.trained_numel * (FLOAT32 if accumulates else size) + root.reduced * FLOAT32
        yield "root reduced", gradients, copies, 0


@shared(lambda job, r: (job.sharding, job.place("pp", r), job.config.zero, job.config.micro_batches > 1, job.dtype))
def _shard_peaks(job: Job, rank: int) -> Mapping[Backward, Sequence[tuple[str, int, int, int]]]:
    """Return the peaks of each backward that a rank may have as by `_backward`, with what its other stage holds."""
    found, stages = {}, job.stages(rank)
    for stage, half, later in product(stages, (False, True), (False, True)):
        idle = sum(_idle(job, other, later) for other in stages if other != stage)
        peaks = [("split backward", 0, _idle(job, stage, True), 0)] if half else _backward(job, stage, later)
        found[stage, half, later] = [(name, reduced, whole + idle, more) for name, reduced, whole, more in peaks]
    return found


@shared(lambda job, rank: (job.work, job.config.ac_offload, job.schedule(rank)))
def _activation_peaks(job: Job, rank: int) -> tuple[int, Sequence[tuple[Backward, Sequence[tuple[int, ...]]]]]:
    """Return (the bytes of buffers for hidden states, what activations take at the peaks of each backward as in
    `_shard_peaks`: what is saved, the work, the gradient of the head, and what a layer has freed)."""
    found, stages, size = [], {stage: stage_bytes(job, stage) for stage in job.stages(rank)}, job.dtype.itemsize
    bytes_of = {stage: here.saved for stage, here in stages.items()}
    bytes_of |= {~stage: here.left for stage, here in stages.items()}
    for (stage, half, later), flights in _backwards(job.schedule(rank)).items():
        here, others = stages[stage], _most(flights, bytes_of) - bytes_of[stage]
        # Offloading leaves two layers' activations again.
        freed = 0 if job.config.ac_offload and len(job.stage_layers[stage]) > 2 else here.at_first
        first, last = (others + here.outside + saved for saved in (here.at_first, here.at_last))
        peaks = [(last + here.head, here.logits, 0, 0)] if stage == job.last_stage else []
        peaks += [(each, here.backward, size * here.of_head, freed) for each in (last, first)] + [(others, 0, 0, 0)]
        if half:
            split = here.left + FLOAT32 * max(here.of_head, 5 * job.outer_tokens * job.model.hidden_size)
            peaks = [(others + here.saved, split, 0, 0)]
        found.append(((stage, half, later), peaks))
    # Hidden states that torch keeps for all micro-batches: of both neighbours, if there are two.
    neighbours = sum((stage > 0) + (stage < job.last_stage) for stage in stages)
    return job.config.micro_batches * neighbours * max(here.handed for here in stages.values()), found


@dataclass(frozen=True)
class Footprint:
    """A rank's memory in one step, in bytes. With `--optim-offload` shards and moments are on the host."""

    parameters: int  # float32 shards of the weights
    gradients: int  # likewise
    optimizer: int  # its states
    activations: int  # saved between forward and backward on the device, over all micro-batches in flight
    host: int  # the peak of host memory
    peak: Moment  # the highest of the step on the device


def footprint(job: Job, rank: int) -> Footprint:
    """Return the memory of `rank`."""
    flights = chain(*_backwards(job.schedule(rank)).values())
    activations = _most(flights, {stage: stage_bytes(job, stage).saved for stage in job.stages(rank)})
    return Footprint(*_states(job, rank), activations, rank_host_bytes(job, rank), peak_moment(job, rank))


@shared(lambda job, rank: (job.sharding, job.place("pp", rank), job.weights, job.config.optimizer))
def _states(job: Job, rank: int) -> tuple[int, int, int]:
    """Return the bytes of (parameters, gradients, optimizer) in the shards of `rank`."""
    gradients = FLOAT32 * (trained := elements(job, rank, "trained_shard"))
    frozen = elements(job, rank, "shard") - trained
    optimizer, special = job.optimizer.states * gradients, job.optimizer.of_matrices
    if special:
        matrices = sum(sum(matrix_elements(job, stage)) for stage in job.stages(rank))
        optimizer += (special.states - job.optimizer.states) * FLOAT32 * matrices
    return gradients + frozen * job.weights.itemsize, gradients, optimizer


def peak_moment(job: Job, rank: int) -> Moment:
    """Return the highest of a step's peaks on the device."""
    parameters, shards, optimizer = _states(job, rank)
    config, most = job.config, shards
    if config.optim_offload and not (config.zero >= 2 and config.micro_batches > 1 and job.dims.dp_replicate > 1):
        # A gradient goes to the host once it is reduced, over replicas as well.
        most = FLOAT32 * max(stage_units(job, stage).largest_gradient for stage in job.stages(rank))
    of_shards, total, (buffers, backwards) = _shard_peaks(job, rank), -1, _activation_peaks(job, rank)
    for backward, of_activations in backwards:
        every = config.zero >= 2 and backward[2]  # gradients, because another backward has run
        peaks = zip(of_shards[backward], of_activations, strict=False)  # the last is only of a backward that reduces
        for (name, reduced, whole, reduction), (saved, work, of_head, freed) in peaks:
            gradients = min(most, shards if every else reduced)
            whole += of_head + (reduction - freed if reduction > freed else 0)
            if (found := gradients + whole + saved + work) > total:
                total, parts = found, (name, 0, 0, gradients, whole, saved, work + buffers)
    highest = Moment(*parts)  # pyright: ignore[reportArgumentType]
    if config.optim_offload:
        return highest
    update = 0
    if special := job.optimizer.of_matrices:
        layers = [job.model.layers[kind] for kind, _ in job.kinds(*job.stages(rank))]
        matrices = [p for layer in layers for p in (*layer.parameters, *layer.experts) if len(p.shape) > 1]
        update = special.temporary * max(math.prod(p.shape[-2:]) for p in matrices)
    if shards + update > total:
        highest = Moment("optimizer", gradients=shards, transient=buffers + update)
    return highest._replace(parameters=parameters, optimizer=optimizer)


def largest_footprint(job: Job) -> tuple[Footprint, int]:
    """Return (the memory of the pipeline stage that needs most, the first rank that has it)."""
    footprints = ((footprint(job, rank), rank) for rank in job.ranks("pp", 0))
    return max(footprints, key=lambda pair: pair[0].peak.total)


def rank_host_bytes(job: Job, rank: int) -> int:
    """Return `Footprint.host` of `rank`."""
    saved = 0
    if job.config.ac_offload:
        flights = chain(*_backwards(job.schedule(rank)).values())
        saved = _most(flights, {stage: stage_bytes(job, stage).layers for stage in job.stages(rank)})
    if not job.config.optim_offload:
        return saved
    shards = FLOAT32 * elements(job, rank, "trained_shard")
    # With one reduction, gradients arrive as activations are freed.
    reduces_each = job.config.zero >= 2 and job.config.micro_batches > 1
    return 3 * shards + (saved + shards if reduces_each else max(saved, shards))


def host_bytes(job: Job, devices: int) -> int:
    """Return the most bytes that the ranks of one host keep in its memory, `devices` ranks on each host."""
    saved = [rank_host_bytes(job, rank) for rank in job.ranks("pp", 0)]
    if job.world_size // job.dims.pp % devices == 0:  # a host has ranks of one stage
        return devices * max(saved)
    hosts: Counter[int] = Counter()
    for rank in range(job.world_size):
        hosts[rank // devices] += saved[job.place("pp", rank)]
    return max(hosts.values())


@lru_cache(maxsize=4096)
def _backwards(schedule: Schedule) -> Mapping[Backward, Sequence[Flight]]:
    """Return the most that is in flight at a rank's backwards: micro-batches by stage, and by ~stage between halves."""
    live = dict.fromkeys((key for _, stage, _ in actions(schedule) for key in (stage, ~stage)), 0)
    flights: defaultdict[Backward, set[Flight]] = defaultdict(set)
    for kind, stage, micro_batch in actions(schedule):
        half = kind == "inputs"
        if kind == "backward" or (kind != "forward" and half == (stage > 0)):  # the first stage has no input half
            flights[stage, half, micro_batch > 0].add(tuple(live.items()))
        live[stage] += {"forward": 1, "inputs": 0}.get(kind, -1)
        if stage:
            live[~stage] += {"inputs": 1, "weights": -1}.get(kind, 0)
    return {
        backward: [tuple(filter(itemgetter(1), a)) for a in of if not any(a != b and all(map(le, a, b)) for b in of)]
        for backward, of in flights.items()
    }


def _most(flights: Iterable[Flight], bytes_of: Mapping[int, int]) -> int:
    """Return the most bytes in flight, where a micro-batch of a stage takes `bytes_of` it."""
    return max(sum(number * bytes_of.get(stage, 0) for stage, number in flight) for flight in flights)


def forward_memory(job: Job, rank: int) -> Moment:
    """Return the peak of a job that is not trained. Nothing is saved, and one layer's tensors exist at a time."""
    stages, facts, size = [stage_units(job, stage) for stage in job.stages(rank)], job.model.facts, job.dtype.itemsize
    hidden, inside = (tokens * job.model.hidden_size * size for tokens in (job.outer_tokens, job.tokens))

    def copied(unit: Unit) -> int:
        """Return the bytes of a unit's weights in a forward besides the stored shard."""
        return 0 if unit.ranks == 1 and job.weights == job.dtype else unit.gathered(size)

    # ZeRO-3 has the current layer and the next one, the others have all.
    layers = [[sum(map(copied, layer)) for layer in stage.layers] for stage in stages]
    gathered = max(sum(sorted(each)[-2:] if job.config.zero == 3 else each) for each in layers)
    gathered += max(sum(map(copied, stage.root)) for stage in stages)
    q, kv, out = _attention(job)
    attention = (q + out + kv // 2) * (2 if job.dims.ulysses > 1 else 1) + (kv if job.dims.ring > 1 else 0)
    mlp = min(job.config.mlp_tile or job.tokens, job.layout.local_len) * job.rows * 3 * facts.intermediate_size
    mlp //= job.dims.tp
    if job.model.facts.experts_per_token:
        rows = job.outer_tokens * job.model.facts.experts_per_token
        mlp = rows * (2 * job.model.hidden_size + 3 * job.model.expert_size)
    work = inside + max(hidden + mlp * size, attention * size)
    if job.last_stage in job.stages(rank) and job.output in ("loss", "logprobs"):
        logits = min(job.config.loss_chunk, job.tokens) * facts.vocab_size // job.dims.tp
        work = max(work, inside - hidden + logits * (FLOAT32 + (size if size < FLOAT32 else 0)))
    # Besides the input: embeddings, what a pipeline sends, rotary tables, ids, positions, labels, indices of sequences.
    work += (2 + (job.dims.pp > 1)) * hidden + 2 * job.tokens * facts.head_dim * size + 5 * job.tokens * INT64
    parameters = sum(stage.shard for stage in stages) * job.weights.itemsize
    return Moment("forward", parameters, whole=gathered, transient=work)
