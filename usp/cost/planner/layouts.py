"""Every way to train a model on so many ranks: degrees first, then how each of them can save memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from parallel import PP_SCHEDULES, Hardware, Link, divisors, micro_batch_violation
from usp.config import TrainConfig
from usp.model.facts import ModelFacts
from usp.train.validate import violations

AC = (("none", False), ("attention-saved", False), ("attention-saved", True), ("full", False), ("full", True))
MLP_TILE = 8192  # tokens; an MLP of fewer is not cut
MOST_MICRO_BATCHES = 8  # per pipeline rank: more shrink the bubble by little


@dataclass(frozen=True)
class Question:
    """What a plan is asked for.

    Attributes:
        base: what stays as it is: model, data, sequence length, optimiser. Its degrees, batch size, ZeRO stage and
            activation checkpointing are what is chosen.
        sequences: in a step, over all ranks.
        ranks_per_host: what tensor and Ulysses parallelism stay inside of.
    """

    base: TrainConfig
    sequences: int
    world_size: int
    ranks_per_host: int


def layouts(question: Question, facts: ModelFacts) -> Iterator[TrainConfig]:
    """Every choice of degrees, micro-batches and schedule that train.py takes, with ZeRO 1 and all activations kept.

    tp stays inside a host, and with it go shared tokens (Megatron's sequence parallelism); heads bound tp x ulysses.
    """
    world = question.world_size
    for tp, pp in product(divisors(world), divisors(world)):
        if tp > question.ranks_per_host or facts.num_heads % tp or world % (tp * pp) or pp > len(facts.windows):
            continue
        for sp in divisors(world // (tp * pp)):
            dp = world // (tp * pp * sp)
            if question.sequences % dp:
                continue
            for ulysses in divisors(sp):
                if ulysses * tp <= facts.num_heads:
                    yield from _completed(question, facts, _degrees(question, tp, pp, dp, ulysses, sp // ulysses))


def _degrees(question: Question, tp: int, pp: int, dp: int, ulysses: int, ring: int) -> TrainConfig:
    return replace(
        question.base,
        tp=tp,
        tp_sequence_parallel=tp > 1,
        pp=pp,
        dp_shard=dp,
        dp_replicate=1,
        sp_ulysses=ulysses,
        sp_ring=ring,
        batch_size=question.sequences // dp,
        zero=1,
        ac="none",
        ac_offload=False,
        mlp_tile=0,
    )


def _completed(question: Question, facts: ModelFacts, config: TrainConfig) -> Iterator[TrainConfig]:
    """The same degrees with every schedule, number of micro-batches, expert degree and number of whole copies."""
    regrouped = config.dp_shard * config.sp_ring * config.sp_ulysses * config.tp
    experts = [ep for ep in divisors(facts.num_experts) if regrouped % ep == 0] if facts.num_experts else [1]
    copies = dict.fromkeys((1, config.dp_shard))
    schedules = PP_SCHEDULES if config.pp > 1 else ("1f1b",)
    for ep, replicas, schedule in product(experts, copies, schedules):
        for micro_batches in _micro_batches(config, schedule):
            found = replace(
                config,
                ep=ep,
                dp_replicate=replicas,
                dp_shard=config.dp_shard // replicas,
                pp_schedule=schedule,
                micro_batches=micro_batches,
            )
            if not violations(found, question.world_size, facts):
                yield found


def _micro_batches(config: TrainConfig, schedule: str) -> list[int]:
    """Numbers that divide the batch. Without a pipeline the most: fewer only keep more activations."""
    numbers = divisors(config.batch_size)
    if config.pp == 1:
        return [numbers[-1]]
    fitting = [number for number in numbers if not micro_batch_violation(schedule, config.pp, number)]
    return [number for number in fitting if number <= MOST_MICRO_BATCHES * config.pp] or fitting[:1]


def savings(config: TrainConfig, question: Question, facts: ModelFacts) -> Iterator[TrainConfig]:
    """The same layout with every ZeRO stage from 1 and every way to keep fewer activations that train.py takes."""
    local = config.seq_len // (config.sp_ring * config.sp_ulysses) // config.tp
    tiles = (0, MLP_TILE) if local > MLP_TILE and not facts.num_experts else (0,)
    shards = config.dp_shard * config.sp_ring * config.sp_ulysses
    for zero, (ac, offload), tile in product((1, 2, 3) if shards > 1 else (1,), AC, tiles):
        if tile and ac == "none":
            continue
        found = replace(config, zero=zero, ac=ac, ac_offload=offload, mlp_tile=tile)
        if not violations(found, question.world_size, facts):
            yield found


def suppositions(hardware: Hardware) -> Iterator[tuple[str, Hardware, float]]:
    """What might be otherwise: in words, the hardware then, and how many times the memory."""
    yield "with twice the memory", hardware, 2.0
    yield "with half the memory", hardware, 0.5
    if len(hardware.tiers) > 1:
        *inner, last = hardware.tiers
        for words, factor in (("twice", 2.0), ("half", 0.5)):
            tier = replace(
                last,
                send=_scaled(last.send, factor),
                gather=_scaled(last.gather, factor),
                reduce=_scaled(last.reduce, factor),
                exchange=_scaled(last.exchange, factor),
                shared_bytes_per_second=last.shared_bytes_per_second * factor,
            )
            yield f"with links between hosts {words} as fast", replace(hardware, tiers=(*inner, tier)), 1.0


def _scaled(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_second=link.bytes_per_second * factor)
