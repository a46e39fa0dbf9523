"""The traffic of one optimizer step: forward, backward, gradient norm and the loss's token count.

Payload bytes of one rank, per axis and collective. Attention's come from its execution plan, the others mirror the
collectives in `parallel.tensor`, `parallel.expert`, `parallel.pipeline`, `parallel.fsdp` and `usp.losses`. A run's
digests of the data, step records and checkpoints are not included.

Two assumptions replace data: routers choose experts evenly, so each expert gets the same number of rows from each rank,
and every chunk of the loss has a target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial

from attention import AttentionSpec, HeadPlan, RingSchedule, SequenceLayout, UnifiedPlan, WireBytes, ring_schedule
from usp.cost.job import Job

from .sent import Sent, all_reduce, merged
from .sharding import FLOAT32, block_fsdp_traffic, fsdp_traffic, tied_traffic

FLOAT64 = INT64 = 8


def step_traffic(job: Job, rank: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in one step, without groups of one rank, the most bytes first."""
    # The token count, the gradient norm, and in each forward the document boundaries (`parallel.agree`).
    parts = [*fsdp_traffic(job, rank), *tied_traffic(job, rank), *_sums(job, FLOAT64, "loss", "pp", "loss", "tp")]
    attention = cache(partial(attention_traffic, job, rank))
    for stage in job.stages(rank):
        inside = [*_pipeline_traffic(job, rank, stage), *_sums(job, 2 * INT64, "ulysses", "ring")]
        for index, number in job.kinds(stage).items():
            inside += (sent.times(number) for sent in _layer_traffic(job, index, attention))
        if stage == 0:  # the embedding is a sum, because each tensor-parallel rank has its own rows of the vocabulary
            inside += _tensor_traffic(job, 1, 1)
        if stage == len(job.stage_layers) - 1:
            inside += _head_traffic(job)
        if job.counts_choices:
            inside += _counting_traffic(job, rank, stage)
        parts += [sent.times(job.config.micro_batches) for sent in inside]
    if job.counts_choices and len(job.stage_layers) - 1 in job.stages(rank):
        parts += _choice_sums(job)
    return merged(sent for sent in parts if job.degree(sent.axis) > 1)


def _counting_traffic(job: Job, rank: int, stage: int) -> Iterator[Sent]:
    """Yield what a stage sends in a micro-batch's forward that only counts the routers' choices."""
    yield from _sums(job, 2 * INT64, "ulysses", "ring")
    if stage + 1 < len(job.stage_layers) and stage + 1 not in job.stages(rank):
        yield from _stage_messages(job)
    if stage == 0:
        yield from _tensor_traffic(job, 0, 1)
    for index, number in job.kinds(stage).items():
        experts, window = job.model.layers[index].experts, job.model.facts.windows[index]
        inside = [*attention_forward_traffic(job, rank, window), *_tensor_traffic(job, *2 * (1 if experts else 2,))]
        if experts:
            inside += _expert_traffic(job, forward_only=True)
        yield from (sent.times(number) for sent in inside)
    if stage == len(job.stage_layers) - 1:
        yield from _tensor_traffic(job, 1, 0)


def block_traffic(job: Job, rank: int) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """Return what the first decoder layer of `rank` sends in a step: (for parameters, for activations)."""
    index = job.stage_layers[job.stages(rank)[0]][0]
    inside = _layer_traffic(job, index, partial(attention_traffic, job, rank))
    activations = [sent.times(job.config.micro_batches) for sent in inside if job.degree(sent.axis) > 1]
    return merged(s for s in block_fsdp_traffic(job, rank) if job.degree(s.axis) > 1), merged(activations)


def _sums(job: Job, nbytes: int, *axes: str) -> list[Sent]:
    return [all_reduce(axis, nbytes, job.degree(axis)) for axis in axes]


def _layer_traffic(job: Job, index: int, attention: Callable[[int], tuple[Sent, ...]]) -> Iterator[Sent]:
    """Yield the traffic of a layer's activations; `attention` returns that of a window.

    Recomputation repeats the collectives where hidden states enter and leave attention and a dense MLP, except the
    last, whose result is not saved.
    """
    layer, recomputes = job.model.layers[index], job.config.ac != "none"
    yield from attention(job.model.facts.windows[index])
    times = (3 if recomputes else 2) * (1 if layer.experts else 2)
    yield from _tensor_traffic(job, times, times - (1 if recomputes and not layer.experts else 0))
    if layer.experts:
        yield from _expert_traffic(job)


