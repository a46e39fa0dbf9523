"""What can be set of each algorithm. Every option is honoured, or named by `violations`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from usp.rlhf.graph.calls import Generate

from .kl import Estimator
from .rewards import RewardShape, ScoreWith
from .weights import Aggregation, Weighting

_BOUNDS = ("eps_high", "value_eps_clip", "max_reward_clip")  # inf: there is none


@dataclass(frozen=True)
class SFT:
    """Next-token training on `tokens` where `mask` says. One mini-batch is one optimiser step."""

    mini_batches: int = 1
    epochs: int = 1

    def violations(self) -> Iterator[str]:
        yield from _finite(self)
        yield from _at_least(self, 1, "mini_batches", "epochs")


@dataclass(frozen=True)
class RewardModel(SFT):
    """A reward model from pairs: sample 2i was preferred to sample 2i + 1."""


@dataclass(frozen=True)
class DPO(SFT):
    """Pairs as `RewardModel`'s, with a mask of the responses. See `pairs.DirectPreference`."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if not self.beta > 0:
            yield f"beta={self.beta} must be above 0"
        if not 0 <= self.label_smoothing < 0.5:
            yield f"label_smoothing={self.label_smoothing} must be at least 0 and below 0.5"


@dataclass(frozen=True)
class PolicyOptions:
    """What all algorithms have that train a policy on its own responses.

    Attributes:
        generate: how the policy samples.
        reward: a function; None: the model of the role "reward".
        reward_bias, reward_scaling, max_reward_clip, zero_unfinished: see `RewardShape`.
        kl: weight of the divergence from the role "ref"; 0: there is no such role.
        eps_low, eps_high: see `ClippedPolicy`.
        entropy_bonus: weight of the entropy that the loss rewards.
        aggregation: see `Weighting`; the length of "constant" is generate.max_new_tokens.
        mini_batches, epochs: optimiser steps of a step are mini_batches * epochs.
        max_importance_ratio: no more optimiser steps once a mini-batch's mean ratio is above; 0: all are made.
    """

    generate: Generate = field(default_factory=Generate)
    reward: ScoreWith | None = None
    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    max_reward_clip: float = 20.0
    zero_unfinished: bool = False
    kl: float = 0.1
    eps_low: float = 0.2
    eps_high: float = 0.2
    entropy_bonus: float = 0.0
    aggregation: Aggregation = "token_mean"
    mini_batches: int = 1
    epochs: int = 1
    max_importance_ratio: float = 5.0

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence is taken from rewards."""
        return self.kl > 0

    def shape(self) -> RewardShape:
        """Of rewards."""
        return RewardShape(self.reward_bias, self.reward_scaling, self.max_reward_clip, self.zero_unfinished)

    def weighting(self) -> Weighting:
        """Of the policy's loss."""
        return Weighting(self.aggregation, self.mini_batches, length=self.generate.max_new_tokens)

    def violations(self) -> Iterator[str]:
        """Everything that is wrong."""
        yield from _finite(self)
        yield from _finite(self.generate)
        yield from _at_least(self, 1, "mini_batches", "epochs")
        yield from _at_least(self, 0, "kl", "eps_low", "eps_high", "entropy_bonus", "max_importance_ratio")
        yield from _at_least(self.generate, 1, "group_size", "max_new_tokens")
        if not self.generate.temperature > 0:
            yield (
                f"generate.temperature={self.generate.temperature} must be above 0: greedy responses are not drawn "
                "from the policy that is trained"
            )
        if self.eps_low >= 1:
            yield f"eps_low={self.eps_low} must be below 1: ratios are above 0"
        if not self.max_reward_clip > 0:
            yield f"max_reward_clip={self.max_reward_clip} must be above 0: rewards would all be 0"
        if not self.reward_scaling:
            yield f"reward_scaling={self.reward_scaling} must not be 0: rewards would all be alike"
        if self.zero_unfinished and not self.generate.stop_ids:
            yield "zero_unfinished=True needs generate.stop_ids: without, no response finishes and every reward is 0"
        if self.aggregation not in ("token_mean", "sequence_mean", "sequence_sum", "constant"):
            yield f"aggregation={self.aggregation!r} must be token_mean, sequence_mean, sequence_sum or constant"
        if self.reward is not None and self.reward.prefix:
            yield f"reward.prefix={self.reward.prefix!r} must be empty: the graph names the keys"


Policy = TypeVar("Policy", bound=PolicyOptions)


