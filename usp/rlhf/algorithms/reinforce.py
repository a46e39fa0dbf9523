"""REINFORCE with a baseline: the other responses (RLOO), the step (REINFORCE++), the greedy response (ReMax)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Generate, ModelCall, Reduce

from .algorithm import Algorithm, fraction
from .grpo import GRPO
from .loss_weights import Aggregation
from .objectives import Estimator
from .policy import Batch, PolicyOptions, generate, policy_calls, score
from .response_rows import discounted_sums
from .statistics import moments, whitened

_GREEDY = "greedy_"


@dataclass(frozen=True)
class RLOO(PolicyOptions):
    """Options of REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740).

    The KL penalty, kl times the log-ratio of a whole response, is subtracted from its reward.
    """

    min_group_size = 2
    generate: Generate = field(default_factory=lambda: Generate(group_size=4))
    kl: float = 0.05
    aggregation: Aggregation = "sequence_sum"


@dataclass(frozen=True)
class ReinforcePlusPlus(PolicyOptions):
    """Options of REINFORCE++ (Hu, arXiv 2501.03262): PPO's clipping and KL penalty, without a critic.

    Attributes:
        gamma: discount of rewards.
    """

    kl: float = 0.01
    gamma: float = 1.0

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        yield from fraction(self, "gamma")


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(GRPO):
    """Options of REINFORCE++ with baseline (arXiv 2501.03262, section 3): the mean reward of the group is subtracted,
    and advantages are normalized over all tokens of the step. The KL penalty is in the loss, estimated by k2.
    """

    kl: float = 0.01
    kl_estimator: Estimator = "k2"
    aggregation: Aggregation = "token_mean"
    scale_by_std: bool = False

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.scale_by_std or self.drop_equal_groups:
            yield "scale_by_std and drop_equal_groups have no effect: advantages are normalized over the step, remove"


@dataclass(frozen=True)
class ReMax(PolicyOptions):
    """Options of ReMax (Li et al., arXiv 2310.10505), with the KL penalty per token."""

    aggregation: Aggregation = "sequence_sum"

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.generate.group_size != 1:
            yield f"generate.group_size={self.generate.group_size}: ReMax samples one response per prompt, use 1"


def rloo_advantages(options: RLOO, samples: Samples, reduce: Reduce) -> Samples:
    """Subtract the mean reward of the other responses to the prompt (arXiv 2402.14740)."""
    batch = Batch.of(samples, options)
    distances_PG, counts_P = batch.group_distances(batch.rewards_N - options.kl * batch.log_ratios_NR.sum(1))
    # r - (sum - r) / (G - 1) = (r - mean) * G / (G - 1)
    advantages_PG = distances_PG * (counts_P / (counts_P - 1).clamp(min=1))[:, None]
    return Samples(samples.ids, batch.result(batch.spread(advantages_PG.flatten()), reduce))


def reinforce_plus_plus_advantages(options: ReinforcePlusPlus, samples: Samples, reduce: Reduce) -> Samples:
    """Normalize the discounted returns over all tokens of the step (arXiv 2501.03262)."""
    batch = Batch.of(samples, options)
    inside_NR = batch.responses.inside_NR
    returns_NR = discounted_sums(batch.token_rewards(options.kl), options.gamma)
    return Samples(samples.ids, batch.result(whitened(returns_NR, moments(returns_NR[inside_NR], reduce)), reduce))


def reinforce_plus_plus_baseline_advantages(
    options: ReinforcePlusPlusBaseline, samples: Samples, reduce: Reduce
) -> Samples:
    """Subtract the mean reward of the group, then normalize over all tokens of the step (arXiv 2501.03262)."""
    batch = Batch.of(samples, options)
    advantages_NR = batch.spread(batch.group_distances(batch.rewards_N)[0].flatten())
    over = moments(advantages_NR[batch.responses.inside_NR], reduce)
    return Samples(samples.ids, batch.result(whitened(advantages_NR, over), reduce))


def remax_advantages(options: ReMax, samples: Samples, reduce: Reduce) -> Samples:
    """Subtract the reward of the greedy response to the prompt from the returns (arXiv 2310.10505)."""
    batch = Batch.of(samples, options, ("score", "greedy_score"))
    shape = options.shape()
    baselines_N = shape(samples["greedy_score"], samples["greedy_finished"], torch.zeros(len(samples)))
    returns_NR = discounted_sums(batch.token_rewards(options.kl), 1.0)
    return Samples(samples.ids, batch.result(returns_NR - baselines_N[:, None], reduce))


def _remax_calls(options: ReMax) -> tuple[ModelCall, ...]:
    greedy = generate("greedy_generate", replace(options.generate, temperature=0.0), _GREEDY)
    inputs = (f"{_GREEDY}score", f"{_GREEDY}finished")
    between = (greedy, score(options, _GREEDY))
    return policy_calls(options, partial(remax_advantages, options), between=between, inputs=inputs)


RLOO_ALGORITHM = Algorithm(RLOO, lambda o: policy_calls(o, partial(rloo_advantages, o), grouped=True))
REINFORCE_PLUS_PLUS_ALGORITHM = Algorithm(
    ReinforcePlusPlus, lambda o: policy_calls(o, partial(reinforce_plus_plus_advantages, o))
)
REINFORCE_PLUS_PLUS_BASELINE_ALGORITHM = Algorithm(
    ReinforcePlusPlusBaseline,
    lambda o: policy_calls(o, partial(reinforce_plus_plus_baseline_advantages, o), grouped=True),
)
REMAX_ALGORITHM = Algorithm(ReMax, _remax_calls)
