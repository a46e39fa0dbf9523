"""The traffic of one optimizer step: forward, backward, gradient norm and the loss's token count.

Payload bytes of one rank, per axis and collective. Attention's come from its execution plan, the others mirror the
collectives in `parallel.tensor`, `parallel.expert`, `parallel.pipeline`, `parallel.fsdp` and `usp.losses`. A run's
digests of the data, step records and checkpoints are not included.

Two assumptions replace data: routers choose experts evenly, so each expert gets the same number of rows from each rank,
and every chunk of the loss has a target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from attention import AttentionSpec, HeadPlan, RingSchedule, SequenceLayout, UnifiedPlan, ring_schedule
from usp.cost.job import Job, LayerShape

from .sent import Sent, all_reduce, merged
from .sharding import FLOAT32, block_fsdp_traffic, fsdp_traffic

FLOAT64 = INT64 = 8


def step_traffic(job: Job, rank: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in one step, without groups of one rank, the most bytes first."""
    parts = [*fsdp_traffic(job, rank), *_sums(job, rank)]
    last = len(job.stage_layers) - 1
    windows = job.model.facts.windows
    attention = {window: attention_traffic(job, rank, window) for window in dict.fromkeys(windows)}
    for stage in job.stages(rank):
        inside = [*_pipeline_traffic(job, stage), *_agreements(job)]
        for index in job.stage_layers[stage]:
            layer = job.model.layers[index]
            inside += [*attention[windows[index]], *_tensor_traffic(job, layer), *_expert_traffic(job, layer)]
        if stage == 0:
            inside += _embedding_traffic(job)
        if stage == last:
            inside += _head_traffic(job)
        parts += [sent.times(job.micro_batches) for sent in inside]
    return merged(sent for sent in parts if job.degree(sent.axis) > 1)


def block_traffic(job: Job, rank: int) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """Return what the first decoder layer of `rank` sends in a step: (for parameters, for activations)."""
    index = job.stage_layers[job.stages(rank)[0]][0]
    layer = job.model.layers[index]
    inside = [*attention_traffic(job, rank, job.model.facts.windows[index])]
    inside += [*_tensor_traffic(job, layer), *_expert_traffic(job, layer)]
    activations = [sent.times(job.micro_batches) for sent in inside if job.degree(sent.axis) > 1]
    return merged(s for s in block_fsdp_traffic(job, rank) if job.degree(s.axis) > 1), merged(activations)


def _sums(job: Job, rank: int) -> Iterator[Sent]:
    """Yield the sums of the token count and of the gradient norm."""
    for axis in ("loss", "pp", "loss", "tp"):
        yield all_reduce(axis, FLOAT64, job.degree(axis))


def _agreements(job: Job) -> Iterator[Sent]:
    """Yield the comparison of a forward's document boundaries over the ranks that share them (`parallel.agree`)."""
    for axis in ("ulysses", "ring"):
        yield all_reduce(axis, 2 * INT64, job.degree(axis))


