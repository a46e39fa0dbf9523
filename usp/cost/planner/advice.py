"""The reasons behind a plan: its bound, why other layouts are slower, and which published tips it contradicts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from usp.config import TrainConfig
from usp.cost.time.step_time import StepTime
from usp.cost.time.transfers import exposure
from usp.model.facts import ModelFacts

from .search import Candidate

_COMMUNICATION = {
    "ring": "ring attention",
    "ulysses": "Ulysses all-to-alls",
    "tp": "tensor parallelism",
    "pp": "pipeline messages",
    "ep": "expert all-to-alls",
    "host": "copies to and from the host",
}


def parts(time: StepTime) -> dict[str, float]:
    """Return the seconds of each component; they add up to the step."""
    exposed = {axis: transfers.exposed for axis, transfers in time.communication.items() if transfers.exposed}
    return {
        "matrix products": time.compute.matmul,
        "attention": time.compute.attention,
        "memory-bound operators": time.compute.memory,
        "kernel launches": time.compute.launch,
        "optimizer": time.optimizer,
        "pipeline bubble": time.bubble,
        **{f"exposed {_COMMUNICATION.get(axis, f'{axis} traffic')}": found for axis, found in exposed.items()},
    }


def why_slower(candidate: Candidate, first: Candidate) -> str:
    """Return the two components that take longest compared with the first candidate."""
    mine, its = parts(candidate.time), parts(first.time)
    longer = {name: seconds - its.get(name, 0.0) for name, seconds in mine.items()}
    largest = sorted(longer, key=lambda name: -longer[name])[:2]
    words = [f"{name} +{seconds(longer[name])}" for name in largest if longer[name] > 0.001 * first.time.total]
    return ", ".join(words) or "equally fast"


def bound(candidate: Candidate, memory_bytes: float) -> str:
    """Return the component that takes longest, and memory if saving it costs time."""
    by_part = parts(candidate.time)
    largest = max(by_part, key=lambda name: by_part[name])
    words = f"{largest} ({by_part[largest] / candidate.time.total:.0%})"
    if candidate.config.ac != "none" and candidate.peak_bytes > 0.5 * memory_bytes:
        words += ", and by memory, which requires recomputation"
    return words


def seconds(value: float) -> str:
    """Format seconds for people."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def degrees(config: TrainConfig) -> str:
    """Return the degrees above 1, outermost first."""
    names = ("pp", "dp_replicate", "dp_shard", "sp_ring", "sp_ulysses", "tp", "ep")
    values = ((name.removeprefix("sp_"), getattr(config, name)) for name in names)
    return " ".join(f"{name} {degree}" for name, degree in values if degree > 1) or "one rank"


def memory_options(config: TrainConfig) -> str:
    """Return the options that determine the memory, including those of the pipeline."""
    words = [f"ZeRO-{config.zero}"]
    if config.ac != "none":
        words.append(f"ac {config.ac}" + (" with offload" if config.ac_offload else ""))
    if config.optim_offload:
        words.append("optimizer offload")
    if config.mlp_tile:
        words.append(f"MLP tiles of {config.mlp_tile} tokens")
    if config.micro_batches > 1:
        words.append(f"{config.micro_batches} micro-batches")
    if config.pp > 1:
        words.append(config.pp_schedule)
    return ", ".join(words)


@dataclass(frozen=True)
class BrokenTip:
    """A tip that a configuration contradicts; `followed` tells whether another one follows it."""

    words: str
    followed: Callable[[TrainConfig], bool]


def broken_tips(config: TrainConfig, facts: ModelFacts) -> Iterator[BrokenTip]:
    """Yield the tips of the USP paper (arXiv 2405.07719, section 4) that a configuration contradicts."""
    sp = config.sp_ring * config.sp_ulysses
    left = facts.num_heads // config.tp
    if config.sp_ring > 1 and config.sp_ulysses == 1 and left > 1:
        yield BrokenTip(
            f"tip 1: pure ring attention (ring {config.sp_ring}), although {left} heads per rank would allow Ulysses",
            lambda other: other.sp_ring == 1 or other.sp_ulysses > 1,
        )
    if sp > 1 and config.batch_size > 1 and config.pp == 1:
        yield BrokenTip(
            f"tip 2: each sequence is sharded over {sp} ranks and each rank processes {config.batch_size} of them; "
            f"data parallelism would communicate less",
            lambda other: other.sp_ring * other.sp_ulysses == 1,
        )
    if sp > 1 and config.zero == 0:
        yield BrokenTip(
            "tip 3: sequence parallelism without ZeRO replicates the optimizer states on every rank",
            lambda other: other.zero > 0,
        )
    if config.tp > 1 and config.tp > config.sp_ulysses and left > 1:
        yield BrokenTip(
            f"tip 4: tp {config.tp} communicates more activations per layer than sequence parallelism; it pays off "
            f"only where it saves memory",
            lambda other: other.tp == 1 or other.tp <= other.sp_ulysses,
        )
    if config.sp_order != "ring-outer" and config.sp_ring > 1 and config.sp_ulysses > 1:
        yield BrokenTip(
            f"tip 7: with the ring inside, Ulysses communicates over the slow links, and it is {exposure('ulysses')}; "
            f"the planner keeps --sp-order",
            lambda other: other.sp_ring == 1 or other.sp_ulysses == 1,
        )
