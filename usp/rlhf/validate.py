"""Checks of single values of an RLHF configuration, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from attention import KERNEL_NAMES, LAYOUTS
from parallel import SP_ORDERS, ZERO_STAGES
from usp.config import DEVICES, DTYPES, flag
from usp.data.documents import STDLIB
from usp.run.failures import nearest
from usp.run.metrics import wandb_problem

from .algorithms.algorithm import Algorithm
from .config import DEFAULT_SFT_STEPS, RlhfConfig

AT_LEAST_ONE = ("prompt_tokens", "max_new_tokens", "slots", "steps", "log_every", "keep_checkpoints", "loss_chunk")
NOT_NEGATIVE = (
    *("prompts", "group_size", "temperature", "top_k", "micro_batch_tokens", "warmup_steps", "weight_decay", "seed"),
    *("checkpoint_every", "hang_timeout"),
)


def violations(config: RlhfConfig, algorithms: Mapping[str, Algorithm]) -> Iterator[str]:
    """Yield one message per invalid value."""
    for name, choices in (
        ("algorithm", tuple(algorithms)),
        ("sp_layout", LAYOUTS),
        ("sp_order", SP_ORDERS),
        ("attention_kernel", KERNEL_NAMES),
        ("dtype", DTYPES),
        ("device", DEVICES),
    ):
        value = getattr(config, name)
        if value not in choices:
            yield f"{flag(name)} = {value!r} must be one of {', '.join(choices)}{nearest(value, choices)}"
    if config.zero not in ZERO_STAGES:
        yield f"--zero = {config.zero} must be one of {', '.join(map(str, ZERO_STAGES))}"
    for name in AT_LEAST_ONE:
        if getattr(config, name) < 1:
            yield f"{flag(name)} = {getattr(config, name)} must be at least 1"
    for name in NOT_NEGATIVE:
        if not getattr(config, name) >= 0:
            yield f"{flag(name)} = {getattr(config, name)} must not be negative"
    for name in ("learning_rate", "critic_learning_rate", "sft_learning_rate"):
        value = getattr(config, name)
        if not 0 < value < math.inf and (name != "learning_rate" or value):  # 0: the algorithm's default
            yield f"{flag(name)} = {value} must be positive and finite"
    if not config.max_grad_norm > 0:
        yield f"--max-grad-norm = {config.max_grad_norm} must be positive; inf disables clipping"
    if not 0 < config.top_p <= 1:
        yield f"--top-p = {config.top_p} must be above 0 and at most 1"
    supervised = [name for name, algorithm in algorithms.items() if algorithm.data == "answers"]
    if not 0 <= config.wrong_answers < 1:
        yield f"--wrong-answers = {config.wrong_answers} must be at least 0 and below 1"
    elif config.wrong_answers and (config.algorithm not in supervised or config.data != STDLIB):
        needed = f"--data {STDLIB} and --algorithm {' or '.join(supervised)}"
        yield f"--wrong-answers = {config.wrong_answers} requires {needed}: remove it"
    if config.sft_steps < -1:
        yield f"--sft-steps = {config.sft_steps} must be at least 0, or -1: {DEFAULT_SFT_STEPS} for random weights"
    if problem := wandb_problem(config.wandb_project):
        yield problem
