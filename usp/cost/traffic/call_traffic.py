"""The traffic of calls without gradients: inference, and the prefill and decode steps of generation.

A prefill is the forward of a job with `output="cache"`, whose rows are prompts of equal padded length.
"""

from __future__ import annotations

from collections.abc import Iterator

from usp.cost.job import Job

from .pass_traffic import FLOAT64, INT64, pass_traffic
from .sent import Sent, all_reduce, merged
from .sharding import FLOAT32


def inference_traffic(job: Job, rank: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in an inference call: its forwards, the number and length of rows, and the outputs.

    job: with rows of one sequence, each its own micro-batch.
    """
    parts = [*pass_traffic(job, rank)["forward"], all_reduce("batch", 2 * INT64, job.degree("batch"))]
    if len(job.stage_layers) - 1 in job.stages(rank):
        values = job.config.micro_batches * job.tokens * FLOAT32
        for axis in ("ulysses", "ring"):  # one after the other
            parts.append(Sent(axis, "allgather_", values * (job.degree(axis) - 1)))
            values *= job.degree(axis)
    return merged(sent for sent in parts if job.degree(sent.axis) > 1)


def decode_traffic(job: Job, rank: int, slots: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in the forward of one decode step of `slots` sequences.

    Every rank of ring x ulysses computes all tokens of its data-parallel group, and attends to its part of the cache.
    """
    facts, tp, sp = job.model.facts, job.dims.tp, job.dims.sp
    hidden = slots * job.model.hidden_size * job.dtype.itemsize
    partial = slots * facts.num_heads // tp * (facts.value_dim + 1) * FLOAT32  # outputs and log-sum-exps
    (stage,), parts = job.stages(rank), []
    if stage == 0:
        parts.append(all_reduce("tp", hidden, tp, functional=True))
    for index, number in job.kinds(stage).items():
        experts = job.model.layers[index].experts
        layer = [Sent("sp", "allgather_", partial * (sp - 1))]
        layer.append(all_reduce("tp", hidden, tp, functional=True).times(1 if experts else 2))
        layer += _expert_parts(job, slots) if experts and job.dims.ep > 1 else ()
        parts += [sent.times(number) for sent in layer]
    if stage + 1 < len(job.stage_layers):
        parts.append(Sent("pp", "send", hidden))
    return merged(sent for sent in parts if job.degree(sent.axis) > 1)


def sampling_traffic(job: Job, rank: int, slots: int) -> tuple[Sent, ...]:
    """Return what `rank` sends after it: logits are gathered, and tokens broadcast with their log-probabilities."""
    parts = [Sent(axis, "broadcast_", 2 * slots * FLOAT64) for axis in ("tp", "sp", "pp")]
    if job.place("pp", rank) == job.dims.pp - 1 and job.place("sp", rank) == 0:
        logits = slots * job.model.facts.vocab_size // job.dims.tp * job.dtype.itemsize
        parts.append(Sent("tp", "allgather_", logits * (job.dims.tp - 1)))
    return merged(sent for sent in parts if job.degree(sent.axis) > 1)


def _expert_parts(job: Job, slots: int) -> Iterator[Sent]:
    """Yield the experts' exchanges of a decode step, if routers choose evenly: each token is sent by one rank."""
    ep, tp, sp = job.dims.ep, job.dims.tp, job.dims.sp
    each = job.model.hidden_size * job.dtype.itemsize
    tokens = -(-slots // (tp * sp))
    rows = tokens * job.model.experts_per_token * (ep - 1) // ep
    yield Sent("ep", "alltoall_base_", job.model.facts.num_experts * (ep - 1) // ep * INT64)
    yield Sent("ep", "alltoall_base_", rows * each).times(2)
    yield Sent("tp", "allgather_", tokens * each * (tp - 1))
    yield Sent("sp", "allgather_", tokens * tp * each * (sp - 1))
