"""The traffic of each pass of a step, in payload bytes of one rank per axis and collective.

    count       forwards without gradients that count the routers' choices (`usp.train.engines.forward_only`)
    forward     with the step's token count
    recompute   what activation checkpointing repeats of the forward
    backward    with the gathers of parameters before it, and the reductions of gradients
    update      the gradient of a tied embedding, and the gradient norm

A job that is not trained has forwards alone. Attention's bytes come from its execution plan, the others mirror the
collectives in `parallel.tensor`, `parallel.expert`, `parallel.pipeline`, `parallel.fsdp` and `usp.losses`. A run's
digests of the data, step records and checkpoints are not included.

Two assumptions replace data: routers choose experts evenly, so each expert gets the same number of rows from each rank,
and every chunk of the loss has a target.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

from usp.cost.job import PASSES, Job, Pass

from .attention_traffic import AttentionTraffic, attention_traffic
from .sent import Sent, all_reduce, merged
from .sharding import FLOAT32, fsdp_traffic, tied_traffic

FLOAT64 = INT64 = 8

ByPass = Mapping[Pass, tuple[Sent, ...]]


def pass_traffic(job: Job, rank: int) -> ByPass:
    """Return what `rank` sends in each pass of all micro-batches, without groups of one rank, the most bytes first."""
    attention = cache(partial(attention_traffic, job, rank))
    parts: defaultdict[Pass, list[Sent]] = defaultdict(list)
    for stage in job.stages(rank):
        inside = _stage_traffic(job, rank, stage, attention)
        parts["forward"] += inside["forward"]
        if job.trained:
            parts["recompute"] += inside["recompute"]
            parts["backward"] += inside["backward"]
        if job.counts_choices:
            parts["count"] += inside["count"]
    for kind in parts:
        parts[kind] = [sent.times(job.config.micro_batches) for sent in parts[kind]]
    for kind, sent in fsdp_traffic(job, rank):
        parts[kind].append(sent)
    if job.trained:
        parts["forward"] += _sums(job, FLOAT64, "loss")
        parts["update"] += [*tied_traffic(job, rank), *_sums(job, FLOAT64, "pp", "loss", "tp")]
    if job.counts_choices and len(job.stage_layers) - 1 in job.stages(rank):
        parts["count"] += _choice_sums(job)
    return {kind: merged(s for s in parts[kind] if job.degree(s.axis) > 1) for kind in PASSES}


def layer_traffic(job: Job, index: int, attention: AttentionTraffic) -> ByPass:
    """Return the traffic of a layer's activations for one micro-batch, groups of one rank included.

    Recomputation repeats the collectives where hidden states enter and leave attention and a dense MLP, except the
    last, whose result is not saved.
    """
    experts, blocks = job.model.layers[index].experts, 1 if job.model.layers[index].experts else 2
    exchanges = list(_expert_traffic(job)) if experts else []
    forward = [*attention.forward, *_tensor_traffic(job, blocks, blocks), *exchanges]
    recompute: list[Sent] = []
    if job.config.ac != "none":
        recompute += attention.forward if job.config.ac == "full" else ()
        recompute += [*_tensor_traffic(job, blocks, 1), *exchanges]
    backward = [*attention.backward, *_tensor_traffic(job, blocks, blocks), *exchanges[1:]]
    return {"forward": tuple(forward), "recompute": tuple(recompute), "backward": tuple(backward)}


def _stage_traffic(
    job: Job, rank: int, stage: int, attention: Callable[[int], AttentionTraffic]
) -> dict[Pass, list[Sent]]:
    """Return what a stage sends for one micro-batch, besides parameters and their gradients."""
    parts: dict[Pass, list[Sent]] = {kind: [] for kind in PASSES}
    for index, number in job.kinds(stage).items():
        for kind, sent in layer_traffic(job, index, attention(job.model.facts.windows[index])).items():
            parts[kind] += [each.times(number) for each in sent]
    if job.output != "cache":  # the document boundaries are compared in each forward (`parallel.agree`)
        parts["forward"] += _sums(job, 2 * INT64, "ulysses", "ring")
    if stage == 0:  # the embedding is a sum, because each tensor-parallel rank has its own rows of the vocabulary
        parts["forward"] += _tensor_traffic(job, 0, 1)
        parts["backward"] += _tensor_traffic(job, 1, 0)
    parts["count"] = list(parts["forward"])
    # Hidden states go to the next stage and their gradients to the previous one, if these are on another rank.
    if stage + 1 < len(job.stage_layers) and stage + 1 not in job.stages(rank):
        parts["forward"] += _stage_messages(job)
        parts["count"] += _stage_messages(job)
    if stage > 0 and stage - 1 not in job.stages(rank):
        parts["backward"] += _stage_messages(job)
    if stage == len(job.stage_layers) - 1:
        last = list(_tensor_traffic(job, 1, 0))
        parts["count"] += last
        head, gradients = _head_traffic(job, rank)
        parts["forward"] += [*(last if job.output != "cache" else ()), *head]
        parts["backward"] += gradients
    return parts


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


def _stage_messages(job: Job) -> Iterator[Sent]:
    """Yield what a stage sends to a neighbor for one micro-batch."""
    yield Sent("pp", "send", job.outer_tokens * job.model.hidden_size * job.dtype.itemsize)
    if job.balance:
        yield Sent("pp", "send", 2 * job.model.facts.num_experts * FLOAT32)


def _expert_traffic(job: Job) -> Iterator[Sent]:
    """Yield the row counts, and the rows to the experts and back, which in a backward are gradients.

    Tensor-parallel ranks with the same tokens send a part of them each, and gather the results. If routers are uneven,
    rows are those of the busiest rank, which receives as many as it sends back.
    """
    ep, tp, itemsize = job.dims.ep, job.dims.tp, job.dtype.itemsize
    shared = ep > 1 and tp > 1 and not job.config.tp_sequence_parallel
    tokens = -(-job.outer_tokens // tp) if shared else job.outer_tokens
    rows = job.busiest_rows(tokens) * (ep - 1) // ep
    yield Sent("ep", "alltoall_base_", job.model.facts.num_experts * (ep - 1) // ep * INT64)
    yield Sent("ep", "alltoall_base_", rows * job.model.hidden_size * itemsize).times(2)
    if shared:
        yield Sent("tp", "allgather_", tokens * job.model.hidden_size * itemsize * (tp - 1))
