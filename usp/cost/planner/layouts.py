"""Enumeration of the layouts of a model on a number of ranks, and of each layout's options to save memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from parallel import PP_SCHEDULES, Hardware, divisors, micro_batch_violation
from usp.config import AC_MODES, TrainConfig
from usp.model.facts import ModelFacts
from usp.train.validate import violations

AC = (("none", False), *((ac, offload) for ac in AC_MODES if ac != "none" for offload in (False, True)))
MLP_TILE = 8192  # tokens; MLPs of fewer are not tiled
MOST_MICRO_BATCHES = 8  # per pipeline rank: more hardly shrink the bubble


@dataclass(frozen=True)
class Question:
    """The input of a search.

    Attributes:
        base: the model, data, sequence length and optimizer; whatever the planner chooses has its default here.
        sequences: per step, over all ranks.
        ranks_per_host: the limit of tensor parallelism.
        optim_offload: whether the optimizer may be offloaded: whether devices have memory other than the host's.
    """

    base: TrainConfig
    sequences: int
    world_size: int
    ranks_per_host: int
    optim_offload: bool = False


def layouts(question: Question, facts: ModelFacts) -> Iterator[TrainConfig]:
    """Yield every valid choice of degrees, micro-batches and schedule, with all activations saved and ZeRO-1 over all
    data-parallel ranks.

    tp stays inside a host and always includes Megatron's sequence parallelism; the heads bound tp x ulysses.
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
        sp_ulysses=ulysses,
        sp_ring=ring,
        batch_size=question.sequences // dp,
        zero=1,
    )


def _completed(question: Question, facts: ModelFacts, config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield the configuration with every schedule, number of micro-batches and expert degree."""
    regrouped = config.dp_shard * config.sp_ring * config.sp_ulysses * config.tp
    experts = [ep for ep in divisors(facts.num_experts) if regrouped % ep == 0] if facts.num_experts else [1]
    schedules = PP_SCHEDULES if config.pp > 1 else ("1f1b",)
    for ep, schedule in product(experts, schedules):
        for micro_batches in _micro_batches(config, schedule):
            found = replace(config, ep=ep, pp_schedule=schedule, micro_batches=micro_batches)
            if not violations(found, question.world_size, facts):
                yield found


def _micro_batches(config: TrainConfig, schedule: str) -> list[int]:
    """Return divisors of the batch. Without a pipeline all of them: fewer save more activations, but larger products
    are faster, and ZeRO-2 and 3 communicate in each."""
    numbers = divisors(config.batch_size)
    if config.pp == 1:
        return numbers
    fitting = [number for number in numbers if not micro_batch_violation(schedule, config.pp, number)]
    return [number for number in fitting if number <= MOST_MICRO_BATCHES * config.pp] or fitting[:1]


def savings(config: TrainConfig, question: Question, facts: ModelFacts) -> Iterator[TrainConfig]:
    """Yield a layout with every valid combination of activation checkpointing, sharding and optimizer offload."""
    for saving in recomputations(config, facts):
        for found in shardings(saving):
            if not violations(found, question.world_size, facts):
                yield from placements(found, question)


def placements(config: TrainConfig, question: Question) -> Iterator[TrainConfig]:
    """Yield a configuration, and with optimizer offload where that is possible and not yet so."""
    yield config
    if question.optim_offload and not config.optim_offload:
        yield replace(config, optim_offload=True)


def recomputations(config: TrainConfig, facts: ModelFacts) -> Iterator[TrainConfig]:
    """Yield a layout with every way to save activations, and the sharding that saves most; maybe not valid."""
    local = config.seq_len // (config.sp_ring * config.sp_ulysses) // config.tp
    tiles = (0, MLP_TILE) if local > MLP_TILE and not facts.num_experts else (0,)
    zero = max(_stages(config, config.dp_shard))
    for (ac, offload), tile in product(AC, tiles):
        if not tile or ac != "none":
            yield replace(config, zero=zero, ac=ac, ac_offload=offload, mlp_tile=tile)


def shardings(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield a layout with every ZeRO stage (1 to 3) and number of replicas of the shards (HSDP) that experts allow;
    maybe not valid."""
    for replicas in divisors(config.dp_shard):
        shards = config.dp_shard // replicas
        if shards * config.sp_ring * config.sp_ulysses * config.tp % config.ep:
            continue
        for zero in _stages(config, shards):
            yield replace(config, dp_replicate=replicas, dp_shard=shards, zero=zero)


def _stages(config: TrainConfig, shards: int) -> tuple[int, ...]:
    """Return the ZeRO stages that differ over data-parallel `shards` and the sequence."""
    return (1, 2, 3) if shards * config.sp_ring * config.sp_ulysses > 1 else (1,)


def suppositions(hardware: Hardware) -> Iterator[tuple[str, Hardware, float]]:
    """Yield (description, hardware, factor of the memory) of other hardware that could change the plan."""
    yield "with twice the memory", hardware, 2.0
    yield "with half the memory", hardware, 0.5
    if len(hardware.tiers) > 1:
        *inner, last = hardware.tiers
        for words, factor in (("twice", 2.0), ("half", 0.5)):
            yield (
                f"with {words} the bandwidth between hosts",
                replace(hardware, tiers=(*inner, last.faster(factor))),
                1.0,
            )
