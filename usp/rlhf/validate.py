"""Checks of single values of an RLHF configuration, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from usp.config import flag
from usp.data.files import STDLIB
from usp.rlhf.plan.plan import TOKENS_PER_RANK
from usp.run.metrics import wandb_problem
from usp.train.validate import (
    AT_LEAST_ONE,
    CHOICES,
    FRACTION,
    NOT_NEGATIVE,
    RANGES,
    RATE,
    Range,
    memory_violations,
    schedule_violations,
    unused_lora_flags,
    value_violations,
)

from .algorithms.algorithm import Algorithm
from .config import DEFAULT_SFT_STEPS, LONG_PROMPTS, REWARD_FAILURES, SEARCH, RlhfConfig, default_of
from .replan.replan_options import ReplanOptions

OWN_RANGES = {
    **dict.fromkeys(("prompt_tokens", "max_new_tokens", "slots", "eval_samples"), AT_LEAST_ONE),
    **dict.fromkeys(("prompts", "group_size", "temperature", "top_k", "reward_retries", "eval_prompts"), NOT_NEGATIVE),
    "eval_temperature": Range(lambda value: value == -1 or 0 <= value < math.inf, "at least 0, or -1 for the default"),
    "eval_pass_score": Range(math.isfinite, "finite"),
    **dict.fromkeys(("critic_learning_rate", "sft_learning_rate"), RATE),
    "warmup_steps": Range(lambda value: value >= -1, "at least 0, or -1 for the algorithm's"),
    "top_p": Range(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "micro_batch_tokens": Range(
        lambda value: value >= -1, f"at least 1, 0 for no limit, or -1: {TOKENS_PER_RANK} per sequence-parallel rank"
    ),
    "search_budget": Range(lambda value: 0 <= value < math.inf, "at least 0 seconds"),
    "wrong_answers": FRACTION,
    "sft_steps": Range(lambda value: value >= -1, f"at least 0, or -1: {DEFAULT_SFT_STEPS} for random weights"),
}


def violations(config: RlhfConfig, algorithms: Mapping[str, Algorithm]) -> Iterator[str]:
    """Yield one message per invalid value."""
    choices = {
        **CHOICES,
        "algorithm": tuple(algorithms),
        "reward_failure": REWARD_FAILURES,
        "long_prompts": LONG_PROMPTS,
        "staleness": (0, 1),
    }
    yield from value_violations(config, choices, {**RANGES, **OWN_RANGES}).values()
    supervised = [name for name, algorithm in algorithms.items() if algorithm.data == "answers"]
    if config.wrong_answers and (config.algorithm not in supervised or config.data != STDLIB):
        needed = f"--data {STDLIB} and --algorithm {' or '.join(supervised)}"
        yield f"--wrong-answers = {config.wrong_answers} requires {needed}: remove it"
    if config.data == STDLIB and config.long_prompts != LONG_PROMPTS[0]:
        yield f"--long-prompts = {config.long_prompts} requires a --data file: built-in prompts fit, remove it"
    yield from unused_lora_flags(config)
    yield from memory_violations(config)
    yield from schedule_violations(config, config.steps)
    algorithm = algorithms.get(config.algorithm)
    if (config.stop or config.stop_ids) and algorithm and algorithm.data != "prompts":
        yield f"--stop and --stop-ids end generated responses, and {config.algorithm} generates none: remove them"
    if config.staleness and algorithm and algorithm.data != "prompts":
        yield f"--staleness = {config.staleness} is of generated responses, and {config.algorithm} has none: remove it"
    if config.lora_rank and algorithm and algorithm.model_role != "actor":
        yield (
            f"--lora-rank = {config.lora_rank} is not supported by --algorithm {config.algorithm}, which trains a "
            f"scalar head, and heads get no adapters: remove it"
        )
    yield from _search(config)
    yield from _evaluation(config, algorithm)
    yield from _replanning(config, algorithm)
    if problem := wandb_problem(config.wandb_project):
        yield problem


def _search(config: RlhfConfig) -> Iterator[str]:
    """Yield which flags contradict how the plan is chosen."""
    if config.plan != SEARCH:
        if config.hardware != default_of(RlhfConfig, "hardware") and not config.replan:
            yield f"--hardware = {config.hardware} is only used by --plan {SEARCH} and --replan: give one, or remove it"
        if config.search_budget != default_of(RlhfConfig, "search_budget"):
            yield f"--search-budget = {config.search_budget} is only used by --plan {SEARCH}: give both or neither"
        return
    for name in ("offload", "offload_optimizer"):
        if getattr(config, name):
            yield f"{flag(name)} is chosen by --plan {SEARCH}: remove it"
    if config.lora_rank:
        yield (
            f"--plan {SEARCH} does not predict steps of adapters (--lora-rank = {config.lora_rank}): give a named plan "
            f"or a YAML file"
        )


def _evaluation(config: RlhfConfig, algorithm: Algorithm | None) -> Iterator[str]:
    """Yield which flags of evaluations contradict each other."""
    if not config.eval_every:
        for name, off in without_evaluation().items():
            if getattr(config, name) != off:
                yield f"{flag(name)} is an option of evaluations, but --eval-every is 0: set it, or remove this"
        return
    if algorithm and algorithm.data != "prompts":
        yield f"--eval-every = {config.eval_every} samples responses, which {config.algorithm} does not: remove it"
    if not config.eval_data and not config.eval_prompts:
        yield f"--eval-every = {config.eval_every} needs prompts: give --eval-data, or --eval-prompts to hold out"
    if config.eval_data == STDLIB:
        yield f"--eval-data = {STDLIB} must be a .jsonl file: --eval-prompts holds prompts out of the built-in ones"
    if config.eval_samples > 1 and config.eval_temperature == 0:
        yield f"--eval-samples = {config.eval_samples} with --eval-temperature = 0 are equal responses: change one"
    if config.keep_best and not config.checkpoint_every:
        yield "--keep-best keeps a checkpoint, but --checkpoint-every is 0: set it, or remove --keep-best"


def _replanning(config: RlhfConfig, algorithm: Algorithm | None) -> Iterator[str]:
    if not config.replan:
        return
    try:
        options = ReplanOptions.parse(config.replan)
    except ValueError as error:
        yield str(error)
        return
    if algorithm and algorithm.data != "prompts":
        yield f"--replan = {config.replan} follows the lengths of responses, and {config.algorithm} generates none"
    if options.every >= config.steps:
        yield f"--replan = {config.replan} searches after step {options.every} of --steps = {config.steps}: too late"
    for name, what in (("lora_rank", "with adapters"), ("ep", "with divided experts")):
        if getattr(config, name) != default_of(RlhfConfig, name):
            yield f"--replan = {config.replan} has no predictions of calls {what}: remove it, or {flag(name)}"


def without_evaluation() -> dict[str, Any]:
    """Return the values of the fields that only evaluations use in a run without any."""
    names = ("eval_every", "eval_data", "eval_samples", "eval_temperature", "eval_pass_score", "keep_best")
    return {name: default_of(RlhfConfig, name) for name in names}
