"""Per-token objectives of train steps, and the KL estimators they use. B sequences or rows, S tokens of each.

The given weights include the normalization (`Weighting`), so every value here is a sum. Tokens whose weight is 0 are
masked before any arithmetic: even a nan there reaches neither the loss nor a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from usp.rlhf.graph.calls import Sequences

Metrics = dict[str, Tensor]
Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens sampled by the policy.

    k1 = log(p / ref): unbiased, of any sign. k2 = k1^2 / 2: biased, with the gradient of the KL. k3 = ref / p - 1 -
    log(ref / p): unbiased, never negative (Schulman, "Approximating KL Divergence", 2020).
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return (-log_ratio).expm1() + log_ratio  # for close policies exp - 1 would lose all digits


class ObjectiveDefaults:
    """Attributes that most objectives share, see `usp.rlhf.graph.calls.Objective`."""

    head: Literal["logprobs", "values"] = "logprobs"
    entropy: bool = False
    unit: int = 1
    temperature: float = 1.0


@dataclass(frozen=True)
class NextToken(ObjectiveDefaults):
    """-sum weights * logprobs: cross-entropy with the next tokens."""

    keys: ClassVar[tuple[str, ...]] = ("weights",)

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, Metrics]:
        weights_BS = given["weights"]
        return -(weights_BS * output_BS.where(weights_BS != 0, 0)).sum(), {}


@dataclass(frozen=True)
class ClippedPolicy(ObjectiveDefaults):
    """sum weights * (max(-A ratio, -A clip(ratio)) + kl * KL(policy || ref) - entropy_bonus * entropy).

    ratio = exp(logprobs - old_logprobs) (PPO: arXiv 1707.06347, equation 7; asymmetric bounds: DAPO, arXiv 2503.14476,
    equation 10; KL in the loss: GRPO, arXiv 2402.03300, equations 3 and 4).

    Metrics, each a mean by `token_weights`: policy_loss (by `weights`, without the other terms), importance_ratio,
    clip_fraction (where the clipped term is the larger), approx_kl (k3 of the old policy from the new), entropy, and
    ref_kl if kl is not 0.

    Attributes:
        eps_low, eps_high: ratios are clipped to [1 - eps_low, 1 + eps_high].
        kl: weight of the KL term; 0: no reference is needed.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    kl: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_bonus: float = 0.0
    temperature: float = 1.0
    entropy = True

    @property
    def keys(self) -> tuple[str, ...]:
        return ("weights", "token_weights", "advantages", "old_logprobs", *(("ref_logprobs",) if self.kl else ()))

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, Metrics]:
        assert entropy_BS is not None
        counts_BS = given["token_weights"] != 0
        logprobs_BS, entropy_BS, weights_BS, advantages_BS, old_BS = (
            x.where(counts_BS, 0)
            for x in (output_BS, entropy_BS, given["weights"], given["advantages"], given["old_logprobs"])
        )
        ratio_BS = (logprobs_BS - old_BS).exp()
        free_BS = -advantages_BS * ratio_BS
        bound_BS = -advantages_BS * ratio_BS.clamp(1 - self.eps_low, 1 + self.eps_high)
        policy_loss = (weights_BS * torch.maximum(free_BS, bound_BS)).sum()
        loss = policy_loss
        seen = {
            "importance_ratio": ratio_BS,
            "clip_fraction": (bound_BS > free_BS).to(ratio_BS.dtype),
            "approx_kl": kl_estimate(old_BS, logprobs_BS, "k3"),
            "entropy": entropy_BS,
        }
        if self.kl:
            ref_BS = given["ref_logprobs"].where(counts_BS, 0)
            seen["ref_kl"] = kl_estimate(logprobs_BS, ref_BS, self.kl_estimator)
            loss = loss + self.kl * (weights_BS * seen["ref_kl"]).sum()
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * (weights_BS * entropy_BS).sum()
        metrics = {name: (given["token_weights"] * value.detach()).sum() for name, value in seen.items()}
        return loss, {"policy_loss": policy_loss.detach(), **metrics}


@dataclass(frozen=True)
class ClippedValue(ObjectiveDefaults):
    """sum weights / 2 * max((v - returns)^2, (clip(v, values - eps, values + eps) - returns)^2).

    PPO's second trust region (Engstrom et al., "Implementation Matters in Deep RL", arXiv 2005.12729, section 3).

    Metrics: clip_fraction (where the clipped term is the larger) and value (mean).
    """

    eps: float = 0.2
    head = "values"
    keys: ClassVar[tuple[str, ...]] = ("weights", "values", "returns")

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, Metrics]:
        weights_BS = given["weights"]
        v_BS, old_BS, returns_BS = (x.where(weights_BS != 0, 0) for x in (output_BS, given["values"], given["returns"]))
        free_BS = (v_BS - returns_BS).square()
        bound_BS = (v_BS.clamp(old_BS - self.eps, old_BS + self.eps) - returns_BS).square()
        loss = (weights_BS * torch.maximum(free_BS, bound_BS)).sum() / 2
        clipped = (weights_BS * (bound_BS > free_BS)).sum()
        return loss, {"clip_fraction": clipped, "value": (weights_BS * v_BS.detach()).sum()}
