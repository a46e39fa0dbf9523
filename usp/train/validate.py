"""Every rule that a training configuration must satisfy before any rank communicates.

Pure: numbers in, messages out. Each message says what was asked, what must hold and what to change; all violations are
reported together. Rules that a layer states (degrees, experts, heads) are taken from there, with flags for parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from attention import KERNEL_NAMES, LAYOUTS, SequenceLayout
from parallel import SP_ORDERS, ZERO_STAGES, ParallelDims, divisors, micro_batch_violation, stages_per_rank
from usp.config import (
    AC_MODES,
    ALL_LINEAR,
    BOS,
    DEVICES,
    DTYPES,
    ENGINES,
    LR_SCHEDULES,
    OPTIMIZERS,
    PACKINGS,
    PLANS,
    PP_SCHEDULES,
    ROPE_SCALINGS,
    ROUTER_BALANCES,
    LoraConfig,
    MemoryConfig,
    ParallelConfig,
    RouterConfig,
    ScheduleConfig,
    TrainConfig,
    by_stage,
    flag,
)
from usp.model.facts import ModelFacts
from usp.model.rules import ep_violations, pp_violations, tp_violations
from usp.run.failures import nearest


def violations(config: TrainConfig, world_size: int, facts: ModelFacts | None) -> list[str]:
    """Return what is wrong with `config` on `world_size` ranks, one message each.

    facts: None if the model was not found; rules about it are then skipped.
    """
    if config.curriculum:
        return [*curriculum_violations(config), *_by_stage(config, world_size, facts)]
    config = settle_batch(config, world_size)
    invalid = value_violations(config, {**CHOICES, "plan": PLANS}, RANGES)
    found = list(invalid.values())
    for rule, reads in RULES:
        if not set(reads) & set(invalid):  # no arithmetic with values that are invalid on their own
            found += rule(config, world_size)
    for model_rule, reads in MODEL_RULES:
        if facts is not None and not set(reads) & set(invalid):
            found += model_rule(config, facts)
    return [with_flags(message) for message in found]


def curriculum_violations(config: TrainConfig) -> Iterator[str]:
    """Yield which flags contradict a curriculum."""
    total = sum(stage.steps for stage in config.curriculum)
    if config.steps not in (TrainConfig.steps, total):
        yield f"--steps = {config.steps} and --curriculum, of {total} steps, both set the length of the run: give one"
    if config.train_tokens:
        yield f"--train-tokens = {config.train_tokens} and --curriculum both set the length of the run: give one"
    if config.engine == "deepspeed":
        yield (
            "--curriculum is not supported by --engine deepspeed, whose engine keeps its ranks for good: use --engine "
            "fsdp2"
        )


def _by_stage(config: TrainConfig, world_size: int, facts: ModelFacts | None) -> Iterator[str]:
    """Yield the violations of each stage; those that all have in common once."""
    found = [violations(stage, world_size, facts) for stage in by_stage(config)]
    common = [message for message in found[0] if all(message in others for others in found)]
    yield from common
    for number, messages in enumerate(found, start=1):
        yield from (f"stage {number} of the curriculum: {message}" for message in messages if message not in common)


def with_flags(message: str) -> str:
    """Replace the parameters that layers name by train.py's flags: `ulysses=4` by `--sp-ulysses 4`."""
    names = {field.name: field.name for field in fields(TrainConfig)} | {"ring": "sp_ring", "ulysses": "sp_ulysses"}
    return re.sub(r"(?<![\w-])(\w+)=(?=\S)", lambda m: f"{flag(names[m[1]])} " if m[1] in names else m[0], message)


def settle_batch(config: TrainConfig, world_size: int) -> TrainConfig:
    """Replace global_batch_size by the batch_size it implies, and then train_tokens by the steps; each if it is set.

    With a curriculum, each stage has a batch of its own, and nothing is replaced.
    """
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
        return parallel_dims(config, config.ep).resolve(world_size).batch
    except ValueError:
        return None


