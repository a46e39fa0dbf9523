"""The time of one layer's attention: its kernels, the ring's messages behind them, and Ulysses' exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attention import Message
from parallel import Hardware, overlap_of, transfer_seconds
from usp.cost.job import Job
from usp.cost.traffic.attention_traffic import attention_plan, attention_traffic
from usp.cost.traffic.sharding import FLOAT32

from .compute import attention_kernel, ring_step_seconds
from .transfers import Overlap, TransferSeconds, overlapped, sent_seconds


@dataclass(frozen=True)
class AttentionSeconds:
    """Attention in one direction: seconds of its kernels, and of the ring's messages."""

    kernels: float
    messages: TransferSeconds


def attention_passes(
    job: Job, hardware: Hardware, overlap: Overlap, rank: int, window: int
) -> tuple[AttentionSeconds, AttentionSeconds]:
    """Return (forward, backward) of one layer's attention for one micro-batch, without recomputation."""
    plan = attention_plan(job, rank, window)
    heads, facts = plan.heads.q_width(plan.ulysses_rank), job.model.facts
    per_token = plan.heads.kv_width(plan.ulysses_rank) * (facts.head_dim + facts.value_dim)
    ranks = job.linked(job.ranks("ring", rank))
    per_byte, per_message = (  # once, because working out the tiers that a group crosses is slow
        transfer_seconds(hardware, ranks, "send", *one, job.global_ranks) for one in ((1.0, 0.0), (0.0, 1.0))
    )

    def seconds(messages: Sequence[Message], itemsize: int) -> float:
        nbytes = job.rows * sum(message.tokens for message in messages) * per_token * itemsize
        return nbytes * per_byte + per_message if messages else 0.0

    steps = plan.ring.steps[1:]
    arriving = [seconds(step.receive, job.dtype.itemsize) for step in steps]
    leaving = [seconds(step.grad_send, FLOAT32) for step in steps]
    kernel = attention_kernel(job, hardware, plan.spec)
    forward = ring_step_seconds(job, hardware, plan.ring, heads, kernel, backward=False)
    backward = ring_step_seconds(job, hardware, plan.ring, heads, kernel, backward=True) if job.trained else []
    # While step k computes, the keys of step k + 1 arrive and the gradients of step k - 1 leave; the last are exposed.
    both = [a + b for a, b in zip([*arriving, 0.0, 0.0], [0.0, 0.0, *leaving], strict=True)] if steps else []
    return (
        AttentionSeconds(sum(forward), overlapped(arriving, forward if overlap.ring else ())),
        AttentionSeconds(sum(backward), overlapped(both, backward if overlap.ring else ())),
    )


def attention_seconds(job: Job, hardware: Hardware, *, backward: bool) -> float:
    """Return the time of the first layer's forward (or both passes) of attention and Ulysses on the slowest rank."""
    rank, window = job.slowest_ranks[0], job.model.facts.windows[0]
    traffic = attention_traffic(job, rank, window)
    free = overlap_of(hardware, job.linked(job.ranks("ring", rank)))
    seconds = [
        part.kernels + part.messages.with_free_part(free).exposed + sent_seconds(job, hardware, exchange, rank)
        for part, (exchange, *_) in zip(
            attention_passes(job, hardware, Overlap(), rank, window), (traffic.forward, traffic.backward), strict=True
        )
    ]
    return sum(seconds) if backward else seconds[0]


def attention_kernels(job: Job, hardware: Hardware) -> tuple[str, ...]:
    """Return the attention kernels that run; "X as Y" if the hardware states no rates of X, and those of Y stand in."""
    windows = sorted(set(job.model.facts.windows))
    names = {attention_kernel(job, hardware, attention_plan(job, 0, window).spec) for window in windows}
    return tuple(f"{x} as {y}" if x != (y := hardware.rated_as(x)) else x for x in sorted(names))