@dataclass(frozen=True)
class PPO(PolicyOptions):
    """Proximal policy optimisation with a critic (arXiv 1707.06347; for language models arXiv 1909.08593, 2203.02155).

    `kl` is in the reward of each token, and the loss of policy and critic a mean over tokens.

    Attributes:
        gamma, lam: discount of rewards, and of temporal differences (GAE).
        value_eps_clip: see `ClippedValue`.
        normalise_rewards: to mean 0 and standard deviation 1 over the responses of the step, before the KL penalty.
        normalise_advantages: to mean 0 and standard deviation 1 over the tokens of the step.
        kl_target, kl_horizon: see `KLControl`.
        value_norm, value_norm_beta, value_norm_eps: see `RunningMoments`.
    """

    mini_batches: int = 4
    gamma: float = 1.0
    lam: float = 1.0
    value_eps_clip: float = 0.2
    normalise_rewards: bool = False
    normalise_advantages: bool = True
    kl_target: float = 0.0
    kl_horizon: int = 10_000
    value_norm: Literal["exp", "mean", "none"] = "exp"
    value_norm_beta: float = 0.99995
    value_norm_eps: float = 1e-5

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        yield from _fraction(self, "gamma", "lam")
        yield from _at_least(self, 0, "kl_target")
        yield from _at_least(self, 1, "kl_horizon")
        if not self.value_eps_clip > 0:
            yield f"value_eps_clip={self.value_eps_clip} must be above 0: the critic could not move"
        if self.kl_target and not self.kl:
            yield f"kl_target={self.kl_target} needs kl above 0: the weight to start from"
        if self.value_norm not in ("exp", "mean", "none"):
            yield f"value_norm={self.value_norm!r} must be exp, mean or none"
        if not 0 <= self.value_norm_beta < 1:
            yield f"value_norm_beta={self.value_norm_beta} must be at least 0 and below 1"
        if not self.value_norm_eps > 0:
            yield f"value_norm_eps={self.value_norm_eps} must be above 0: it bounds a divisor"
        if self.aggregation != "token_mean":
            yield f"aggregation={self.aggregation!r}: PPO has token_mean only, which its critic shares"


@dataclass(frozen=True)
class GRPO(PolicyOptions):
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300, section 4.1): no critic, `kl` in the loss.

    `dr_grpo` and `dapo` give its variants.

    Attributes:
        generate: group_size responses to a prompt are compared with each other.
        kl_estimator: of the divergence in the loss.
        scale_by_std: divide a reward's distance from its group's mean by the group's standard deviation.
        drop_equal_groups: a group whose rewards are all equal counts nowhere in the loss, its normalisation included;
            a mini-batch of nothing but such groups has a gradient of 0.
        overlong_buffer, overlong_penalty: see `RewardShape`.
    """

    generate: Generate = field(default_factory=lambda: Generate(group_size=8))
    kl: float = 0.04
    aggregation: Aggregation = "sequence_mean"
    kl_estimator: Estimator = "k3"
    scale_by_std: bool = True
    drop_equal_groups: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0

    @property
    def kl_in_reward(self) -> bool:
        return False

    def shape(self) -> RewardShape:
        return replace(
            super().shape(),
            overlong_buffer=self.overlong_buffer,
            overlong_penalty=self.overlong_penalty,
            max_tokens=self.generate.max_new_tokens,
        )

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        yield from _group(self.generate)
        yield from _at_least(self, 0, "overlong_penalty")
        if self.kl_estimator not in ("k1", "k2", "k3"):
            yield f"kl_estimator={self.kl_estimator!r} must be k1, k2 or k3"
        if not 0 <= self.overlong_buffer <= self.generate.max_new_tokens:
            yield (
                f"overlong_buffer={self.overlong_buffer} must be from 0 to "
                f"generate.max_new_tokens={self.generate.max_new_tokens}"
            )


def dr_grpo(options: GRPO) -> GRPO:
    """Without the two biases of GRPO: no division by the standard deviation or the length (arXiv 2503.20783)."""
    return replace(options, scale_by_std=False, aggregation="constant")


def dapo(options: GRPO, overlong_buffer: int = 0) -> GRPO:
    """Higher upper bound, mean over tokens, no equal groups, no reference (arXiv 2503.14476, sections 2.3 and 3)."""
    return replace(
        options,
        eps_high=0.28,
        kl=0.0,
        aggregation="token_mean",
        drop_equal_groups=True,
        overlong_buffer=overlong_buffer,
    )


@dataclass(frozen=True)
class RLOO(PolicyOptions):
    """REINFORCE with the mean of the other responses to a prompt as baseline (Ahmadian et al., arXiv 2402.14740).

    `kl` times the log-ratio of a whole response is taken from its reward.
    """

    generate: Generate = field(default_factory=lambda: Generate(group_size=4))
    kl: float = 0.05
    aggregation: Aggregation = "sequence_sum"

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        yield from _group(self.generate)


@dataclass(frozen=True)
class ReinforcePlusPlus(PolicyOptions):
    """REINFORCE with PPO's clipping, `kl` in each token's reward, and advantages normalised over the whole step.

    Hu, "REINFORCE++" (arXiv 2501.03262).

    Attributes:
        gamma: discount of rewards.
    """

    kl: float = 0.01
    gamma: float = 1.0

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        yield from _fraction(self, "gamma")


@dataclass(frozen=True)
class ReMax(PolicyOptions):
    """REINFORCE with the reward of the greedy response as baseline (Li et al., arXiv 2310.10505), `kl` per token."""

    aggregation: Aggregation = "sequence_sum"

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.generate.group_size != 1:
            yield f"generate.group_size={self.generate.group_size}: ReMax has one sampled response to a prompt, use 1"


Options = SFT | PolicyOptions


def _finite(options: Any) -> Iterator[str]:
    """nan, and inf where it is no bound."""
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and option.name not in _BOUNDS)):
            yield f"{option.name}={value} must be finite"


def _at_least(options: object, least: int, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(options, name)
        if not value >= least:  # nan is not
            yield f"{name}={value} must be at least {least}"


def _fraction(options: object, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(options, name)
        if not 0 <= value <= 1:
            yield f"{name}={value} must be from 0 to 1"


def _group(generate: Generate) -> Iterator[str]:
    if generate.group_size < 2:
        yield f"generate.group_size={generate.group_size} must be at least 2: responses are compared with each other"