def value_violations(config: Any, choices: Mapping[str, Sequence[Any]], ranges: Mapping[str, Range]) -> dict[str, str]:
    """Return what is wrong with single fields of a configuration, by field."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    found = {}
    for name in sorted(values.keys() & {*choices, *ranges}, key=list(values).index):
        value = values[name]
        if name in choices and value not in choices[name]:
            known = [str(choice) for choice in choices[name]]
            found[name] = f"{flag(name)} = {value!r} must be one of {', '.join(known)}{nearest(str(value), known)}"
        elif name in ranges and not ranges[name].holds(value):
            found[name] = f"{flag(name)} = {value} must be {ranges[name].words}"
    return found


class Range(NamedTuple):
    """Values that a field may have, as a predicate (False for nan) and after "must be"."""

    holds: Callable[[Any], bool]
    words: str


AT_LEAST_ONE = Range(lambda value: value >= 1, "at least 1")
NOT_NEGATIVE = Range(lambda value: value >= 0, "at least 0")
POSITIVE = Range(lambda value: 0 < value < math.inf, "positive and finite")
RATE = Range(lambda value: 0 <= value < math.inf, "positive and finite, or 0 for the default")
FRACTION = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
MAX_TIMEOUT = 86400.0  # a day: process groups wait a few times longer, which torch counts in int32 milliseconds

CHOICES: Mapping[str, Sequence[Any]] = {
    "sp_layout": LAYOUTS,
    "sp_order": SP_ORDERS,
    "pp_schedule": PP_SCHEDULES,
    "zero": ZERO_STAGES,
    "engine": ENGINES,
    "ac": AC_MODES,
    "attention_kernel": KERNEL_NAMES,
    "dtype": DTYPES,
    "device": DEVICES,
    "bos": BOS,
    "export_dtype": DTYPES,
    "rope_scaling": ROPE_SCALINGS,
    "lr_schedule": LR_SCHEDULES,
    "optimizer": OPTIMIZERS,
    "router_balance": ROUTER_BALANCES,
    "packing": PACKINGS,
}
RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("sp_ulysses", "sp_ring", "dp_replicate", "tp", "pp", "ep"), AT_LEAST_ONE),
    **dict.fromkeys(("batch_size", "micro_batches", "steps", "log_every"), AT_LEAST_ONE),
    **dict.fromkeys(("loss_chunk", "keep_checkpoints"), AT_LEAST_ONE),
    **dict.fromkeys(("global_batch_size", "warmup_steps", "seed", "mlp_tile", "checkpoint_every"), NOT_NEGATIVE),
    **dict.fromkeys(("train_tokens", "eval_every", "lora_rank", "lora_alpha"), NOT_NEGATIVE),
    "learning_rate": RATE,
    "lr_final": Range(lambda value: 0 <= value <= 1, "from 0 to 1"),
    "lr_decay_steps": Range(lambda value: value >= -1, "at least 0, or -1 for a tenth of --steps"),
    "adam_eps": POSITIVE,
    **dict.fromkeys(("adam_beta1", "adam_beta2", "muon_momentum"), FRACTION),
    "seq_len": Range(lambda value: value >= 2, "at least 2: a token and the next one"),
    "dp_shard": Range(lambda value: value == -1 or value >= 1, "at least 1, or -1 for the remaining ranks"),
    "weight_decay": Range(lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    "hang_timeout": Range(lambda value: 0 <= value <= MAX_TIMEOUT, f"0 to {MAX_TIMEOUT:.0f} seconds; 0 disables it"),
    "max_grad_norm": Range(lambda value: value > 0, "positive; inf disables clipping"),
    "router_aux_loss_coef": Range(
        lambda value: value == -1 or 0 <= value < math.inf, "at least 0, or -1 for the model's own value"
    ),
}


def _degrees(config: TrainConfig, world_size: int) -> Iterator[str]:
    try:
        parallel_dims(config, config.ep).resolve(world_size)
    except ValueError as error:
        yield str(error)


def parallel_dims(config: ParallelConfig, ep: int) -> ParallelDims:
    """Return the degrees of `config`; dp_shard is still -1 if it takes the remaining ranks."""
    return ParallelDims(
        pp=config.pp,
        dp_replicate=config.dp_replicate,
        dp_shard=config.dp_shard,
        ring=config.sp_ring,
        ulysses=config.sp_ulysses,
        tp=config.tp,
        ep=ep,
        sp_order=config.sp_order,
    )


def _sequence(config: TrainConfig, world_size: int) -> Iterator[str]:
    multiple = SequenceLayout.multiple_of(config.sp_layout, config.sp_ring, config.sp_ulysses)
    if config.seq_len % multiple:
        below = config.seq_len // multiple * multiple
        lengths = " or ".join(str(length) for length in (below, below + multiple) if length)
        yield (
            f"--seq-len = {config.seq_len} must be a multiple of {multiple} for --sp-layout {config.sp_layout} over "
            f"--sp-ring {config.sp_ring} x --sp-ulysses {config.sp_ulysses}: use {lengths}"
        )


def _global_batch(config: TrainConfig, world_size: int) -> Iterator[str]:
    """Say why `settle_batch` left global_batch_size."""
    if not config.global_batch_size:
        return
    ranks = _batch_ranks(config, world_size)
    if config.batch_size != 1:
        yield (
            f"--global-batch-size = {config.global_batch_size} and --batch-size = {config.batch_size} both set the "
            f"number of sequences per step: give one of them"
        )
    elif ranks is not None:
        above = _above(config.global_batch_size, ranks)
        sizes = " or ".join(str(size) for size in (above - ranks, above) if size)
        yield (
            f"--global-batch-size = {config.global_batch_size} must be a multiple of the {ranks} data-parallel ranks "
            f"(dp_replicate x dp_shard): use {sizes}"
        )


def _train_tokens(config: TrainConfig, world_size: int) -> Iterator[str]:
    """Say why `settle_batch` left train_tokens."""
    if config.train_tokens and config.steps != TrainConfig.steps:
        yield (
            f"--train-tokens = {config.train_tokens} and --steps = {config.steps} both set the length of the run: give "
            "one of them"
        )


def _micro_batches(config: TrainConfig, world_size: int) -> Iterator[str]:
    if config.batch_size % config.micro_batches:
        yield (
            f"--micro-batches = {config.micro_batches} must divide --batch-size = {config.batch_size}: use "
            f"--batch-size {_above(config.batch_size, config.micro_batches)}, or --micro-batches "
            f"{', '.join(map(str, divisors(config.batch_size)))}"
        )
    violation = micro_batch_violation(config.pp_schedule, config.pp, config.micro_batches) if config.pp > 1 else None
    if violation:
        yield (
            f"--micro-batches = {config.micro_batches} does not fill the pipeline: {violation}, and a --batch-size "
            f"that it divides"
        )
    if config.pp == 1 and config.pp_schedule != "1f1b":
        yield f"--pp-schedule = {config.pp_schedule} schedules a pipeline, but --pp is 1: set --pp, or remove it"


def _zero_bubble(config: TrainConfig, world_size: int) -> Iterator[str]:
    if config.pp == 1 or config.pp_schedule != "zero-bubble":
        return
    if config.zero > 1:
        yield (
            f"--zero = {config.zero} frees parameters or gradients after each backward, but --pp-schedule "
            f"zero-bubble needs them again for the weights' half of it: use --zero 1, or --pp-schedule "
            f"interleaved-1f1b"
        )
    for name, off in (("ac", "none"), ("mlp_tile", 0)):
        if getattr(config, name) != off:
            yield (
                f"{flag(name)} = {getattr(config, name)} recomputes in every backward, and --pp-schedule zero-bubble "
                f"has about ten per layer, one for the inputs and one per weight: use {flag(name)} {off}, or "
                f"--pp-schedule interleaved-1f1b"
            )
    if config.compile:
        yield (
            "--compile makes the backward of a layer one graph, but --pp-schedule zero-bubble computes gradients of "
            "its inputs and weights apart: remove --compile, or use --pp-schedule interleaved-1f1b"
        )


def _switches(config: TrainConfig, world_size: int) -> Iterator[str]:
    if config.plan == "auto":
        yield (
            "--plan auto is only supported by train.py: write a plan with python -m usp plan --out, and use it with "
            "--config"
        )
    elif config.hardware != "auto":
        yield f"--hardware = {config.hardware} is only used by --plan auto, but --plan is none: give both or neither"
    yield from unused_lora_flags(config)
    if config.eval_every and not config.eval_data:
        yield f"--eval-every = {config.eval_every} needs data to evaluate on: give --eval-data, or remove it"
    yield from memory_violations(config)
    if config.compile and config.ac == "selective":
        yield (
            "--ac selective has no effect with --compile, whose graphs keep the matrix products and recompute the rest "
            "by themselves: use --ac none"
        )
    yield from schedule_violations(config, config.steps)
    if config.tp_sequence_parallel and config.tp == 1:
        yield "--tp-sequence-parallel shards tokens over tensor-parallel ranks, but --tp is 1: set --tp, or remove it"


def memory_violations(config: MemoryConfig) -> Iterator[str]:
    """Yield which flags contradict the activation checkpointing, or need it and there is none."""
    if config.ac_offload and config.ac == "none":
        yield "--ac-offload offloads what activation checkpointing saves, but --ac is none: use --ac full"
    if config.mlp_tile and config.ac == "selective":
        yield (
            f"--mlp-tile = {config.mlp_tile} keeps no matrix products of MLPs, and --ac selective keeps all: use --ac "
            f"attention-saved, or remove --mlp-tile"
        )


def schedule_violations(config: ScheduleConfig, steps: int) -> Iterator[str]:
    """Yield which flags of the learning rate's schedule contradict each other."""
    if config.lr_schedule == "constant" and config.lr_final != ScheduleConfig.lr_final:
        yield f"--lr-final = {config.lr_final:g} ends a decay, but --lr-schedule is constant: remove it"
    if config.lr_decay_steps >= 0 and config.lr_schedule != "wsd":
        yield f"--lr-decay-steps = {config.lr_decay_steps} is an option of --lr-schedule wsd: remove it"
    if config.lr_decay_steps > steps:
        yield f"--lr-decay-steps = {config.lr_decay_steps} must be at most --steps = {steps}"


