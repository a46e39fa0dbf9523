"""Every rule that a training configuration must satisfy before any rank communicates.

Pure: numbers in, messages out. Each message says what was asked, what must hold and what to change; all violations
come together, so that a run is put right in one go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from attention import KERNEL_NAMES, LAYOUTS, SequenceLayout
from parallel import SP_ORDERS, ParallelDims
from usp.config import DEVICES, DTYPES, TrainConfig, flag, nearest
from usp.costs import ModelFacts


def violations(config: TrainConfig, world_size: int, facts: ModelFacts | None) -> list[str]:
    """What is wrong with `config` on `world_size` ranks, one message each; empty when nothing is.

    `facts` is None when the model itself could not be found: the rules about it are then left out.
    """
    numbers = list(_numbers(config))
    found = [*_choices(config), *numbers]
    if numbers:  # the rules below do arithmetic with them
        return found
    if config.sp_order in SP_ORDERS:
        found += _degrees(config, world_size)
    if config.sp_layout in LAYOUTS:
        found += _sequence(config)
    if facts is not None:
        found += _heads(config, facts)
    return found


def _choices(config: TrainConfig) -> Iterator[str]:
    for name, choices in (
        ("sp_layout", LAYOUTS),
        ("sp_order", SP_ORDERS),
        ("attention_kernel", KERNEL_NAMES),
        ("dtype", DTYPES),
        ("device", DEVICES),
    ):
        value = getattr(config, name)
        if value not in choices:
            yield f"{flag(name)} = {value!r} must be one of {', '.join(choices)}{nearest(value, choices)}"


def _numbers(config: TrainConfig) -> Iterator[str]:
    """Each number's own range."""
    for name in ("sp_ulysses", "sp_ring", "dp_replicate", "seq_len", "batch_size", "steps", "log_every"):
        if getattr(config, name) < 1:
            yield f"{flag(name)} = {getattr(config, name)} must be at least 1"
    if config.dp_shard != -1 and config.dp_shard < 1:
        yield f"--dp-shard = {config.dp_shard} must be at least 1, or -1 for the ranks that are left"
    for name in ("warmup_steps", "weight_decay", "seed"):
        if not getattr(config, name) >= 0:
            yield f"{flag(name)} = {getattr(config, name)} must not be negative"
    if not 0 < config.learning_rate < math.inf:
        yield f"--learning-rate = {config.learning_rate} must be positive and finite"
    if not config.max_grad_norm > 0:
        yield f"--max-grad-norm = {config.max_grad_norm} must be positive; inf never clips"


def _degrees(config: TrainConfig, world_size: int) -> Iterator[str]:
    try:
        parallel_dims(config).resolve(world_size)
    except ValueError as error:
        yield str(error)


def parallel_dims(config: TrainConfig) -> ParallelDims:
    """The degrees that `config` asks for, dp_shard still -1 where it is to take the rest."""
    return ParallelDims(
        dp_replicate=config.dp_replicate,
        dp_shard=config.dp_shard,
        ring=config.sp_ring,
        ulysses=config.sp_ulysses,
        sp_order=config.sp_order,
    )


def _sequence(config: TrainConfig) -> Iterator[str]:
    multiple = SequenceLayout.multiple_of(config.sp_layout, config.sp_ring, config.sp_ulysses)
    if config.seq_len % multiple:
        below = config.seq_len // multiple * multiple
        lengths = " or ".join(str(length) for length in (below, below + multiple) if length)
        yield (
            f"--seq-len = {config.seq_len} must be a multiple of {multiple} for --sp-layout {config.sp_layout} over "
            f"--sp-ring {config.sp_ring} x --sp-ulysses {config.sp_ulysses}: use {lengths}"
        )


def _heads(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    if config.sp_ulysses > facts.num_heads:
        ranks = config.sp_ulysses * config.sp_ring
        ulysses = max(degree for degree in range(1, facts.num_heads + 1) if ranks % degree == 0)
        yield (
            f"--sp-ulysses = {config.sp_ulysses} leaves a rank without a head: {facts.name} has {facts.num_heads} "
            f"query heads, and each Ulysses rank needs at least one. Use 1 to {facts.num_heads}; for the same "
            f"{ranks} ranks, --sp-ulysses {ulysses} --sp-ring {ranks // ulysses}"
        )
    if facts.num_heads % facts.num_kv_heads:
        yield (
            f"{facts.name} has {facts.num_heads} query heads over {facts.num_kv_heads} key-value heads: every "
            f"key-value head must serve the same number of query heads. Change the model's num_key_value_heads"
        )
