"""Advantages without a critic, as functions of options and samples: a baseline of other responses, or of the step.

Each gives what `Batch.result` gives. Those of groups need them whole: ids p * group_size up to (p + 1) * group_size - 1
are the responses to prompt p, and `Compute` has that unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Reduce

from .gae import discounted_sums
from .options import GRPO, RLOO, ReinforcePlusPlus, ReMax
from .response_rows import per_sample
from .scored_batch import Batch
from .statistics import moments, whitened

_EQUAL = 1e-6  # rewards of a group that differ less are equal: a reward model's differ by rounding between layouts
_STD_EPSILON = 1e-4  # beside a group's standard deviation, so that such differences stay small


def rloo_advantages(options: RLOO, samples: Samples, reduce: Reduce) -> Samples:
    """A response's reward less the mean of the others' to the prompt (arXiv 2402.14740); the reward is
    less kl times the response's log-ratio."""
    batch = Batch.of(samples, options)
    group_size = options.generate.group_size
    rewards_N = batch.rewards_N - options.kl * batch.log_ratios_NR.sum(1)
    distances_PG = _distances(rewards_N, group_size)
    # r - (sum - r) / (G - 1) = (r - mean) * G / (G - 1)
    advantages_N = (distances_PG * (group_size / (group_size - 1))).flatten()
    return Samples(samples.ids, batch.result(_alike(advantages_N, batch), reduce))


def reinforce_plus_plus_advantages(options: ReinforcePlusPlus, samples: Samples, reduce: Reduce) -> Samples:
    """Discounted rewards from a token on, to mean 0 and standard deviation 1 over all tokens of the step (arXiv
    2501.03262)."""
    batch = Batch.of(samples, options)
    inside_NR = batch.responses.inside_NR
    returns_NR = discounted_sums(batch.token_rewards(options.kl), options.gamma)
    return Samples(samples.ids, batch.result(whitened(returns_NR, moments(returns_NR[inside_NR], reduce)), reduce))


def remax_advantages(options: ReMax, samples: Samples, reduce: Reduce) -> Samples:
    """Rewards from a token on, less the reward of the greedy response to the prompt (arXiv 2310.10505)."""
    batch = Batch.of(samples, options)
    shape = options.shape()
    baselines_N = shape(samples["greedy_score"], samples["greedy_finished"], torch.zeros(len(samples)))
    returns_NR = discounted_sums(batch.token_rewards(options.kl), 1.0)
    return Samples(samples.ids, batch.result(returns_NR - baselines_N[:, None], reduce))


def grpo_advantages(options: GRPO, samples: Samples, reduce: Reduce) -> Samples:
    """A response's reward less its group's mean, over the group's standard deviation if `scale_by_std` (arXiv
    2402.03300, section 4.1.2). Also gives `informative`: 1 where the rewards of the group are not all equal."""
    batch = Batch.of(samples, options)
    group_size = options.generate.group_size
    distances_PG = _distances(batch.rewards_N, group_size)
    differs_P = distances_PG.amax(1) - distances_PG.amin(1) > _EQUAL
    differs_N = differs_P.repeat_interleave(group_size)
    if options.scale_by_std:
        variance_P = distances_PG.square().sum(1) / (group_size - 1)
        distances_PG = distances_PG / (variance_P.sqrt() + _STD_EPSILON)[:, None]
    kept_N = differs_N if options.drop_equal_groups else None
    result = batch.result(_alike(distances_PG.flatten(), batch), reduce, kept_N)
    return Samples(samples.ids, {**result, "informative": per_sample(differs_N)})


def _distances(rewards_N: Tensor, group_size: int) -> Tensor:
    """(P, G) from the mean of the group."""
    rewards_PG = rewards_N.unflatten(0, (len(rewards_N) // group_size, group_size))
    return rewards_PG - rewards_PG.mean(1, keepdim=True)


def _alike(x_N: Tensor, batch: Batch) -> Tensor:
    """(N, R), the same at each token of a response."""
    return x_N[:, None] * batch.responses.inside_NR
