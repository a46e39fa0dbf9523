"""An algorithm that is not in the registry: REINFORCE with the mean of all earlier rewards as baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from usp.rlhf.algorithms.algorithm import Algorithm
from usp.rlhf.algorithms.loss_weights import Aggregation
from usp.rlhf.algorithms.policy import Batch, PolicyOptions, policy_calls
from usp.rlhf.algorithms.response_rows import per_sample
from usp.rlhf.algorithms.statistics import moments
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Reduce


@dataclass(frozen=True)
class RunningMeanReinforce(PolicyOptions):
    """Options; the KL penalty is subtracted from the reward of a whole response."""

    kl: float = 0.05
    aggregation: Aggregation = "sequence_sum"


@dataclass(eq=False)
class RunningMeanAdvantages:
    """Function of samples with state: the number of rewards so far, and their sum."""

    options: RunningMeanReinforce
    count: float = 0.0
    total: float = 0.0

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        batch = Batch.of(samples, self.options)
        baseline = self.total / max(self.count, 1)
        rewards_N = batch.rewards_N - self.options.kl * batch.log_ratios_NR.sum(1)
        seen = moments(rewards_N, reduce)
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