def attention_plan(job: Job, rank: int, window: int) -> UnifiedPlan:
    """Return the execution plan of a layer's attention for one micro-batch."""
    facts, tp, rows = job.model.facts, job.dims.tp, job.rows // job.micro_batches
    spec = AttentionSpec(causal=True, window=(window - 1, -1) if window else (-1, -1))
    heads = HeadPlan(facts.num_heads // tp, facts.num_kv_heads // tp, job.dims.ulysses)
    ring = _ring(SequenceLayout(job.sp_layout, job.seq_len, job.dims.ring, 1), spec, rows, job.place("ring", rank))
    return UnifiedPlan(job.layout, spec, heads, rows, job.place("ulysses", rank), ring)


@lru_cache(maxsize=64)
def _ring(layout: SequenceLayout, spec: AttentionSpec, rows: int, rank: int) -> RingSchedule:
    """Return a ring's schedule: cached, because it does not depend on the Ulysses degree."""
    return ring_schedule(layout, spec, rows, rank)


def attention_traffic(job: Job, rank: int, window: int) -> tuple[Sent, ...]:
    """Return the traffic of one layer's attention, forward and backward, for one micro-batch.

    Ulysses exchanges q, k, v and the output, and their gradients; the ring passes keys and values in both directions'
    passes and their float32 gradients in the backward. Full recomputation repeats the forward.
    """
    plan, head_dim, itemsize = attention_plan(job, rank, window), job.model.facts.head_dim, job.dtype.itemsize
    heads, mine = plan.heads, plan.ulysses_rank
    others = [other for other in range(heads.ulysses) if other != mine]
    per_head = plan.batch * plan.layout.local_len * head_dim * itemsize
    scattered = per_head * sum(map(heads.width, others)) + per_head * len(others) * heads.q_width(mine)
    returned = per_head * sum(map(heads.q_width, others)) + per_head * len(others) * heads.width(mine)
    per_token = 2 * heads.kv_width(mine) * head_dim
    messages = sum(len(step.send_held) + len(step.send_own) for step in plan.ring.steps)
    forwards = 2 if job.ac == "full" else 1
    grads = sum(len(step.grad_send) for step in plan.ring.steps)
    return (
        Sent("ulysses", "alltoall_base_", scattered, calls=2).times(forwards),
        Sent("ulysses", "alltoall_base_", returned, calls=2),
        Sent("ring", "send", plan.ring.tokens_sent * per_token * itemsize, messages).times(forwards + 1),
        Sent("ring", "send", plan.ring.grad_tokens_sent * per_token * FLOAT32, grads),
    )


def _hidden(job: Job) -> int:
    """Return the bytes of a ring x ulysses rank's hidden states, before tp shards them."""
    return job.tokens * job.model.hidden_size * job.dtype.itemsize


def _gather(job: Job) -> Sent:
    return Sent("tp", "all_gather_into_tensor", _hidden(job) // job.dims.tp * (job.dims.tp - 1))


def _scatter(job: Job) -> Sent:
    return Sent("tp", "reduce_scatter_tensor", _hidden(job) * (job.dims.tp - 1) // job.dims.tp)


def _tensor_traffic(job: Job, layer: LayerShape) -> Iterator[Sent]:
    """Yield the collectives where hidden states enter and leave attention and a dense MLP, forward and backward.

    Recomputation repeats those of the forward except the last, whose result is not saved.
    """
    if job.dims.tp == 1:
        return
    regions = 1 if layer.experts else 2
    enters, leaves = regions, regions
    if job.ac != "none":
        enters, leaves = 2 * enters, 2 * leaves - (0 if layer.experts else 1)
    if job.tp_sequence_parallel:
        yield _gather(job).times(enters + regions)
        yield _scatter(job).times(leaves + regions)
    else:
        yield all_reduce("tp", _hidden(job), job.dims.tp, functional=True).times(leaves + regions)


def _embedding_traffic(job: Job) -> Iterator[Sent]:
    """Yield the sum of the embedding, in which each tensor-parallel rank looks up its own rows of the vocabulary."""
    if job.dims.tp == 1:
        return
    if job.tp_sequence_parallel:
        yield _scatter(job)
        yield _gather(job)
    else:
        yield all_reduce("tp", _hidden(job), job.dims.tp, functional=True)


def _head_traffic(job: Job) -> Iterator[Sent]:
    """Yield the traffic of the last hidden states, the vocabulary-parallel loss, and the routers' auxiliary loss."""
    tp = job.dims.tp
    if tp > 1:
        if job.tp_sequence_parallel:
            yield _gather(job)
        sizes = Counter(min(job.loss_chunk, job.tokens - start) for start in range(0, job.tokens, job.loss_chunk))
        for tokens, number in sizes.items():  # the maximum logit; the sum of exponentials and the target's logit
            yield all_reduce("tp", tokens * FLOAT32, tp).times(number)
            yield all_reduce("tp", 2 * tokens * FLOAT32, tp).times(number)
        yield all_reduce("tp", _hidden(job), tp)
    if job.balance:
        counts = job.model.facts.num_experts * FLOAT32
        yield all_reduce("loss", counts, job.degree("loss"))
        if job.tp_sequence_parallel:
            yield all_reduce("tp", counts, tp)
            yield all_reduce("tp", FLOAT32, tp)


def _pipeline_traffic(job: Job, stage: int) -> Iterator[Sent]:
    """Yield the hidden states sent to the next stage and the gradients sent to the previous one, if on another rank."""
    pp, stages = job.dims.pp, len(job.stage_layers)

    def holder(stage: int) -> int:
        return 2 * pp - 1 - stage if job.pp_schedule == "zero-bubble" and stage >= pp else stage % pp

    messages = [Sent("pp", "send", job.outer_tokens * job.model.hidden_size * job.dtype.itemsize)]
    if job.balance:
        messages.append(Sent("pp", "send", 2 * job.model.facts.num_experts * FLOAT32))
    for other in (stage + 1, stage - 1):
        if 0 <= other < stages and holder(other) != holder(stage):
            yield from messages


def _expert_traffic(job: Job, layer: LayerShape) -> Iterator[Sent]:
    """Yield the row counts, the rows to the experts and back, and their gradients; routers choose experts evenly."""
    if not layer.experts or job.dims.ep == 1:
        return
    ep, itemsize = job.dims.ep, job.dtype.itemsize
    rows = job.outer_tokens * job.model.experts_per_token * (ep - 1) // ep
    counts = Sent("ep", "alltoall_base_", job.model.facts.num_experts * (ep - 1) // ep * INT64)
    exchange = Sent("ep", "alltoall_base_", rows * job.model.hidden_size * itemsize)
    forwards = 1 if job.ac == "none" else 2
    yield counts.times(forwards)
    yield exchange.times(2 * forwards + 2)
