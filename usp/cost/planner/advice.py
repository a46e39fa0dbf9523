"""Why a plan is as fast as it is: what bounds it, where others lose to it, which advice it goes against. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from usp.config import TrainConfig
from usp.cost.time.step_time import StepTime
from usp.model.facts import ModelFacts

from .search import Candidate

_LINK = {"ring": "ring attention", "ulysses": "Ulysses all-to-alls", "tp": "tensor parallelism", "ep": "experts"}


def parts(time: StepTime) -> dict[str, float]:
    """Seconds by what they go to; they add up to the step."""
    return {
        "matrix products": time.compute.matmul,
        "attention": time.compute.attention,
        "memory traffic": time.compute.memory,
        "optimiser": time.optimizer,
        "pipeline bubble": time.bubble,
        **{f"waiting for {_LINK.get(axis, axis)}": t.exposed for axis, t in time.communication.items() if t.exposed},
    }


def why_slower(candidate: Candidate, first: Candidate) -> str:
    """The parts in which it takes longer than the first, the two largest."""
    mine, its = parts(candidate.time), parts(first.time)
    longer = {name: seconds - its.get(name, 0.0) for name, seconds in mine.items()}
    largest = sorted(longer, key=lambda name: -longer[name])[:2]
    told = [f"{name} +{seconds(longer[name])}" for name in largest if longer[name] > 0.001 * first.time.total]
    return ", ".join(told) or "as fast"


def bound(candidate: Candidate, memory_bytes: float) -> str:
    """The largest part of its time; and memory, where what it saves costs time."""
    by_part = parts(candidate.time)
    largest = max(by_part, key=lambda name: by_part[name])
    told = f"{largest} ({by_part[largest] / candidate.time.total:.0%})"
    if candidate.config.ac != "none" and candidate.peak_bytes > 0.5 * memory_bytes:
        told += ", and memory: it recomputes"
    return told


def seconds(value: float) -> str:
    """As people read it."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def degrees(config: TrainConfig) -> str:
    """The degrees above 1, in the words of the flags."""
    named: Mapping[str, int] = {
        "pp": config.pp,
        "dp_replicate": config.dp_replicate,
        "dp_shard": config.dp_shard,
        "ring": config.sp_ring,
        "ulysses": config.sp_ulysses,
        "tp": config.tp,
        "ep": config.ep,
    }
    return " ".join(f"{name} {degree}" for name, degree in named.items() if degree > 1) or "one rank"


def savings_of(config: TrainConfig) -> str:
    """How it saves memory."""
    told = [f"ZeRO-{config.zero}"]
    if config.ac != "none":
        told.append(f"ac {config.ac}" + (" on the host" if config.ac_offload else ""))
    if config.mlp_tile:
        told.append(f"MLP tiles of {config.mlp_tile}")
    if config.micro_batches > 1:
        told.append(f"{config.micro_batches} micro-batches")
    if config.pp > 1:
        told.append(config.pp_schedule)
    return ", ".join(told)


def broken_tips(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    """The USP paper's tips (arXiv 2405.07719, section 4) that a configuration goes against."""
    sp = config.sp_ring * config.sp_ulysses
    left = facts.num_heads // config.tp
    if config.sp_ring > 1 and config.sp_ulysses == 1 and left > 1:
        yield f"tip 1: ring {config.sp_ring} alone, where {left} heads a rank leave room for Ulysses"
    if sp > 1 and config.batch_size > 1 and config.pp == 1:
        yield (
            f"tip 2: sequences are split over {sp} ranks, while a rank has {config.batch_size} of them one after "
            f"another: data parallelism would send less"
        )
    if sp > 1 and config.zero == 0:
        yield "tip 3: sequence parallelism without ZeRO keeps whole optimiser states on every rank"
    if config.tp > 1 and config.tp > config.sp_ulysses and left > 1:
        yield (
            f"tip 4: tp {config.tp} sends activations of every layer whole, sequence parallelism a part of them; it is "
            f"worth that where it saves memory"
        )
    if config.sp_order != "ring-outer" and config.sp_ring > 1 and config.sp_ulysses > 1:
        yield "tip 7: ring inside Ulysses gives the slow links the traffic that nothing hides"