def attention_plan(job: Job, rank: int, window: int) -> UnifiedPlan:
    """Return the execution plan of a layer's attention for one sequence; `job.rows` of them take as many times more."""
    facts, tp = job.model.facts, job.dims.tp
    spec = AttentionSpec(causal=True, window=(window - 1, -1) if window else (-1, -1))
    heads = HeadPlan(facts.num_heads // tp, facts.num_kv_heads // tp, job.dims.ulysses)
    layout = SequenceLayout(job.config.sp_layout, job.config.seq_len, job.dims.ring, 1)
    ring = _ring(layout, spec, job.place("ring", rank))
    return UnifiedPlan(job.layout, spec, heads, 1, job.place("ulysses", rank), ring)


@lru_cache(maxsize=256)
def _ring(layout: SequenceLayout, spec: AttentionSpec, rank: int) -> RingSchedule:
    """Return a ring's schedule for one sequence: cached, because it does not depend on the Ulysses degree."""
    return ring_schedule(layout, spec, 1, rank)


def attention_traffic(job: Job, rank: int, window: int) -> tuple[Sent, ...]:
    """Return the traffic of one layer's attention, forward and backward, for one micro-batch.

    Ulysses exchanges q, k, v and the output, and their gradients; the ring passes keys and values in both directions'
    passes and their float32 gradients in the backward. Full recomputation repeats the forward.
    """
    plan, wire = _attention_bytes(job, rank, window)
    forwards = 2 if job.config.ac == "full" else 1
    exchange, keys = attention_forward_traffic(job, rank, window)
    return (
        exchange.times(forwards),
        Sent("ulysses", "alltoall_base_", job.rows * (wire.dout_to_heads + wire.grads_to_seq), calls=2),
        keys.times(forwards + 1),
        Sent("ring", "send", job.rows * wire.grads, sum(len(step.grad_send) for step in plan.ring.steps)),
    )


def attention_forward_traffic(job: Job, rank: int, window: int) -> tuple[Sent, Sent]:
    """Return (Ulysses' exchanges, the ring's messages) of one layer's forward of attention for one micro-batch."""
    plan, wire = _attention_bytes(job, rank, window)
    messages = sum(len(step.send_held) + len(step.send_own) for step in plan.ring.steps)
    return (
        Sent("ulysses", "alltoall_base_", job.rows * (wire.seq_to_heads + wire.heads_to_seq), calls=2),
        Sent("ring", "send", job.rows * wire.keys, messages),
    )


def _attention_bytes(job: Job, rank: int, window: int) -> tuple[UnifiedPlan, WireBytes]:
    plan, facts = attention_plan(job, rank, window), job.model.facts
    return plan, plan.wire_bytes(facts.head_dim, job.dtype, facts.value_dim)


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


def _head_traffic(job: Job) -> Iterator[Sent]:
    """Yield the traffic of the last hidden states, the vocabulary-parallel loss, and the routers' auxiliary loss."""
    tp, chunk = job.dims.tp, job.config.loss_chunk
    yield from _tensor_traffic(job, 1, 0)
    sizes = Counter(min(chunk, job.tokens - start) for start in range(0, job.tokens, chunk))
    for tokens, number in sizes.items():  # the maximum logit; the sum of exponentials and the target's logit
        yield all_reduce("tp", tokens * FLOAT32, tp).times(number)
        yield all_reduce("tp", 2 * tokens * FLOAT32, tp).times(number)
    yield all_reduce("tp", _hidden(job), tp)
    if job.balance and job.config.tp_sequence_parallel:
        yield from _sums(job, FLOAT32, "tp")
    if job.balance and not job.counts_choices:
        yield from _choice_sums(job)


def _choice_sums(job: Job) -> list[Sent]:
    """Return the sums of the routers' choices over the ranks that route different tokens."""
    axes = ("loss", "tp") if job.config.tp_sequence_parallel else ("loss",)
    return _sums(job, job.model.facts.num_experts * FLOAT32, *axes)


def _pipeline_traffic(job: Job, rank: int, stage: int) -> Iterator[Sent]:
    """Yield the hidden states sent to the next stage and the gradients sent to the previous one, if on another rank."""
    for other in (stage + 1, stage - 1):
        if 0 <= other < len(job.stage_layers) and other not in job.stages(rank):
            yield from _stage_messages(job)


def _stage_messages(job: Job) -> Iterator[Sent]:
    """Yield what a stage sends to a neighbor for one micro-batch."""
    yield Sent("pp", "send", job.outer_tokens * job.model.hidden_size * job.dtype.itemsize)
    if job.balance:
        yield Sent("pp", "send", 2 * job.model.facts.num_experts * FLOAT32)


def _expert_traffic(job: Job, forward_only: bool = False) -> Iterator[Sent]:
    """Yield the row counts, the rows to the experts and back, and their gradients; routers choose experts evenly."""
    ep, itemsize = job.dims.ep, job.dtype.itemsize
    rows = job.outer_tokens * job.model.experts_per_token * (ep - 1) // ep
    counts = Sent("ep", "alltoall_base_", job.model.facts.num_experts * (ep - 1) // ep * INT64)
    exchange = Sent("ep", "alltoall_base_", rows * job.model.hidden_size * itemsize)
    forwards = 1 if job.config.ac == "none" or forward_only else 2
    yield counts.times(forwards)
    yield exchange.times(2 * forwards + (0 if forward_only else 2))