def unused_lora_flags(config: LoraConfig) -> Iterator[str]:
    """Yield which flags describe adapters although there are none."""
    for name, off in (("lora_alpha", 0), ("lora_targets", ALL_LINEAR), ("lora_merge", False)):
        if not config.lora_rank and getattr(config, name) != off:
            yield f"{flag(name)} is an option of LoRA adapters, but --lora-rank is 0: set --lora-rank, or remove it"


def _engine(config: TrainConfig, world_size: int) -> Iterator[str]:
    if config.engine != "deepspeed":
        return
    if config.lora_rank:
        yield (
            f"--lora-rank = {config.lora_rank} is not supported by --engine deepspeed, whose states of frozen weights "
            f"are not exported: use --engine fsdp2"
        )
    if config.optim_offload and config.zero == 0:
        yield (
            "--optim-offload offloads what ZeRO shards, and with --zero 0 --engine deepspeed shards nothing: use "
            "--zero 1, or --engine fsdp2"
        )
    if config.compile:
        yield (
            "--compile is not supported by --engine deepspeed, whose hooks on the modules of a layer would divide its "
            "graph: remove it, or use --engine fsdp2"
        )
    for name in ("tp", "pp", "ep", "dp_replicate"):
        if getattr(config, name) > 1:
            yield (
                f"{flag(name)} = {getattr(config, name)} is not supported by --engine deepspeed, whose ZeRO spans "
                f"only --dp-shard x sp: use {flag(name)} 1, or --engine fsdp2"
            )


