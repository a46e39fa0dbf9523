"""What one layer's attention sends for one micro-batch, from its execution plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attention import AttentionSpec, HeadPlan, RingSchedule, SequenceLayout, UnifiedPlan, ring_schedule
from usp.cost.job import Job

from .sent import Sent


@dataclass(frozen=True)
class AttentionTraffic:
    """The traffic of attention in both directions.

    Ulysses exchanges q, k, v and the output, and their gradients. The ring passes keys and values in both passes, and
    their float32 gradients in the backward.
    """

    forward: tuple[Sent, Sent]
    backward: tuple[Sent, Sent, Sent]


def attention_plan(job: Job, rank: int, window: int) -> UnifiedPlan:
    """Return the execution plan of a layer's attention for one sequence; `job.rows` of them take as many times more."""
    facts, tp = job.model.facts, job.dims.tp
    documents = (job.boundaries,) if job.data.documents else None
    spec = AttentionSpec(causal=True, window=(window - 1, -1) if window else (-1, -1), documents=documents)
    heads = HeadPlan(facts.num_heads // tp, facts.num_kv_heads // tp, job.dims.ulysses)
    layout = SequenceLayout(job.config.sp_layout, job.config.seq_len, job.dims.ring, 1)
    ring = _ring(layout, spec, job.place("ring", rank))
    return UnifiedPlan(job.layout, spec, heads, 1, job.place("ulysses", rank), ring)


@lru_cache(maxsize=256)
def _ring(layout: SequenceLayout, spec: AttentionSpec, rank: int) -> RingSchedule:
    """Return a ring's schedule for one sequence: cached, because it does not depend on the Ulysses degree."""
    return ring_schedule(layout, spec, 1, rank)


def attention_traffic(job: Job, rank: int, window: int) -> AttentionTraffic:
    """Return the traffic of one layer's attention for one micro-batch."""
    plan, facts = attention_plan(job, rank, window), job.model.facts
    wire = plan.wire_bytes(facts.head_dim, job.dtype, facts.value_dim)
    keys = sum(len(step.send_held) + len(step.send_own) for step in plan.ring.steps)
    grads = sum(len(step.grad_send) for step in plan.ring.steps)

    def exchanged(nbytes: int) -> Sent:
        return Sent("ulysses", "alltoall_base_", job.rows * nbytes, calls=2)

    ring = Sent("ring", "send", job.rows * wire.keys, keys)
    return AttentionTraffic(
        forward=(exchanged(wire.seq_to_heads + wire.heads_to_seq), ring),
        backward=(
            exchanged(wire.dout_to_heads + wire.grads_to_seq),
            ring,
            Sent("ring", "send", job.rows * wire.grads, grads),
        ),
    )
