"""The variants of GRPO, from their option strings."""

from __future__ import annotations

from dataclasses import replace

from usp.fields import parse_options
from usp.rlhf.algorithms.critic_free import GRPO

DR_GRPO = "scale_by_std=false,aggregation=constant"
DAPO = "eps_high=0.28,kl=0,aggregation=token_mean,drop_equal_groups=true"


def dr_grpo(options: GRPO) -> GRPO:
    return replace(options, **parse_options(DR_GRPO, GRPO, "--options"))


def dapo(options: GRPO, overlong_buffer: int = 0) -> GRPO:
    return replace(options, **parse_options(DAPO, GRPO, "--options"), overlong_buffer=overlong_buffer)
