"""PPO's advantages and returns, as ReaL has them (arXiv 2406.14088): GAE, KL control, values normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Reduce

from .gae import gae
from .kl import KLControl
from .options import PPO
from .response_rows import per_sample, scalars
from .scored_batch import Batch
from .statistics import EPSILON, SUMS, RunningMoments, moments, whitened


@runtime_checkable
class Stateful(Protocol):
    """A function of samples that remembers. On every rank of its call it remembers the same."""

    def state_dict(self) -> dict[str, float]:
        """All that later steps depend on."""

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ValueError: naming what is missing and what is too much.
        """


@dataclass(eq=False)
class PPOAdvantages:
    """A function of samples, and what it remembers from step to step.

    Beside what `Batch.result` gives: `returns`, as the critic should say them; and the same for all samples,
    `kl_coefficient` (this step's) and `explained_variance` (of returns, by values: 1 is all of it).

    Attributes:
        kl: weight of the penalty in the next step.
        returns: statistics of all returns so far. The critic's values mean what these say before a step, and returns
            are normalised by what they say after it.
    """

    options: PPO
    kl: KLControl
    returns: RunningMoments

    @staticmethod
    def of(options: PPO) -> PPOAdvantages:
        """At the start of training."""
        return PPOAdvantages(
            options,
            KLControl(options.kl, options.kl_target, options.kl_horizon),
            RunningMoments(options.value_norm, options.value_norm_beta, options.value_norm_eps),
        )

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        options, coefficient = self.options, self.kl.coefficient
        seen = rewarded = Batch.of(samples, options)
        if options.normalise_rewards:
            rewarded = replace(seen, rewards_N=whitened(seen.rewards_N, moments(seen.rewards_N, reduce)))
        responses = seen.responses
        inside_NR = responses.inside_NR
        values_NR = self.returns.denormalise(responses.rows(samples["values"])).where(inside_NR, 0)
        advantages_NR = gae(
            rewarded.token_rewards(coefficient),
            values_NR,
            inside_NR,
            self._last_values(samples),
            gamma=options.gamma,
            lam=options.lam,
        )
        returns_NR = advantages_NR + values_NR
        of_returns = moments(returns_NR[inside_NR], reduce)
        of_errors = moments(advantages_NR[inside_NR], reduce)  # returns - values
        if options.normalise_advantages:
            advantages_NR = whitened(advantages_NR, of_errors)
        self.returns = self.returns.updated(of_returns)
        if options.kl_in_reward:
            divergence = moments(seen.log_ratios_NR.sum(1), reduce)
            self.kl = self.kl.updated(divergence.mean, int(divergence.count))
        vary = of_returns.variance > EPSILON**2  # else there is nothing to explain but rounding
        explained = 1 - of_errors.variance / of_returns.variance if vary else 0.0
        result = seen.result(advantages_NR, reduce)
        result["returns"] = responses.per_token(self.returns.normalise(returns_NR))
        for name, value in (("kl_coefficient", coefficient), ("explained_variance", explained)):
            result[name] = per_sample(torch.full((len(samples),), value))
        return Samples(samples.ids, result)

    def state_dict(self) -> dict[str, float]:
        return {"kl_coefficient": self.kl.coefficient, **{key: getattr(self.returns, key) for key in SUMS}}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if state.keys() != (known := {"kl_coefficient", *SUMS}):
            raise ValueError(f"PPO's advantages remember {sorted(known)}, but were given {sorted(state)}")
        if self.kl.target:  # a fixed weight is what the options say, which a run that goes on may change
            self.kl = replace(self.kl, coefficient=state["kl_coefficient"])
        weight, total, total_square = (state[key] for key in SUMS)
        self.returns = replace(self.returns, weight=weight, total=total, total_square=total_square)

    def _last_values(self, samples: Samples) -> Tensor:
        """(N,) of the state behind the last token: 0 where the response ended, else the critic's, of what was cut."""
        last_N = self.returns.denormalise(scalars([values[-1] for values in samples["values"]]))
        return last_N.where(scalars(samples["finished"]) == 0, 0)
