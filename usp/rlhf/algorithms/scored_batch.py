"""What all algorithms make advantages of, and what they give with them. Shapes as in `responses`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Reduce

from .options import PolicyOptions
from .response_rows import Responses, per_sample

_LOGPROBS = ("old_logprobs", "ref_logprobs")


def batch_inputs(options: PolicyOptions) -> tuple[str, ...]:
    """The keys that a `Batch` is made of."""
    return ("tokens", "mask", "score", "finished", *(_LOGPROBS if options.kl_in_reward else ()))


def batch_outputs(options: PolicyOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys of `Batch.result`: those with a value per token, and those with a number per sample."""
    return ("advantages", "weights", "token_weights"), ("reward", "kl") if options.kl_in_reward else ("reward",)


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's samples.

    Attributes:
        rewards_N: of whole responses, as `RewardShape` makes them, float64.
        log_ratios_NR: log(policy / ref) of each token, float64; 0 where the reward has no KL penalty.
    """

    samples: Samples
    options: PolicyOptions
    responses: Responses
    rewards_N: Tensor
    log_ratios_NR: Tensor

    @staticmethod
    def of(samples: Samples, options: PolicyOptions) -> Batch:
        responses = Responses(samples["mask"])
        rewards_N = options.shape()(samples["score"], samples["finished"], responses.lengths_N)
        log_ratios_NR = torch.zeros(responses.inside_NR.shape, dtype=torch.float64)
        if options.kl_in_reward:
            policy_NR, ref_NR = (responses.rows(samples[key]) for key in _LOGPROBS)
            log_ratios_NR = policy_NR - ref_NR
        return Batch(samples, options, responses, rewards_N, log_ratios_NR)

    def token_rewards(self, kl: float) -> Tensor:
        """(N, R): -kl times the log-ratio, and at a response's last token its reward (arXiv 1909.08593, equation 2)."""
        return self.responses.at_end(self.rewards_N) - kl * self.log_ratios_NR

    def result(self, advantages_NR: Tensor, reduce: Reduce, kept_N: Tensor | None = None) -> dict[str, list[Tensor]]:
        """The values of `batch_outputs`. Four sums over ranks.

        weights: as the options say, of the samples kept. token_weights: alike for all tokens of a mini-batch. kl: of
        whole responses.
        """
        ids, masks = self.samples.ids, list(self.responses.masks)
        counted = masks if kept_N is None else [mask * kept for mask, kept in zip(masks, kept_N, strict=True)]
        weighting = self.options.weighting()
        by_token = replace(weighting, aggregation="token_mean")
        result = {
            "advantages": self.responses.per_token(advantages_NR),
            "weights": weighting(ids, counted, reduce),
            "token_weights": by_token(ids, masks, reduce),
            "reward": per_sample(self.rewards_N),
        }
        if self.options.kl_in_reward:
            result["kl"] = per_sample(self.log_ratios_NR.sum(1))
        return result
