"""The seconds and the memory of one call of an RLHF step: generation, inference or training, in any layout.

    generate    prefills and decode steps of continuous batching: weights and KV cache are read once per step, at the
                rate of the memory; stages of a pipeline decode one after another
    inference   forwards over packed rows
    train step  the passes of `usp.cost.passes` over packed rows, for every mini-batch and epoch

The data-parallel rank with most tokens sets the pace. Nothing is measured: rates are those of the hardware file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import torch

from attention import SequenceLayout
from parallel import Hardware, bubble_fraction
from usp.config import TrainConfig
from usp.cost.job import Job, Output
from usp.cost.memory.footprint import footprint
from usp.cost.memory.forward_memory import forward_memory
from usp.cost.time.compute import FLOAT32, LOGPROB_PASSES, Product, dtype_name, held_elements, is_matrix
from usp.cost.time.host import layer_launches, rank_launches
from usp.cost.time.pass_seconds import different_layers, pass_seconds
from usp.cost.time.transfers import sent_seconds
from usp.cost.traffic.call_traffic import decode_traffic, sampling_traffic
from usp.cost.traffic.pass_traffic import pass_traffic
from usp.cost.traffic.sharding import gather_counts
from usp.model.facts import NO_ATTENTION, ModelShape
from usp.rlhf.data.partition import balance
from usp.rlhf.graph.calls import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.rows import pack_lengths

from .batching_steps import READ_MULTIPLE, ROW_MULTIPLE, Batching, Sample, batching
from .workload import Workload


@dataclass(frozen=True)
class CallOptions:
    """What a run sets for all calls of a role.

    Attributes:
        dtype: of forward and backward, and of weights that a call does not train.
        slots: sequences that a data-parallel rank decodes at a time.
        loss_chunk: tokens whose logits exist at a time, where the layout says nothing.
        kernel: --attention-kernel.
        pipelined: whether generation splits its slots into a micro-batch for each pipeline stage, all of which work at
            once, as ReaL's does; in rlhf.py's they decode one after another.
        collective_launches: what the host does for a collective, in operators: DTensor's launches it and a wait.
    """

    dtype: torch.dtype = torch.bfloat16
    slots: int = 64
    loss_chunk: int = 2048
    kernel: str = "auto"
    pipelined: bool = False
    collective_launches: float = 2.0


@dataclass(frozen=True)
class CallCost:
    """What a call takes on the rank that needs most.

    Attributes:
        seconds: by part.
        weight_bytes, state_bytes: of the copy of the weights, and of a trained one's optimizer states.
        work_bytes: what the call takes besides these at its peak, KV cache included.
        cache_bytes: of the KV cache.
    """

    seconds: Mapping[str, float] = field(hash=False)
    weight_bytes: int
    work_bytes: int
    state_bytes: int = 0
    cache_bytes: int = 0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def call_cost(
    call: ModelCall,
    layout: CallLayout,
    model: ModelShape,
    workload: Workload,
    hardware: Hardware,
    options: CallOptions = CallOptions(),
) -> CallCost:
    """Return what a call takes.

    Raises:
        ValueError: for a function, which has no model; if the hardware has no peak for the dtype, or connects too few
            devices.
    """
    if isinstance(call.work, Generate):
        return _generate(layout, model, workload, hardware, options)
    if isinstance(call.work, Inference):
        return _inference(call.work, layout, model, workload, hardware, options)
    if isinstance(call.work, TrainStep):
        return _train_step(call.work, layout, model, workload, hardware, options)
    raise ValueError(f"{call.name} is a function, which has no model: its time is not predicted")


def _job(
    layout: CallLayout,
    model: ModelShape,
    options: CallOptions,
    output: Output,
    *,
    tokens: int,
    rows: int,
    micro_batches: int,
    trained: bool = False,
) -> Job:
    config = TrainConfig(
        seq_len=tokens,
        batch_size=rows,
        micro_batches=micro_batches,
        zero=layout.zero,
        sp_layout=layout.sp_layout,
        tp_sequence_parallel=layout.tp_sequence_parallel,
        ac=layout.ac,
        ac_offload=layout.ac_offload,
        mlp_tile=layout.mlp_tile,
        loss_chunk=layout.loss_chunk or options.loss_chunk,
        dtype=dtype_name(options.dtype),
        attention_kernel=options.kernel,
    )
    weights = torch.float32 if trained else options.dtype
    return Job(config, model, layout.dims, trained=trained, output=output, weights=weights, placed=layout.ranks)


def _different_stages(job: Job, hardware: Hardware) -> list[tuple[int, int]]:
    """Return (the first, how many) of the pipeline stages that are alike: in layers, ends, links and gathers."""
    size, found = job.world_size // job.dims.pp, Counter[object]()
    firsts: dict[object, int] = {}
    for stage in range(job.dims.pp):
        ranks = job.global_ranks[stage * size : (stage + 1) * size]
        links = [tuple(rank // n - ranks[0] // n for rank in ranks) for n in (t.devices for t in hardware.tiers) if n]
        # Gathers of ZeRO-3 depend on the micro-batches in flight.
        gathers = gather_counts(job, stage * size, stage) if job.trained and job.config.zero == 3 else ()
        kind = (*job.kinds(stage).items(), stage == 0, stage == job.dims.pp - 1, *links, gathers)
        found[kind] += 1
        firsts.setdefault(kind, stage)
    return [(firsts[kind], number) for kind, number in found.items()]


def forward_job(layout: CallLayout, model: ModelShape, options: CallOptions) -> Job:
    """Return the forward of a layout over the shortest row that it can divide: its weights matter alone."""
    multiple = SequenceLayout.multiple_of(layout.sp_layout, layout.dims.ring, layout.dims.ulysses) * layout.dims.tp
    plain = replace(layout, ac="none", ac_offload=False)
    return _job(plain, model, options, "values", tokens=multiple, rows=1, micro_batches=1)


@dataclass(frozen=True)
class Rows:
    """Micro-batches of packed sequences.

    Attributes:
        visible: the part of a causal row's attention that is inside sequences.
    """

    number: int
    tokens: int
    visible: float


def packed_rows(lengths: tuple[int, ...], layout: CallLayout, unit: int = 1) -> Rows:
    """Return the rows of the data-parallel rank with most tokens, as `usp.rlhf.roles.rows` packs them."""
    number, longest, pairs = _rows(lengths, layout.dims.batch, unit, layout.token_budget, layout.dims.pp)
    multiple = SequenceLayout.multiple_of(layout.sp_layout, layout.dims.ring, layout.dims.ulysses)
    row_len = -(-longest // (multiple * layout.dims.tp)) * multiple * layout.dims.tp
    return Rows(number, row_len, min(1.0, pairs / (number * row_len**2)))


def mini_batch_rows(work: TrainStep, layout: CallLayout, workload: Workload) -> Counter[Rows]:
    """Return the rows of a train step's mini-batches, and how many mini-batches have them."""
    unit, lengths = work.objective.unit, workload.sequences
    each = -(-len(lengths) // unit // work.mini_batches) * unit
    mini_batches = [lengths[first : first + each] for first in range(0, len(lengths), each)]
    return Counter(packed_rows(mini_batch, layout, unit) for mini_batch in mini_batches)


@lru_cache(maxsize=1024)
def _rows(lengths: tuple[int, ...], parts: int, unit: int, budget: int, at_least: int) -> tuple[int, int, int]:
    """Return (rows, tokens of the longest row, pairs of tokens in sequences), the most of any data-parallel rank."""
    packed = []
    for part in balance(range(len(lengths)), lengths, parts, unit):
        own = [lengths[index] for index in part]
        rows = pack_lengths(range(len(own)), own, unit=unit, budget=budget, at_least=at_least)
        packed.append([[own[index] for index in row] for row in rows])
    longest = max(sum(row) for rows in packed for row in rows)
    pairs = max(sum(length**2 for row in rows for length in row) for rows in packed)
    return max(map(len, packed)), longest, pairs


def _inference(
    work: Inference, layout: CallLayout, model: ModelShape, workload: Workload, hardware: Hardware, options: CallOptions
) -> CallCost:
    output: Output = "logprobs" if work.head == "logprobs" else "values"
    rows = packed_rows(workload.sequences, layout)
    job = _job(layout, model, options, output, tokens=rows.tokens, rows=rows.number, micro_batches=rows.number)
    places, ranks = _different_stages(job, hardware), job.ranks("pp", 0)
    memory = max((forward_memory(job, ranks[place]) for place, _ in places), key=lambda moment: moment.total)
    return CallCost(
        _passes(job, hardware, rows.visible, options),
        weight_bytes=memory.parameters,
        work_bytes=memory.total - memory.parameters,
    )


def _train_step(
    work: TrainStep, layout: CallLayout, model: ModelShape, workload: Workload, hardware: Hardware, options: CallOptions
) -> CallCost:
    seconds, peaks = defaultdict[str, float](float), []
    for rows, number in mini_batch_rows(work, layout, workload).items():
        sizes = {"tokens": rows.tokens, "rows": rows.number, "micro_batches": rows.number}
        job = _job(layout, model, options, work.objective.head, **sizes, trained=True)
        for part, found in _passes(job, hardware, rows.visible, options).items():
            seconds[part] += number * work.epochs * found
        # Of stages that are alike, the first has most micro-batches in flight.
        peaks += [footprint(job, job.ranks("pp", 0)[place]) for place, _ in _different_stages(job, hardware)]
    memory = max(peaks, key=lambda found: found.peak.total)
    kept = memory.parameters + memory.optimizer
    return CallCost(seconds, memory.parameters, memory.peak.total - kept, state_bytes=memory.optimizer)


def _passes(job: Job, hardware: Hardware, visible: float, options: CallOptions) -> dict[str, float]:
    """Return the seconds of a job's passes on the slowest stage, what the host takes longer than those to launch their
    operators, and what other stages are waited for."""

    layers = different_layers(job, hardware)

    def of(rank: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for kind, passed in pass_seconds(job, hardware, rank, layers=layers).items():
            attention = passed.compute.attention
            found[kind] = passed.total - (1 - visible) * attention
        busy = sum(value for kind, value in found.items() if kind != "update")
        found["launch"] = _launch_wait(job, hardware, rank, options, busy)
        return {kind: value for kind, value in found.items() if value}

    stages = (of(job.slowest_ranks[place]) for place, _ in _different_stages(job, hardware))
    slowest = max(stages, key=lambda found: sum(found.values()))
    update = slowest.get("update", 0.0)
    busy, fraction = sum(slowest.values()) - update, bubble_fraction("1f1b", job.dims.pp, job.config.micro_batches)
    return {**slowest, "bubble": busy * fraction / (1 - fraction)} if fraction else slowest


def _launch_wait(job: Job, hardware: Hardware, rank: int, options: CallOptions, busy: float) -> float:
    """Return how much longer than `busy` seconds the host needs to launch operators and collectives of all passes."""
    if not hardware.launch_seconds:
        return 0.0
    collectives = sum(sent.calls for passed in pass_traffic(job, rank).values() for sent in passed if sent.axis != "pp")
    launches = rank_launches(job, rank) + options.collective_launches * collectives
    return max(0.0, launches * hardware.launch_seconds - busy)


def _prefill_multiple(layout: CallLayout) -> int:
    multiple = SequenceLayout.multiple_of(layout.sp_layout, layout.dims.ring, layout.dims.ulysses)
    return multiple * -(-ROW_MULTIPLE // multiple)


def batchings(layout: CallLayout, workload: Workload, options: CallOptions) -> tuple[Batching, ...]:
    """Return the different continuous batchings of data-parallel ranks that have samples."""
    return _runs(workload, layout.dims.batch, options.slots, layout.dims.sp, _prefill_multiple(layout))


def _generate(
    layout: CallLayout, model: ModelShape, workload: Workload, hardware: Hardware, options: CallOptions
) -> CallCost:
    multiple = _prefill_multiple(layout)
    runs = batchings(layout, workload, options)
    parts_of_batch = layout.dims.pp if options.pipelined else 1
    shapes = {prefill for run in runs for stretch in run.stretches for prefill in stretch.prefills}
    prefills = {shape: _prefill(layout, model, options, hardware, *shape, parts_of_batch) for shape in shapes}
    job = _prefill_job(layout, model, options, 1, multiple)
    step = cache(lambda slots: decode_step(job, hardware, slots, parts_of_batch, options.collective_launches))

    def seconds(run: Batching) -> tuple[float, float]:
        prefill = sum(prefills[shape] for stretch in run.stretches for shape in stretch.prefills)
        decode = step(run.slots)
        return prefill, sum(each.steps * decode.seconds(each.length, run.places) for each in run.stretches)

    prefill, steps = max(map(seconds, runs), key=sum)
    cache_bytes = max(run.slots * run.places for run in runs) * bytes_per_place(job)
    work = max((_prefill_bytes(layout, model, options, *shape) for shape in shapes), default=0)
    return CallCost(
        {"prefill": prefill, "decode": steps},
        weight_bytes=max(held_elements(job, rank) for rank in job.ranks("pp", 0)) * job.weights.itemsize,
        work_bytes=cache_bytes + work,
        cache_bytes=cache_bytes,
    )


@lru_cache(maxsize=256)
def _runs(workload: Workload, parts: int, slots: int, ranks: int, multiple: int) -> tuple[Batching, ...]:
    """Return the different batchings of data-parallel ranks, of which `ranks` share a sequence."""
    size = workload.group_size
    lengths = list(zip(workload.prompts, workload.responses, strict=True))
    balanced = balance(range(len(lengths)), workload.prompts, parts, size)
    samples = {tuple(Sample(n // size, *lengths[i]) for n, i in enumerate(part)): None for part in balanced if part}
    return tuple(batching(part, workload.limit, slots=slots, ranks=ranks, multiple=multiple) for part in samples)


def _prefill_job(layout: CallLayout, model: ModelShape, options: CallOptions, rows: int, tokens: int) -> Job:
    return _job(layout, model, options, "cache", tokens=tokens, rows=rows, micro_batches=1)


def _prefill(
    layout: CallLayout,
    model: ModelShape,
    options: CallOptions,
    hardware: Hardware,
    rows: int,
    tokens: int,
    micro_batches: int,
) -> float:
    """Return the time of a forward over prompts in micro-batches, each of which passes one stage after another."""
    job = _prefill_job(layout, model, options, -(-rows // micro_batches), tokens)
    layers, stages = different_layers(job, hardware), []
    for place, number in _different_stages(job, hardware):
        rank = job.slowest_ranks[place]
        busy = pass_seconds(job, hardware, rank, layers=layers)["forward"].total
        stages += [busy + _launch_wait(job, hardware, rank, options, busy)] * number
    return sum(stages) + (micro_batches - 1) * max(stages)


def _prefill_bytes(layout: CallLayout, model: ModelShape, options: CallOptions, rows: int, tokens: int) -> int:
    moment = forward_memory(_prefill_job(layout, model, options, rows, tokens), 0)
    return moment.total - moment.parameters


@dataclass(frozen=True)
class DecodeStep:
    """The time of a decode step of all slots, the stages one after another.

    Attributes:
        fixed: seconds of products, which read the weights, of communication and of sampling.
        per_place: seconds to read one place of the cache of every slot.
        launches: seconds in which the host launches the layers' operators: a step takes at least as long.
    """

    fixed: float
    per_place: float
    launches: float = 0.0

    def seconds(self, length: float, places: int) -> float:
        """Return the time with `length` of `places` in use, up to a multiple of which the cache is read."""
        read = min(-(-length // READ_MULTIPLE) * READ_MULTIPLE, places)
        return max(self.launches, self.fixed + self.per_place * read)


def decode_step(
    job: Job, hardware: Hardware, slots: int, micro_batches: int = 1, collective_launches: float = 2.0
) -> DecodeStep:
    """Return the time of a decode step, whose micro-batches follow one another without a pause.

    Args:
        job: with output="cache".
        micro_batches: 1, or as many as there are stages: then these take turns, and the slowest one sets the pace.
        collective_launches: see `CallOptions`.
    """
    # Where the cache is sharded, attention is computed in float32 copies of it.
    passes = 1 + (2 * FLOAT32 / job.dtype.itemsize if job.dims.sp > 1 and job.dtype.itemsize < FLOAT32 else 0)
    rows, ranks = -(-slots // micro_batches), job.ranks("pp", 0)
    read, fixed, launched = [], [], []
    for place, number in _different_stages(job, hardware):
        rank = ranks[place]
        (stage,) = job.stages(rank)
        collectives = sum(sent.calls for sent in decode_traffic(job, rank, rows) if sent.axis != "pp")
        operators = sum(layer_launches(job, job.model.layers[index]) for index in job.stage_layers[stage])
        read += [float(_bytes_per_place(job, stage))] * number
        fixed += [_stage_seconds(job, hardware, rank, rows)] * number
        launched += [operators + collective_launches * collectives] * number

    def step(stages: list[float]) -> float:
        return sum(stages) if micro_batches == 1 else micro_batches * max(stages)

    per_place = hardware.memory_seconds(rows * step(read) * passes)
    return DecodeStep(step(fixed), per_place, step(launched) * hardware.launch_seconds)


def bytes_per_place(job: Job) -> int:
    """Return the bytes of one token's keys and values on the pipeline rank that has most."""
    return max(_bytes_per_place(job, stage) for stage in range(job.dims.pp))


def _bytes_per_place(job: Job, stage: int) -> int:
    facts = job.model.facts
    each = facts.num_kv_heads // job.dims.tp * (facts.head_dim + facts.value_dim) * job.dtype.itemsize
    return _attending(job, stage) * each


def _attending(job: Job, stage: int) -> int:
    windows = job.model.facts.windows
    return sum(windows[index] != NO_ATTENTION for index in job.stage_layers[stage])


def _stage_seconds(job: Job, hardware: Hardware, rank: int, slots: int) -> float:
    """Return the time of one stage's decode step without attention: products, traffic, and sampling on the last."""
    (stage,), tp, dtype = job.stages(rank), job.dims.tp, dtype_name(job.dtype)
    total = 0.0
    for index, number in job.kinds(stage).items():
        layer = job.model.layers[index]
        products = [
            Product.of(slots, p.local(tp)[1], p.local(tp)[0], job.dtype.itemsize)
            for p in layer.parameters
            if is_matrix(p)
        ]
        rows = slots * job.model.experts_per_token
        for p in layer.experts:
            chosen = min(p.numel / job.dims.ep, rows * p.numel / p.shape[0])  # weights of experts that have a token
            products.append(Product(2.0 * rows / job.dims.ep * p.numel / p.shape[0], chosen, job.dtype.itemsize))
        total += number * sum(product.seconds(hardware, dtype) for product in products)
    traffic = decode_traffic(job, rank, slots) + sampling_traffic(job, rank, slots)
    total += sum(sent_seconds(job, hardware, sent, rank) for sent in traffic)
    if stage == len(job.stage_layers) - 1:
        weights = [p for p in job.model.head or job.model.embedding if is_matrix(p)]
        for p in weights:
            total += Product.of(slots, p.shape[1], p.shape[0] / tp, job.dtype.itemsize).seconds(hardware, dtype)
            total += hardware.memory_seconds(sum(LOGPROB_PASSES) * slots * p.shape[0] * FLOAT32)
    return total