def _optimizer(config: TrainConfig, world_size: int) -> Iterator[str]:
    if config.optimizer != "muon":
        if config.muon_momentum != TrainConfig.muon_momentum:
            yield f"--muon-momentum = {config.muon_momentum:g} is an option of --optimizer muon: remove it"
        return
    if config.engine == "deepspeed":
        yield (
            "--optimizer muon is not supported by --engine deepspeed, whose shards are not parts of matrices: use "
            "--engine fsdp2"
        )
    if config.optim_offload:
        yield (
            "--optimizer muon multiplies matrices, which is slow on the host: --optim-offload needs --optimizer adamw"
        )
    if config.tp > 1 and config.ep > 1:
        yield (
            f"--optimizer muon gathers each matrix from the ranks that share it, which --tp {config.tp} with --ep "
            f"{config.ep} does not group: use --tp 1 or --ep 1, or --optimizer adamw"
        )


def _tensor(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    if config.tp > 1:  # `_switches` refuses tp_sequence_parallel without tp
        yield from tp_violations(facts, config.tp, config.tp_sequence_parallel)
    local = config.seq_len // (config.sp_ring * config.sp_ulysses)
    if config.tp_sequence_parallel and local % config.tp:
        yield (
            f"tp={config.tp} must divide the {local} tokens of a sequence-parallel rank (--seq-len {config.seq_len} / "
            f"{config.sp_ring * config.sp_ulysses}) for --tp-sequence-parallel: change --seq-len"
        )


def _pipeline(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    stages = config.pp * stages_per_rank(config.pp_schedule) if config.pp > 1 else 1
    yield from (f"pp={config.pp} with pp_schedule={config.pp_schedule}: {v}" for v in pp_violations(facts, stages))


def _experts(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    yield from ep_violations(facts, config.ep)
    yield from balance_violations(config, facts)
    if facts.num_experts and config.zero == 0 and config.ep * config.tp > 1:
        yield (
            f"zero=0 replicates every expert, but ep={config.ep} x tp={config.tp} ranks share them: use zero=1 or more"
        )
    if facts.num_experts and config.mlp_tile:
        yield f"mlp_tile={config.mlp_tile} tiles dense MLPs, and those of {facts.name} are experts: remove it"


def balance_violations(config: RouterConfig, facts: ModelFacts) -> Iterator[str]:
    """Yield why a model cannot have the load-balancing loss of `config`."""
    if config.router_aux_loss_coef > 0 and not facts.num_experts:
        yield (
            f"router_aux_loss_coef={config.router_aux_loss_coef} balances experts, and {facts.name} has none: remove it"
        )
    if config.router_aux_loss_coef > 0 and facts.num_experts and not facts.balancing_loss:
        yield (
            f"router_aux_loss_coef={config.router_aux_loss_coef} weights a load-balancing loss, and transformers "
            f"defines none for {facts.name}: remove it"
        )
    if config.router_balance != "step" and not facts.num_experts:
        yield f"router_balance={config.router_balance} balances experts, and {facts.name} has none: remove it"


def _above(number: int, multiple: int) -> int:
    """Round `number` up to a multiple of `multiple`."""
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
    if facts.num_heads % facts.num_kv_heads:
        yield (
            f"{facts.name} has {facts.num_heads} query heads and {facts.num_kv_heads} key-value heads: the "
            f"key-value heads must divide the query heads. Change the model's num_key_value_heads"
        )


_SP = ("sp_ring", "sp_ulysses")
_DEGREES = (*_SP, "dp_shard", "dp_replicate", "tp", "pp", "ep")
# Each rule with the fields it reads.
RULES: tuple[tuple[Callable[[TrainConfig, int], Iterator[str]], tuple[str, ...]], ...] = (
    (_degrees, (*_DEGREES, "sp_order")),
    (_sequence, (*_SP, "sp_layout", "seq_len")),
    (_global_batch, (*_DEGREES, "batch_size", "global_batch_size")),
    (_train_tokens, ("train_tokens", "steps")),
    (_micro_batches, ("batch_size", "micro_batches", "pp", "pp_schedule")),
    (_zero_bubble, ("pp", "pp_schedule", "zero", "ac", "mlp_tile")),
    (_switches, ("ac", "mlp_tile", "tp", "plan", "lora_rank")),
    (_engine, (*_DEGREES, "engine", "lora_rank", "zero")),
    (_optimizer, ("optimizer", "muon_momentum", "engine", "tp", "ep", "optim_offload")),
)
MODEL_RULES: tuple[tuple[Callable[[TrainConfig, ModelFacts], Iterator[str]], tuple[str, ...]], ...] = (
    (_heads, (*_SP, "tp")),
    (_tensor, (*_SP, "tp", "seq_len")),
    (_pipeline, ("pp", "pp_schedule")),
    (_experts, ("ep", "tp", "zero", "router_aux_loss_coef", "router_balance", "mlp_tile")),
)
