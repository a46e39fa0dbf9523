"""Checks of single values of an RLHF configuration, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from usp.data.files import STDLIB
from usp.run.metrics import wandb_problem
from usp.train.validate import (
    AT_LEAST_ONE,
    CHOICES,
    FRACTION,
    NOT_NEGATIVE,
    RANGES,
    RATE,
    Range,
    unused_lora_flags,
    value_violations,
)

from .algorithms.algorithm import Algorithm
from .config import DEFAULT_SFT_STEPS, LONG_PROMPTS, REWARD_FAILURES, RlhfConfig

OWN_RANGES = {
    **dict.fromkeys(("prompt_tokens", "max_new_tokens", "slots"), AT_LEAST_ONE),
    **dict.fromkeys(("prompts", "group_size", "temperature", "top_k", "micro_batch_tokens"), NOT_NEGATIVE),
    "reward_retries": NOT_NEGATIVE,
    **dict.fromkeys(("critic_learning_rate", "sft_learning_rate"), RATE),
    "warmup_steps": Range(lambda value: value >= -1, "at least 0, or -1 for the algorithm's"),
    "top_p": Range(lambda value: 0 < value <= 1, "above 0 and at most 1"),
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
    }
    yield from value_violations(config, choices, {**RANGES, **OWN_RANGES}).values()
    supervised = [name for name, algorithm in algorithms.items() if algorithm.data == "answers"]
    if config.wrong_answers and (config.algorithm not in supervised or config.data != STDLIB):
        needed = f"--data {STDLIB} and --algorithm {' or '.join(supervised)}"
        yield f"--wrong-answers = {config.wrong_answers} requires {needed}: remove it"
    if config.data == STDLIB and config.long_prompts != LONG_PROMPTS[0]:
        yield f"--long-prompts = {config.long_prompts} requires a --data file: built-in prompts fit, remove it"
    yield from unused_lora_flags(config)
    algorithm = algorithms.get(config.algorithm)
    if config.lora_rank and algorithm and algorithm.model_role != "actor":
        yield (
            f"--lora-rank = {config.lora_rank} is not supported by --algorithm {config.algorithm}, which trains a "
            f"scalar head, and heads get no adapters: remove it"
        )
    if problem := wandb_problem(config.wandb_project):
        yield problem
