"""Every rule that a training configuration must satisfy before any rank communicates.

Pure: numbers in, messages out. Each message gives the values, what must hold and what to change; all violations are
reported together. Rules on single fields stand beside them in `usp.config`. Rules that a layer states (degrees,
experts, heads) are taken from there, with flags for parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch

from usp.config import PLANS, CommonConfig, TrainConfig, by_stage
from usp.fields import changed_ones, flag, shared_values, value_violations
from usp.model.facts import FLOAT8_DIMS, ModelFacts, ep_violations, pp_violations, tp_violations
from usp.optimizers import OPTIMIZERS
from usp.parallel import ParallelDims, PipelineSchedule, Violation, divisors, violation_of
from usp.parallel.stages import micro_batch_violation, schedule_violation, stages_violation


def violations(config: TrainConfig, world_size: int, facts: ModelFacts | None, ended: int = 0) -> list[str]:
    """Return what is wrong with `config` on `world_size` ranks, one message each.

    facts: None if the model was not found; rules about it are then skipped. ended: stages of the curriculum that have
    run, on any ranks.
    """
    if config.curriculum:
        return [*curriculum_violations(config), *_by_stage(config, world_size, facts, ended)]
    config = settle_batch(config, world_size)
    invalid = value_violations(config)
    messages = [*invalid.values(), *changed_ones(config, config.without_effect())]
    valid = cast(TrainConfig, _ValidFields(config, invalid)) if invalid else config
    for rule in _rules(valid, world_size, facts):
        with suppress(_InvalidField):
            messages.extend(rule)
    return [with_flags(message) for message in messages]


def _rules(config: TrainConfig, world_size: int, facts: ModelFacts | None) -> Iterator[Iterator[Any]]:
    yield from (rule(config, world_size) for rule in (_degrees, _global_batch))
    yield from (rule(config) for rule in (_length, _batches, _schedule, common_violations, _sampling, _step, _float8))
    if facts is not None:
        yield from (rule(config, facts) for rule in (_heads, _tensor, _pipeline, _experts, _indexers))


class _InvalidField(Exception):
    """Ends a rule that reads a field with a value that is invalid by itself."""


class _ValidFields:
    """A configuration whose fields with invalid values cannot be read."""

    def __init__(self, config: TrainConfig, invalid: Collection[str]) -> None:
        self._config, self._invalid = config, invalid

    def __getattr__(self, name: str) -> Any:
        if name in self._invalid:
            raise _InvalidField(name)
        return getattr(self._config, name)


def curriculum_violations(config: TrainConfig) -> Iterator[str]:
    total = sum(stage.steps for stage in config.curriculum)
    if config.steps not in (TrainConfig.steps, total):
        yield f"--steps = {config.steps} and --curriculum, of {total} steps, both set the length of the run: give one"
    if config.train_tokens:
        yield f"--train-tokens = {config.train_tokens} and --curriculum both set the length of the run: give one"


def _by_stage(config: TrainConfig, world_size: int, facts: ModelFacts | None, ended: int) -> Iterator[str]:
    stages = [violations(stage, world_size, facts) for stage in by_stage(config)[ended:]]
    common = [message for message in stages[0] if all(message in messages for messages in stages)]
    yield from common
    for number, messages in enumerate(stages, start=ended + 1):
        yield from (f"stage {number} of the curriculum: {message}" for message in messages if message not in common)


def with_flags(message: Violation | str) -> str:
    """Return a message with flags for the arguments of layers: `--sp-ulysses 4` for ulysses=4."""
    if isinstance(message, str):
        return message
    named = message.renamed(ring="sp_ring", ulysses="sp_ulysses")
    return named.shown(lambda name, value: f"{flag(name)} {value}")


def settle_batch(config: TrainConfig, world_size: int) -> TrainConfig:
    """Replace global_batch_size by the batch_size it implies, and then train_tokens by the steps; each if it is set.
    With a curriculum, each stage has a batch of its own, and nothing is replaced."""
    ranks = _batch_ranks(config, world_size)
    if ranks is None or config.curriculum:
        return config
    if config.global_batch_size > 0 and config.batch_size == 1 and config.global_batch_size % ranks == 0:
        config = replace(config, batch_size=config.global_batch_size // ranks, global_batch_size=0)
    of_a_step = ranks * config.batch_size * config.seq_len
    if config.train_tokens > 0 and config.steps == TrainConfig.steps and of_a_step > 0:
        config = replace(config, steps=math.ceil(config.train_tokens / of_a_step), train_tokens=0)
    return config


def _batch_ranks(config: TrainConfig, world_size: int) -> int | None:
    """Return the number of data-parallel ranks; None if the degrees do not fit the world size."""
    try:
        return parallel_dims(config).resolve(world_size).batch
    except ValueError:
        return None


def _degrees(config: TrainConfig, world_size: int) -> Iterator[Violation | str]:
    if config.plan in PLANS[1:]:
        yield f"--plan {config.plan} is only supported by train.py: give --config a file of python -m usp plan --out"
    try:
        parallel_dims(config).resolve(world_size)
    except ValueError as error:
        yield violation_of(error)


def parallel_dims(config: Any) -> ParallelDims:
    """Return the degrees of a configuration of any program; dp_shard is still -1 if it takes the remaining ranks."""
    return ParallelDims(ring=config.sp_ring, ulysses=config.sp_ulysses, **shared_values(config, ParallelDims))


def _global_batch(config: TrainConfig, world_size: int) -> Iterator[str]:
    """Say why `settle_batch` left global_batch_size."""
    if not config.global_batch_size:
        return
    given, ranks = f"--global-batch-size = {config.global_batch_size}", _batch_ranks(config, world_size)
    if config.batch_size != 1:
        yield f"{given} and --batch-size = {config.batch_size} both set the sequences of a step: give one of them"
    elif ranks is not None:
        above = _above(config.global_batch_size, ranks)
        sizes = " or ".join(str(size) for size in (above - ranks, above) if size)
        yield f"{given} must be a multiple of the {ranks} data-parallel ranks (dp_replicate x dp_shard): use {sizes}"


def _batches(config: TrainConfig) -> Iterator[str]:
    if config.batch_size % config.micro_batches:
        yield (
            f"--micro-batches = {config.micro_batches} must divide --batch-size = {config.batch_size}: use "
            f"--batch-size {_above(config.batch_size, config.micro_batches)}, or --micro-batches "
            f"{', '.join(map(str, divisors(config.batch_size)))}"
        )
    violation = micro_batch_violation(config.pp_schedule, config.pp, config.micro_batches) if config.pp > 1 else None
    if violation:
        yield f"--micro-batches = {config.micro_batches} does not fill the pipeline: {violation}"


def _schedule(config: TrainConfig) -> Iterator[str]:
    if config.pp > 1 and (violation := stages_violation(config.pp_schedule, config.pp_stages_per_rank)):
        yield f"--pp-stages-per-rank = {config.pp_stages_per_rank}: {violation}"
    if config.pp == 1 or config.pp_schedule != "zero-bubble":
        return
    if violation := schedule_violation(config.pp_schedule, torch.__version__):
        yield f"--pp-schedule = zero-bubble: {violation}"
    if config.zero > 1:
        yield f"--zero = {config.zero} frees after each backward what zero-bubble needs in two parts: use --zero 1"
    for name, off in (("ac", "none"), ("mlp_tile", 0)):
        if (value := getattr(config, name)) != off:
            yield f"{flag(name)} = {value} recomputes in each of zero-bubble's ten backwards: use {flag(name)} {off}"
    if config.compile:
        yield "--compile makes the backward of a layer one graph, not two parts: use --pp-schedule interleaved-1f1b"


def _length(config: TrainConfig) -> Iterator[str]:
    if config.train_tokens and config.steps != TrainConfig.steps:  # which `settle_batch` has left
        yield f"--train-tokens = {config.train_tokens} and --steps = {config.steps} both set the length: give one"
    patience = config.early_stopping_patience
    if patience and not (config.eval_every or config.checkpoint_every):
        yield f"--early-stopping-patience = {patience} counts evaluations, of which there is one: give --eval-every"


def _sampling(config: TrainConfig) -> Iterator[str]:
    if not config.sample_every:
        return
    if not config.sample_prompts:
        yield f"--sample-every = {config.sample_every} needs what the model responds to: give --sample-prompts"
    given = f"--sample-every = {config.sample_every} generates one token at a time"
    if config.compile:
        yield f"{given}, for which --compile would compile each layer again and again: remove one"
    if config.fp8 != "none":
        yield f"{given} in torch's inference mode, which torchao's float8 tensors do not support: remove one"
    if config.tp_sequence_parallel:
        yield f"{given}, which --tp-sequence-parallel cannot divide: remove one"
    if config.pp > 1 and config.pp_schedule != "1f1b":
        yield f"{given} with one stage on a rank, and --pp-schedule {config.pp_schedule} has more: use 1f1b"


def _step(config: TrainConfig) -> Iterator[str]:
    yield from OPTIMIZERS[config.optimizer].violations(config)
    if config.compile and config.ac == "selective":
        yield "--ac selective has no effect with --compile, whose graphs choose what to recompute: use --ac none"


def common_violations(config: CommonConfig) -> Iterator[str]:
    """Yield which flags that train.py and rlhf.py share contradict each other."""
    if config.mlp_tile and config.ac == "selective":
        yield f"--mlp-tile = {config.mlp_tile} keeps no matrix products of MLPs, --ac selective keeps all: remove one"
    if config.lr_decay_steps > config.steps:
        yield f"--lr-decay-steps = {config.lr_decay_steps} must be at most --steps = {config.steps}"


def _float8(config: TrainConfig) -> Iterator[str]:
    if config.fp8 == "none":
        return
    given = f"--fp8 {config.fp8}"
    if config.pp > 1 and config.pp_schedule == "zero-bubble":
        yield f"{given} computes both gradients of a linear at once, zero-bubble apart: use another --pp-schedule"
    if config.fp8 == "tensor" and config.optim_offload:
        yield f"{given} reduces scales of weights on the device, and --optim-offload has these on the host: use row"
    tokens = config.padded_len // (config.sp_ring * config.sp_ulysses)
    for name, number in (("tokens of a sequence on a rank", tokens), ("tokens of --mlp-tile", config.mlp_tile)):
        if number % (of := FLOAT8_DIMS[config.fp8]):
            yield f"{given} needs a multiple of {of} {name}, for products of float8, and has {number}: change --seq-len"


def _tensor(config: TrainConfig, facts: ModelFacts) -> Iterator[Violation | str]:
    if config.tp > 1:  # `_recomputation` refuses tp_sequence_parallel without tp
        yield from tp_violations(facts, config.tp, config.tp_sequence_parallel)
    ranks = config.sp_ring * config.sp_ulysses
    local = config.padded_len // ranks
    if config.tp_sequence_parallel and local % config.tp:
        yield f"--tp {config.tp} must divide the {local} tokens of a rank for --tp-sequence-parallel: change --seq-len"


def _pipeline(config: TrainConfig, facts: ModelFacts) -> Iterator[Violation | str]:
    each = config.pp_stages_per_rank or PipelineSchedule(config.pp_schedule).stages_per_rank
    given = f"--pp {config.pp} with --pp-schedule {config.pp_schedule} of {each} stages a rank: "
    stages = config.pp * each if config.pp > 1 else 1
    yield from (given + violation for violation in pp_violations(facts, stages))


def _experts(config: TrainConfig, facts: ModelFacts) -> Iterator[Violation | str]:
    yield from ep_violations(facts, config.ep, config.ep_chunks)
    yield from balance_violations(config, facts)
    if facts.num_experts and config.zero == 0 and config.ep * config.tp > 1:
        given = f"--zero 0 replicates every expert, which --ep {config.ep} x --tp {config.tp} ranks share"
        yield f"{given}: use --zero 1 or more"
    if facts.num_experts and config.mlp_tile:
        yield f"--mlp-tile {config.mlp_tile} tiles dense MLPs, and those of {facts.name} are experts: remove it"


def _indexers(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    if config.indexer_warmup and config.pp > 1:
        yield f"--indexer-warmup may leave a stage without trained weights: use --pp 1 in place of {config.pp}"
    if config.indexer_warmup and config.router_bias_update_rate:
        yield "--indexer-warmup keeps all weights but the indexers': leave --router-bias-update-rate out"
    if not config.indexer_loss_coef:
        return
    given = f"--indexer-loss-coef = {config.indexer_loss_coef:g}"
    if not facts.index_size:
        yield f"{given} trains indexers that choose among tokens, and {facts.name} has none: remove it"
    if facts.index_block > 1:
        yield f"{given} is of the score of each key, and the indexers of {facts.name} choose blocks: leave it out"
    if config.lora_rank:
        yield f"{given} trains the indexers' own weights, and --lora-rank keeps them: remove one"
    if config.tp > 1:
        yield f"{given} sums attention weights over all heads, which --tp = {config.tp} divides: use --tp 1"
    if config.pp > 1 and config.pp_schedule == "zero-bubble":
        yield f"{given} is a loss within layers, whose backwards zero-bubble divides: use another --pp-schedule"


def balance_violations(config: CommonConfig, facts: ModelFacts) -> Iterator[str]:
    """Yield why a model cannot have the load-balancing loss of `config`."""
    given = f"--router-aux-loss-coef {config.router_aux_loss_coef}"
    if config.router_aux_loss_coef > 0 and not facts.num_experts:
        yield f"{given} balances experts, and {facts.name} has none: remove it"
    elif config.router_aux_loss_coef > 0 and not facts.balancing_loss:
        yield f"{given} weights a load-balancing loss, and transformers defines none for {facts.name}: remove it"
    if config.router_balance != "step" and not facts.num_experts:
        yield f"--router-balance {config.router_balance} balances experts, and {facts.name} has none: remove it"


def _above(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _heads(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    left = facts.num_heads // config.tp
    if facts.num_heads % config.tp == 0 and config.sp_ulysses > left:
        ranks = config.sp_ulysses * config.sp_ring
        ulysses = divisors(ranks, left)[-1]
        after = f"{left} query heads" if config.tp == 1 else f"{facts.num_heads} / tp {config.tp} = {left} query heads"
        yield (
            f"--sp-ulysses = {config.sp_ulysses} leaves ranks without a head: {facts.name} has {after}, and each "
            f"Ulysses rank needs at least one. Use 1 to {left}; for the same {ranks} ranks, --sp-ulysses {ulysses} "
            f"--sp-ring {ranks // ulysses}"
        )
