"""The traffic, seconds and memory of one call of an RLHF step: generation, inference or training, in any layout.

    generate    prefills and decode steps of continuous batching: weights and KV cache are read once per step, at the
                rate of the memory; stages of a pipeline decode one after another
    inference   forwards over packed rows
    train step  the passes of `usp.predict.seconds` over packed rows, for every mini-batch and epoch

The data-parallel rank with most tokens sets the pace. Nothing is measured: rates are those of the hardware file."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from usp.attention import SequenceLayout
from usp.config import TrainConfig
from usp.model.facts import NO_ATTENTION, ModelShape
from usp.parallel import Hardware
from usp.predict.compute import LOGPROB_PASSES, Product, dtype_name, is_matrix
from usp.predict.job import Job, Output
from usp.predict.memory import Moment, forward_memory, peak_moment
from usp.predict.seconds import rank_launches, rank_seconds, sent_seconds, step_seconds
from usp.predict.traffic import FLOAT32, FLOAT64, Sent, all_reduce, elements, expert_traffic, merged
from usp.rlhf.generation.decoding import read_length, row_multiple
from usp.rlhf.graph import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.rows import pack_lengths
from usp.rlhf.samples import balance, kept_together

from .workload import Batching, Sample, Workload, batching

_OPTIONS = ("zero", "sp_layout", "tp_sequence_parallel", "ac", "ac_offload", "mlp_tile")  # of a configuration
_DECODE_COLLECTIVE = 2.0  # operators that a collective of a decode step takes the host: DTensor's, and a wait


def decode_traffic(job: Job, rank: int, slots: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in the forward of one decode step of `slots` sequences: every rank of ring x ulysses
    computes all of their tokens, with its part of the cache."""
    facts, tp, sp = job.model.facts, job.dims.tp, job.dims.sp
    hidden = slots * job.model.hidden_size * job.dtype.itemsize
    partial = slots * facts.num_heads // tp * (facts.value_dim * job.dtype.itemsize + FLOAT32)  # outputs, log-sum-exps
    (stage,), parts = job.stages(rank), []
    if stage == 0:
        parts.append(all_reduce("tp", hidden, tp, functional=True))
    for index, number in job.kinds(stage):
        experts = job.model.layers[index].experts
        layer = [Sent("sp", "_allgather_base_", partial * (sp - 1))]
        layer.append(all_reduce("tp", hidden, tp, functional=True).times(1 if experts else 2))
        if experts and job.dims.ep > 1:  # each token is sent by one rank
            tokens = -(-slots // (tp * sp))
            gathered = tokens * tp * job.model.hidden_size * job.dtype.itemsize
            layer += [*expert_traffic(job, tokens, gathers=True), Sent("sp", "_allgather_base_", gathered * (sp - 1))]
        parts += [sent.times(number) for sent in layer]
    if stage + 1 < len(job.stage_layers):
        parts.append(Sent("pp", "send", hidden))
    return merged(parts, job)


@dataclass(frozen=True)
class CallOptions:
    """What a run sets for all calls of a role."""

    dtype: torch.dtype = torch.bfloat16  # of forward and backward, and of weights that a call does not train
    slots: int = 64  # sequences that a data-parallel rank decodes at a time
    loss_chunk: int = 2048  # tokens whose logits exist at a time, where the layout says nothing
    kernel: str = "auto"  # --attention-kernel
    pipelined: bool = False  # stages decode a micro-batch each at once, as in ReaL; in rlhf.py one after another
    collective_launches: float | None = None  # of the host for a collective, in operators; None: as our runtime's
    prefetches: bool = True  # compute hides the traffic of parameters and gradients in training
    share_prefixes: bool = False  # --share-prefixes
    cache_tokens: int = 0  # --cache-tokens
    begun: float = 1.0  # times the prompts of a step are begun
    cuda_graphs: bool = False  # have decode steps, where they can


@dataclass(frozen=True)
class CallCost:
    """What a call takes on the rank that needs most."""

    seconds: Mapping[str, float] = field(hash=False)  # by part
    work_bytes: int  # besides weights and optimizer states at the peak, KV cache included
    cache_bytes: int = 0  # of the KV cache

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def weight_elements(layout: CallLayout, model: ModelShape, options: CallOptions) -> int:
    """Return the parameter elements of the rank that holds most in a layout."""
    tokens = _prefill_multiple(layout) * layout.dims.tp  # a short row: only weights matter
    job = _job(replace(layout, ac="none", ac_offload=False), model, options, output="values", seq_len=tokens)
    return max(elements(job, rank, "shard") for rank in job.ranks("pp", 0))


def _job(
    layout: CallLayout, model: ModelShape, options: CallOptions, output: Output, trained: bool = False, **sizes: int
) -> Job:
    """Return the forwards of a call, or its step if it is `trained`; `sizes` are fields of a configuration."""
    values: dict[str, Any] = {name: getattr(layout, name) for name in _OPTIONS}
    values |= {"loss_chunk": layout.loss_chunk or options.loss_chunk, "attention_kernel": options.kernel} | sizes
    config = TrainConfig(**values, dtype=dtype_name(options.dtype))
    weights = torch.float32 if trained else options.dtype
    return Job(config, model, layout.dims, trained=trained, output=output, weights=weights, placed=layout.ranks)


def _prefill_multiple(layout: CallLayout) -> int:
    return row_multiple(layout.sp_layout, layout.dims.ring, layout.dims.ulysses)


class CallRows(NamedTuple):
    """Micro-batches of packed sequences."""

    number: int
    tokens: int
    visible: float  # the part of a causal row's attention that is inside sequences


def packed_rows(samples: tuple[Sample, ...], layout: CallLayout, unit: int = 1, *, share: bool = False) -> CallRows:
    """Return the rows of the data-parallel rank with most tokens, as `usp.rlhf.roles.rows` packs them."""
    share &= unit == 1
    number, longest, pairs = _rows(samples, layout.dims.batch, unit, layout.token_budget, layout.dims.pp, share)
    multiple = layout.dims.tp * SequenceLayout.multiple_of(layout.sp_layout, layout.dims.ring, layout.dims.ulysses)
    row_len = -(-longest // multiple) * multiple
    return CallRows(number, row_len, min(1.0, pairs / (number * row_len**2)))


def mini_batch_rows(
    work: TrainStep, layout: CallLayout, workload: Workload, *, share: bool = False
) -> Counter[CallRows]:
    """Return the rows of a train step's mini-batches, and how many mini-batches have them."""
    unit, samples = work.objective.unit, workload.samples
    each = -(-len(samples) // unit // work.mini_batches) * unit
    mini_batches = (samples[first : first + each] for first in range(0, len(samples), each))
    return Counter(packed_rows(mini_batch, layout, unit, share=share) for mini_batch in mini_batches)


@lru_cache(maxsize=1024)
def _rows(
    samples: tuple[Sample, ...], parts: int, unit: int, budget: int, at_least: int, share: bool
) -> tuple[int, int, int]:
    """Return (rows, tokens of the longest row, pairs of tokens in sequences), the most of any data-parallel rank."""
    packed, pairs, together = [], [], unit
    if share:
        together = kept_together(len(samples), max(Counter(sample.group for sample in samples).values()), parts)
    for part in balance(range(len(samples)), [sample.tokens for sample in samples], parts, together):
        own = [samples[index] for index in part]
        ids, shared = _families(own, budget) if share else (range(len(own)), [0] * len(own))
        lengths = [sample.tokens - less for sample, less in zip(own, shared, strict=True)]
        rows = pack_lengths(ids, lengths, unit=unit, budget=budget, at_least=at_least)
        packed.append([sum(lengths[index] for index in row) for row in rows])
        pairs.append(sum(sample.tokens**2 - less**2 for sample, less in zip(own, shared, strict=True)))
    return max(map(len, packed)), max(map(max, packed)), max(pairs)


def _families(samples: Sequence[Sample], budget: int) -> tuple[list[int], list[int]]:
    """Return the family of each sample, which shares a prompt, and how many tokens it has from an earlier member: all
    of the prompt's but the last, whose label differs. A family has at most `budget` tokens; 0: no limit."""
    families, shared, number, filled = [], [], -1, 0
    for before, sample in zip([None, *samples], samples, strict=False):
        common = sample.prompt - 1 if before is not None and before.group == sample.group else 0
        if budget and filled + sample.tokens - common > budget:
            common = 0
        number, filled = (number, filled + sample.tokens - common) if common else (number + 1, sample.tokens)
        families.append(number)
        shared.append(common)
    return families, shared


@lru_cache(maxsize=256)
def _batchings(
    workload: Workload, parts: int, slots: int, cache_tokens: int, ranks: int, multiple: int, begun: float
) -> tuple[Batching, ...]:
    """Return the different continuous batchings of data-parallel ranks that have samples."""
    size, each = workload.group_size, workload.samples
    balanced = balance(range(len(workload.prompts)), workload.prompts, parts, size)
    samples = {tuple(each[i]._replace(group=n // size) for n, i in enumerate(part)): None for part in balanced if part}
    limits: Any = {"slots": slots, "ranks": ranks, "multiple": multiple, "cache_tokens": cache_tokens, "begun": begun}
    return tuple(batching(part, workload.limit, **limits) for part in samples)


@dataclass(frozen=True)
class Calls:
    """The calls of a model in a layout."""

    layout: CallLayout
    model: ModelShape
    workload: Workload
    hardware: Hardware
    options: CallOptions = CallOptions()

    def cost(self, call: ModelCall) -> CallCost:
        """Return what a call takes; raise ValueError for functions, and hardware too small or without the dtype."""
        if isinstance(call.work, Generate):
            return self._generation()
        if isinstance(call.work, Inference | TrainStep):
            return self._packed(call.work)
        raise ValueError(f"{call.name} is a function, which has no model: its time is not predicted")

    def prefill(self, rows: int, tokens: int) -> float:
        """Return the time of a forward over prompts in micro-batches, each of which passes one stage after another."""
        micro_batches = self.layout.dims.pp if self.options.pipelined else 1
        job = self._job("cache", seq_len=tokens, batch_size=-(-rows // micro_batches))
        each = self.options.collective_launches
        stages = [rank_seconds(job, self.hardware, rank, collective=each)[0].total for rank in job.slowest_ranks]
        return sum(stages) + (micro_batches - 1) * max(stages)

    def decode(self, run: Batching, length: float) -> float:
        """Return the time of a decode step; the cache is read up to a multiple of the places in use, a `length`."""
        fixed, per_place, launches = self._step(run.slots)
        busy = fixed + per_place * min(read_length(math.ceil(length)), run.places)
        return max(launches, busy) if self.hardware.streams else launches + busy

    def _packed(self, work: Inference | TrainStep) -> CallCost:
        share, trained = self.options.share_prefixes, isinstance(work, TrainStep)
        if isinstance(work, TrainStep):
            batches, output = mini_batch_rows(work, self.layout, self.workload, share=share), work.objective.head
        else:
            batches = Counter([packed_rows(self.workload.samples, self.layout, share=share)])
            output = "logprobs" if work.head == "logprobs" else "values"
        seconds, moments = defaultdict[str, float](float), list[Moment]()
        for rows, number in batches.items():
            sizes = {"seq_len": rows.tokens, "batch_size": rows.number, "micro_batches": rows.number}
            job = replace(self._job(output, trained, **sizes), visible=rows.visible)
            prefetches = self.options.prefetches or not trained
            step = step_seconds(job, self.hardware, prefetches, self.options.collective_launches)
            times = number * (work.epochs if isinstance(work, TrainStep) else 1)
            seconds["passes"] += times * (step.total - step.bubble - step.optimizer)
            seconds["bubble"] += times * step.bubble
            seconds["update"] += times * step.optimizer
            moments += [(peak_moment if trained else forward_memory)(job, rank) for rank in job.slowest_ranks]
        most = max(moments, key=lambda moment: moment.total)
        return CallCost(seconds, most.total - most.parameters - most.optimizer)

    def _generation(self) -> CallCost:
        options, dims = self.options, self.layout.dims
        sizes = dims.sp, _prefill_multiple(self.layout), options.begun
        runs = _batchings(self.workload, dims.batch, options.slots, options.cache_tokens, *sizes)
        shapes = {prefill for run in runs for stretch in run.stretches for prefill in stretch.prefills}
        prefills = {shape: self.prefill(*shape) for shape in shapes}

        def seconds(run: Batching) -> tuple[float, float]:
            prefill = sum(prefills[shape] for stretch in run.stretches for shape in stretch.prefills)
            return prefill, sum(stretch.steps * self.decode(run, stretch.length) for stretch in run.stretches)

        prefill, decode = max(map(seconds, runs), key=sum)
        place_bytes = max(_bytes_per_place(self._decoding, stage) for stage in range(dims.pp))
        cache_bytes = max(run.slots * run.places for run in runs) * place_bytes
        moments = [forward_memory(self._job("cache", seq_len=tokens, batch_size=rows), 0) for rows, tokens in shapes]
        work = max((moment.total - moment.parameters for moment in moments), default=0)
        return CallCost({"prefill": prefill, "decode": decode}, cache_bytes + work, cache_bytes)

    def _job(self, output: Output, trained: bool = False, **sizes: int) -> Job:
        return _job(self.layout, self.model, self.options, output, trained, **sizes)

    @cached_property
    def _decoding(self) -> Job:
        return self._job("cache", seq_len=_prefill_multiple(self.layout))

    @cached_property
    def _step(self) -> Callable[[int], tuple[float, float, float]]:
        return cache(self._decode_step)

    def _decode_step(self, slots: int) -> tuple[float, float, float]:
        """Return the seconds of a decode step: of products, communication and sampling; to read a place of the cache of
        every slot; and in which the host launches its operators, the least that the step takes."""
        micro_batches = self.layout.dims.pp if self.options.pipelined else 1  # the slowest stage sets the pace
        job, rows, stages = self._decoding, -(-slots // micro_batches), []
        for rank in job.ranks("pp", 0):
            each = _DECODE_COLLECTIVE if self.options.collective_launches is None else self.options.collective_launches
            launched = rank_launches(job, self.hardware, rank, decode_traffic(job, rank, rows), each)
            fixed, read = _stage_seconds(job, self.hardware, rank, rows), _bytes_per_place(job, *job.stages(rank))
            stages.append((fixed, float(read), launched))
        fixed, read, launched = (
            sum(each) if micro_batches == 1 else micro_batches * max(each) for each in zip(*stages, strict=True)
        )
        per_place = self.hardware.memory_seconds(rows * read)
        replays = self.options.cuda_graphs and self.hardware.streams and job.dims.pp == 1
        if replays and not job.model.facts.experts_per_token:
            launched = 1.0
        return fixed, per_place, launched * self.hardware.launch_seconds


def _bytes_per_place(job: Job, stage: int) -> int:
    """Return the bytes of one token's keys and values on a pipeline stage."""
    facts = job.model.facts
    of_heads = facts.num_kv_heads // job.dims.tp * (facts.head_dim + facts.value_dim)
    each = facts.latent if facts.latent and job.dims.tp == 1 else of_heads
    return sum(facts.windows[index] != NO_ATTENTION for index in job.stage_layers[stage]) * each * job.dtype.itemsize


def _stage_seconds(job: Job, hardware: Hardware, rank: int, slots: int) -> float:
    """Return the time of one stage's decode step without attention: products, traffic, and sampling on the last."""
    (stage,), tp, dtype = job.stages(rank), job.dims.tp, dtype_name(job.dtype)
    total = 0.0
    for index, number in job.kinds(stage):
        layer = job.model.layers[index]
        matrices = [p.local(tp) for p in layer.parameters if is_matrix(p)]
        products = [Product.of(slots, inputs, outputs, job.dtype.itemsize) for outputs, inputs, *_ in matrices]
        rows = slots * job.model.facts.experts_per_token
        for p in layer.experts:
            chosen = min(p.numel / job.dims.ep, rows * p.numel / p.shape[0])  # weights of experts that have a token
            products.append(Product(2.0 * rows / job.dims.ep * p.numel / p.shape[0], chosen, job.dtype.itemsize))
        total += number * sum(product.seconds(hardware, dtype) for product in products)
    # To sample, logits are gathered, and tokens broadcast with their log-probabilities.
    sampling = [Sent(axis, "broadcast_", 2 * slots * FLOAT64) for axis in ("tp", "sp", "pp")]
    if stage == job.last_stage and job.place("sp", rank) == 0:
        logits = slots * job.model.facts.vocab_size // tp * job.dtype.itemsize
        sampling.append(Sent("tp", "_allgather_base_", logits * (tp - 1)))
    traffic = decode_traffic(job, rank, slots) + merged(sampling, job)
    total += sum(sent_seconds(job, hardware, sent, rank) for sent in traffic)
    if stage == job.last_stage:
        for p in filter(is_matrix, job.model.head or job.model.embedding):
            total += Product.of(slots, p.shape[1], p.shape[0] / tp, job.dtype.itemsize).seconds(hardware, dtype)
            total += hardware.memory_seconds(sum(LOGPROB_PASSES) * slots * p.shape[0] * FLOAT32)
    return total
