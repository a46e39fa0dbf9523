"""PPO with a critic: GAE, adaptive KL penalty, and value normalization as in ReaL (arXiv 2406.14088)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from usp.fields import AtLeast1, Fraction, NotNegative
from usp.rlhf.graph import Inference, ModelCall, Reduce
from usp.rlhf.samples import Samples

from .algorithm import Above0, Algorithm, Share, above, train
from .objectives import ClippedValue
from .policy import Batch, PolicyOptions, policy_calls
from .response_rows import EPSILON, SUMS, RunningMoments, discounted_sums, moments, per_sample, scalars, whitened

MAX_KL_ERROR = 0.2  # clip of a step's relative error
_BEFORE = "before_"  # prefix of the statistics `PPOAdvantages.before` in a state


@dataclass(frozen=True)
class PPO(PolicyOptions):
    """Options of proximal policy optimization (arXiv 1707.06347; for language models arXiv 1909.08593, 2203.02155).

    The KL penalty is part of each token's reward; the losses of policy and critic are means over tokens.

    Attributes:
        gamma, lam: discount of rewards, and of temporal differences (GAE).
        value_eps_clip: see `ClippedValue`.
        normalise_rewards: to mean 0 and standard deviation 1 over the responses of the step, before the KL penalty.
        normalise_advantages: to mean 0 and standard deviation 1 over the tokens of the step.
        kl_target: KL of a whole response, in nats, to which the weight of the penalty adapts, see `next_kl`; 0: it is
            fixed.
        kl_horizon: samples over which a relative error of 1 would double the weight, but for the clip to 0.2. Must be
            above a fifth of a step's samples: otherwise the paper's formula can make the weight 0, for good, or
            negative.
        value_norm, value_norm_beta, value_norm_eps: see `RunningMoments`.
    """

    by_turns = True
    never: ClassVar = {"aggregation": "on PPO, whose losses are means over tokens"}
    mini_batches: int = 4
    gamma: Share = 1.0
    lam: Share = 1.0
    value_eps_clip: Annotated[float, above(0, "the critic could not change")] = 0.2
    normalise_rewards: bool = False
    normalise_advantages: bool = True
    kl_target: NotNegative = 0.0
    kl_horizon: AtLeast1 = 10_000
    value_norm: Literal["exp", "mean", "none"] = "exp"
    value_norm_beta: Fraction = 0.99995
    value_norm_eps: Above0 = 1e-5

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.kl_target and not self.kl:
            yield f"kl_target={self.kl_target} needs kl above 0, the initial weight"
        if self.turn_discount and self.normalise_rewards:
            yield "normalise_rewards is of whole responses, and turn_discount has rewards of turns: remove one"

    def step_violations(self, samples: int) -> Iterator[str]:
        if self.kl_target and self.kl_horizon <= MAX_KL_ERROR * samples:
            yield f"kl_horizon={self.kl_horizon} must be above {MAX_KL_ERROR:g} times the {samples} samples of a step"


def next_kl(options: PPO, weight: float, kl: float, samples: int) -> float:
    """Adapt the weight of the KL penalty to a step of `samples` responses with mean divergence `kl`. Ziegler et al.,
    "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593), section 2.2."""
    if not options.kl_target:
        return weight
    error = min(max(kl / options.kl_target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return weight * (1 + error * samples / options.kl_horizon)


def gae(
    rewards_NR: Tensor,
    values_NR: Tensor,
    inside_NR: Tensor,
    last_values_N: Tensor,
    *,
    gamma: float | Tensor,
    lam: float,
) -> Tensor:
    """Return generalized advantages, (N, R) (Schulman et al., arXiv 1506.02438, equation 16).

    The sum over k of (gamma lam)^k delta[t + k], with delta[t] = rewards[t] + gamma * values[t + 1] - values[t].

    Args:
        inside_NR: mask of the entries that hold a token; rewards and values are 0 elsewhere.
        last_values_N: value of the state after each row's last token: 0 where the response ended there.
        gamma: for all tokens, or (N, R) of each.
    """
    width = rewards_NR.shape[1]
    is_last_NR = inside_NR & ~pad(inside_NR, (0, 1))[:, 1:]
    next_values_NR = torch.where(is_last_NR, last_values_N[:, None], pad(values_NR, (0, 1))[:, 1 : width + 1])
    deltas_NR = (rewards_NR + gamma * next_values_NR - values_NR).where(inside_NR, 0)
    return discounted_sums(deltas_NR, gamma * lam)


@dataclass(eq=False)
class PPOAdvantages:
    """Function of samples with state: advantages, and `returns` on the critic's scale.

    Also returns two numbers that are equal for all samples: `kl_coefficient` of this step, and `explained_variance` of
    returns by values (1 is all of it).

    Attributes:
        kl: weight of the penalty in the next step.
        returns: statistics of all returns so far. A step's values are denormalized by those that its critic was trained
            with, and its returns normalized by those after it.
        before: the statistics before the last step: with staleness, its critic has not trained yet when the next step's
            values are computed.
    """

    options: PPO

    def __post_init__(self) -> None:
        options = self.options
        self.kl = options.kl
        self.returns = RunningMoments(options.value_norm, options.value_norm_beta, options.value_norm_eps)
        self.before = self.returns

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        options, coefficient = self.options, self.kl
        batch = rewarded = Batch.of(samples, options)
        if options.normalise_rewards:
            of_rewards = moments(batch.rewards_N[batch.kept_N], reduce)
            rewarded = replace(batch, rewards_N=whitened(batch.rewards_N, of_rewards))
        responses = batch.responses
        inside_NR = responses.inside_NR
        of_critic = self.before if options.staleness else self.returns
        values_NR = of_critic.denormalise(responses.rows(samples["values"])).where(inside_NR, 0)
        rewards_NR = rewarded.token_rewards(coefficient)
        # The value after the last token is 0 for finished responses, the critic's for truncated ones.
        last_N = of_critic.denormalise(scalars([values[-1] for values in samples["values"]]))
        last_N = last_N.where(scalars(samples["finished"]) == 0, 0)
        gamma = batch.token_discounts(options.gamma)
        advantages_NR = gae(rewards_NR, values_NR, inside_NR, last_N, gamma=gamma, lam=options.lam)
        returns_NR = advantages_NR + values_NR
        of_returns = moments(returns_NR[inside_NR], reduce)
        of_errors = moments(advantages_NR[inside_NR], reduce)  # returns - values
        if options.normalise_advantages:
            advantages_NR = whitened(advantages_NR, of_errors)
        self.before, self.returns = self.returns, self.returns.updated(of_returns)
        if options.kl_in_reward:
            divergence = moments(batch.log_ratios_NR.sum(1)[batch.kept_N], reduce)
            self.kl = next_kl(options, coefficient, divergence.mean, int(divergence.count))
        vary = of_returns.variance > EPSILON**2  # otherwise only rounding is left to explain
        explained = 1 - of_errors.variance / of_returns.variance if vary else 0.0
        result = batch.result(advantages_NR, reduce)
        result["returns"] = responses.per_token(self.returns.normalise(returns_NR))
        for name, value in (("kl_coefficient", coefficient), ("explained_variance", explained)):
            result[name] = per_sample(torch.full((len(samples),), value))
        return Samples(samples.ids, result)

    def state_dict(self) -> dict[str, float]:
        state = {"kl_coefficient": self.kl, **{key: getattr(self.returns, key) for key in SUMS}}
        return state | {f"{_BEFORE}{key}": getattr(self.before, key) for key in SUMS if self.options.staleness}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self.options.kl_target:  # a fixed weight comes from the options, which may change on resume
            self.kl = state["kl_coefficient"]
        after: dict[str, Any] = {key: state[key] for key in SUMS}
        before = {key: state.get(f"{_BEFORE}{key}", after[key]) for key in SUMS}  # saved only with staleness
        self.before, self.returns = replace(self.returns, **before), replace(self.returns, **after)


def _calls(options: PPO) -> tuple[ModelCall, ...]:
    values = ModelCall("critic_inference", "critic", Inference("values"), ("tokens",), ("values",))
    policy = policy_calls(
        options,
        PPOAdvantages(options),
        between=(values,),
        inputs=("values",),
        per_token=("returns",),
        scalars=("kl_coefficient", "explained_variance"),
    )
    return (*policy, train("critic", ClippedValue(options.value_eps_clip), options))


PPO_ALGORITHM = Algorithm(PPO, _calls, learning_rate=3e-4)
