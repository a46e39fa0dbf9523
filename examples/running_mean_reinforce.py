"""An algorithm outside of the package: REINFORCE with the mean of all earlier rewards as baseline.

torchrun --nproc-per-node 8 rlhf.py --algorithm examples/running_mean_reinforce.py:RUNNING_MEAN_REINFORCE
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from usp.rlhf.api import (
    Aggregation,
    Algorithm,
    Batch,
    PolicyOptions,
    Reduce,
    Samples,
    moments,
    per_sample,
    policy_calls,
)


@dataclass(frozen=True)
class RunningMeanReinforce(PolicyOptions):
    """Its options are flags: --options kl=0.1,mini_batches=2."""

    kl: float = 0.05
    aggregation: Aggregation = "sequence_sum"


@dataclass(eq=False)
class RunningMeanAdvantages:
    """Advantages from samples, with a state that checkpoints keep: number and sum of the rewards so far."""

    options: RunningMeanReinforce
    count: float = 0.0
    total: float = 0.0

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        batch = Batch.of(samples, self.options)
        baseline = self.total / max(self.count, 1)
        rewards_N = batch.rewards_N - self.options.kl * batch.log_ratios_NR.sum(1)
        seen = moments(rewards_N[batch.kept_N], reduce)  # of all ranks
        self.count, self.total = self.count + seen.count, self.total + seen.count * seen.mean
        result = batch.result(batch.spread(rewards_N - baseline), reduce)
        return Samples(samples.ids, {**result, "baseline": per_sample(torch.full((len(samples),), baseline))})

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.total = state["count"], state["total"]


RUNNING_MEAN_REINFORCE = Algorithm(
    RunningMeanReinforce, lambda o: policy_calls(o, RunningMeanAdvantages(o), scalars=("baseline",))
)
