"""Per-token losses of train steps, and the weights that hold their normalization."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from usp.rlhf.graph import Objective, Reduce, Sequences
from usp.rlhf.samples import mini_batch_ids

from .response_rows import Responses

SAMPLED = "logprobs"  # the key of log-probabilities at sampling
IS_MEAN, IS_SQUARE = "rollout_is_mean", "rollout_is_square"  # which the effective sample size follows from

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Metrics = dict[str, Tensor]
Given = Mapping[str, Tensor]
Result = tuple[Tensor, Metrics]
Estimator = Literal["k1", "k2", "k3", "k3_unbiased"]
_TokenIS = Literal["token_truncate", "token_mask", "token_reject"]
RolloutIS = Literal["none", _TokenIS, "sequence_truncate", "sequence_mask", "sequence_reject", "geometric_reject"]


@dataclass(frozen=True)
class Weighting:
    """Aggregation of token losses into the loss of a mini-batch. Sequences without tokens do not count.

    token_mean: mean over tokens. sequence_mean: mean over sequences of their token means (GRPO: DeepSeekMath, arXiv
    2402.03300, equation 3). sequence_sum: mean over sequences of their token sums, the gradient of sequence
    log-probabilities. constant: sequence_sum divided by the constant `length` (Dr. GRPO, arXiv 2503.20783).
    """

    aggregation: Aggregation
    mini_batches: int
    length: int = 1

    def __call__(self, ids: Sequence[int], masks: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
        """Return per-token float32 weights of samples `ids` from 0/1 masks. Two all-reduces."""
        lengths = Responses(masks).lengths_N.double()
        batch = mini_batch_numbers(ids, self.mini_batches, 1, reduce)
        counted = lengths if self.aggregation == "token_mean" else (lengths > 0).double()
        totals = reduce(torch.zeros(self.mini_batches, dtype=torch.float64).index_add(0, batch, counted))
        divisors = totals.clamp(min=1)[batch]
        if self.aggregation == "sequence_mean":
            divisors = divisors * lengths.clamp(min=1)
        elif self.aggregation == "constant":
            divisors = divisors * self.length
        return [((mask != 0) / divisor).float() for mask, divisor in zip(masks, divisors, strict=True)]


def mini_batch_numbers(ids: Sequence[int], mini_batches: int, unit: int, reduce: Reduce) -> Tensor:
    """Return the mini-batch index of each sample, (samples,) int64. One all-reduce."""
    samples = int(reduce(torch.tensor(len(ids))))
    ends = [mini_batch_ids(samples, mini_batches, number, unit).stop for number in range(mini_batches)]
    return torch.tensor([bisect_right(ends, sample) for sample in ids], dtype=torch.int64)


def kl_estimate(log_ratio: Tensor, estimator: Estimator, max_log_ratio: float = math.inf) -> Tensor:
    """Estimate KL(policy || reference) per token, from tokens sampled by the policy and their log(policy / reference).

    k1 = log(p / ref): unbiased, of any sign. k2 = k1^2 / 2: biased, with the gradient of the KL. k3 = ref / p - 1 -
    log(ref / p): unbiased, never negative (Schulman, "Approximating KL Divergence", 2020); its log-ratio is clamped to
    +-max_log_ratio. k3_unbiased is k3, which a loss multiplies by the importance ratio, so that for tokens of the old
    policy expectation and gradient are those of the KL (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio)
    return (-log_ratio).expm1() + log_ratio  # for close policies exp - 1 would lose all digits


@dataclass(frozen=True)
class NextToken(Objective):
    """-sum weights * logprobs: cross-entropy with the next tokens."""

    keys: ClassVar[tuple[str, ...]] = ("weights",)
    counts = "weights"

    def __call__(self, output_BS: Tensor, entropy_BS: Tensor | None, given: Given, sequences: Sequences) -> Result:
        weights_BS = given["weights"]
        return -(weights_BS * output_BS.where(weights_BS != 0, 0)).sum(), {}


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """What a surrogate is computed from, (B, S) each, 0 where a token does not count; the first two with gradients."""

    logprobs_BS: Tensor
    log_ratios_BS: Tensor
    advantages_BS: Tensor
    weights_BS: Tensor
    token_weights_BS: Tensor

    def mean(self, x_BS: Tensor) -> Tensor:
        """Return this rank's share of the mean over tokens, without a gradient."""
        return (self.token_weights_BS * x_BS.detach()).sum()

    def lengths(self, sequences: Sequences) -> Tensor:
        """Return how many tokens of each sequence count, at least 1."""
        return sequences.sums((self.token_weights_BS != 0).to(self.weights_BS.dtype)).clamp(min=1)


@dataclass(frozen=True)
class ClippedPolicy(Objective):
    """sum weights * (rollout_is * surrogate + kl * KL(policy || ref) - entropy_bonus * entropy).

    surrogate = max(-A ratio, -A clip(ratio)), and at most -A dual_clip where A < 0; ratio = exp(logprobs -
    old_logprobs) (PPO: arXiv 1707.06347, equation 7; asymmetric bounds: DAPO, arXiv 2503.14476, equation 10; dual clip:
    arXiv 1912.09729, equation 5; KL in the loss: GRPO, arXiv 2402.03300, equations 3 and 4).

    rollout_is = exp(old_logprobs - those at sampling), without a gradient: truncated importance sampling. Of a token,
    or the product over a response, or its geometric mean, for all of its tokens. Outside of the bounds it is the bound
    (truncate) or 0 (mask: with two bounds, IcePop, arXiv 2510.18855; reject, which is 1 inside of them).

    Metrics, each a mean by `token_weights`: policy_loss (by `weights`, without the other terms), importance_ratio,
    clip_fraction (where the clipped term is the larger), dual_clip_fraction, clamp_fraction (log-ratios that
    `max_log_ratio` bounds), approx_kl (k3 of the old policy from the new), entropy, and ref_kl if kl is not 0. Where
    `old` is not "old_logprobs", also logprob_difference_mean and, over all tokens, logprob_difference_max, of
    |logprobs - those at sampling|. With `rollout_is`: rollout_is_mean and rollout_is_square of what it multiplies with,
    rollout_is_truncated_fraction or rollout_is_masked_fraction, and rollout_is_max before the threshold.

    Attributes:
        old: key of old_logprobs. "": the policy is the old one, so its own log-probabilities are, without a gradient;
            the ratio is 1, and its gradient is that of the log-probabilities.
        eps_low, eps_high: ratios are clipped to [1 - eps_low, 1 + eps_high].
        kl: weight of the KL term; 0: no reference is needed.
        dual_clip: above 1; inf disables it.
        max_log_ratio: log-ratios are clamped to +-max_log_ratio before their exponentials, in k3 as well, and beyond it
            have no gradient; inf disables it. Without it a single token can make the loss infinite.
        rollout_is: none, or the level of the ratio and what is done outside of [rollout_is_lower,
            rollout_is_threshold]; 0 and inf disable the bounds.
        covariance_kl: weight of |logprobs - old_logprobs| of tokens where "covariant" is 1 (KL-Cov, arXiv 2505.22617,
            section 4); 0: there is no such key.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    kl: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_bonus: float = 0.0
    temperature: float = 1.0
    dual_clip: float = 3.0
    max_log_ratio: float = 20.0
    old: str = "old_logprobs"
    rollout_is: RolloutIS = "none"
    rollout_is_threshold: float = 2.0
    rollout_is_lower: float = 0.0
    covariance_kl: float = 0.0
    entropy = True
    counts = "token_weights"

    @property
    def keys(self) -> tuple[str, ...]:
        compared = (self.old, *((SAMPLED,) if not self.old or self.rollout_is != "none" else ()))
        more = (*(("covariant",) if self.covariance_kl else ()), *(("ref_logprobs",) if self.kl else ()))
        return tuple(dict.fromkeys(filter(None, ("weights", "token_weights", "advantages", *compared, *more))))

    def __call__(self, output_BS: Tensor, entropy_BS: Tensor | None, given: Given, sequences: Sequences) -> Result:
        assert entropy_BS is not None
        counts_BS = given["token_weights"] != 0
        logprobs_BS, entropy_BS, weights_BS, advantages_BS, given_BS = (
            x.where(counts_BS, 0)
            for x in (output_BS, entropy_BS, given["weights"], given["advantages"], given[self.old or SAMPLED])
        )
        log_ratio_BS = logprobs_BS - (given_BS if self.old else logprobs_BS.detach())
        tokens = PolicyTokens(logprobs_BS, log_ratio_BS, advantages_BS, weights_BS, given["token_weights"])
        corrections: Metrics = {}
        if self.rollout_is != "none":
            sampled_BS = given[SAMPLED].where(counts_BS, 0)
            old_BS = given_BS if self.old else logprobs_BS.detach()
            rollout_is_BS, corrections = self.corrected(old_BS - sampled_BS, tokens, sequences)
            tokens = replace(tokens, weights_BS=weights_BS * rollout_is_BS)
        loss, metrics = self.surrogate(tokens, sequences)
        metrics |= corrections
        seen = {
            "clamp_fraction": (log_ratio_BS.abs() > self.max_log_ratio).to(weights_BS.dtype),
            "approx_kl": kl_estimate(-log_ratio_BS, "k3", self.max_log_ratio),
            "entropy": entropy_BS,
        }
        metrics["policy_loss"] = loss.detach()
        if self.kl:
            of_ref_BS = logprobs_BS - given["ref_logprobs"].where(counts_BS, 0)
            seen["ref_kl"] = kl_estimate(of_ref_BS, self.kl_estimator, self.max_log_ratio)
            if self.kl_estimator == "k3_unbiased":
                seen["ref_kl"] = self.clamped(log_ratio_BS).exp() * seen["ref_kl"]
            loss = loss + self.kl * (weights_BS * seen["ref_kl"]).sum()
        if self.covariance_kl:
            seen["covariant_fraction"] = covariant_BS = given["covariant"].where(counts_BS, 0)
            loss = loss + self.covariance_kl * (weights_BS * covariant_BS * log_ratio_BS.abs()).sum()
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * (weights_BS * entropy_BS).sum()
        if self.old != "old_logprobs":
            seen["logprob_difference_mean"] = difference_BS = (logprobs_BS.detach() - given_BS).abs()
            metrics["logprob_difference_max"] = difference_BS.amax() if difference_BS.numel() else loss.new_zeros(())
        return loss, metrics | {name: tokens.mean(value) for name, value in seen.items()}

    def corrected(self, log_BS: Tensor, tokens: PolicyTokens, sequences: Sequences) -> Result:
        """Return `rollout_is` of each token, from log(old policy / policy at sampling), and what happened to it."""
        level, _, bound = self.rollout_is.partition("_")
        if level != "token":
            lengths_N = tokens.lengths(sequences) if level == "geometric" else 1
            log_BS = sequences.spread(sequences.sums(log_BS) / lengths_N)
        free_BS = self.clamped(log_BS).exp()
        inside_BS = free_BS.clamp(self.rollout_is_lower, self.rollout_is_threshold)
        far_BS = inside_BS != free_BS
        used_BS = torch.ones_like(free_BS) if bound == "reject" else inside_BS
        rollout_is_BS = used_BS if bound == "truncate" else used_BS.where(~far_BS, 0)
        counted_BS = free_BS.where(tokens.token_weights_BS != 0, 0)
        changed = "truncated" if bound == "truncate" else "masked"
        return rollout_is_BS, {
            IS_MEAN: tokens.mean(rollout_is_BS),
            IS_SQUARE: tokens.mean(rollout_is_BS.square()),
            f"rollout_is_{changed}_fraction": tokens.mean(far_BS.to(log_BS.dtype)),
            "rollout_is_max": counted_BS.amax() if counted_BS.numel() else log_BS.new_zeros(()),
        }

    def surrogate(self, tokens: PolicyTokens, sequences: Sequences) -> Result:
        """Return this rank's share of the loss without its other terms, and of metrics about ratios."""
        ratio_BS = self.clamped(tokens.log_ratios_BS).exp()
        surrogate_BS, seen = self.clipped(ratio_BS, tokens.advantages_BS)
        return (tokens.weights_BS * surrogate_BS).sum(), {name: tokens.mean(value) for name, value in seen.items()}

    def clamped(self, log_ratio: Tensor) -> Tensor:
        """Bound log-ratios by `max_log_ratio`."""
        return log_ratio.clamp(-self.max_log_ratio, self.max_log_ratio)

    def clipped(self, ratio: Tensor, advantage: Tensor) -> Result:
        """Return the loss of each ratio with its advantage, and what happened to it."""
        free, bound = -advantage * ratio, -advantage * ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        far = (advantage < 0) & (ratio > self.dual_clip)
        seen = {
            "importance_ratio": ratio,
            "clip_fraction": (bound > free).to(ratio.dtype),
            "dual_clip_fraction": far.to(ratio.dtype),
        }
        return torch.maximum(free, bound).where(~far, -advantage * self.dual_clip), seen


@dataclass(frozen=True)
class ClippedSequences(ClippedPolicy):
    """`ClippedPolicy` with one ratio per response, the geometric mean of its tokens' (GSPO, arXiv 2507.18071,
    equations 5 and 7): sum over responses of their weights * max(-A ratio, -A clip(ratio)).

    The weight of a response is the sum of its tokens', and A their mean by weights. Metrics of ratios are of responses.

    ratio: sequence, as above. sequence_token: of that value for each token, with its own gradient and A (GSPO-token,
    equations 13 and 14). geometric: the mean of tokens' ratios that are clipped each, where that makes the loss larger
    (GMPO, arXiv 2507.20673).
    """

    ratio: Literal["sequence", "sequence_token", "geometric"] = "sequence"

    def surrogate(self, tokens: PolicyTokens, sequences: Sequences) -> Result:
        # Weights are not negative, so clipping commutes with them.
        log_BS, advantages_N = tokens.log_ratios_BS, sequences.sums(tokens.weights_BS * tokens.advantages_BS)
        if self.ratio == "geometric":
            bound_BS = log_BS.clamp(math.log(max(1 - self.eps_low, 1e-99)), math.log1p(self.eps_high))
            log_BS = torch.where(sequences.spread(advantages_N) < 0, log_BS.maximum(bound_BS), log_BS.minimum(bound_BS))
        mean_N = sequences.sums(log_BS) / tokens.lengths(sequences)
        if self.ratio == "sequence_token":
            alike_BS = sequences.spread(mean_N).detach() + log_BS - log_BS.detach()
            return super().surrogate(replace(tokens, log_ratios_BS=alike_BS), sequences)
        surrogate_N, seen = self.clipped(self.clamped(mean_N).exp(), advantages_N)
        shares_N = sequences.sums(tokens.token_weights_BS)
        metrics = {name: sequences.share((shares_N * value.detach()).sum()) for name, value in seen.items()}
        if self.ratio == "geometric":
            metrics["clip_fraction"] = tokens.mean((log_BS != tokens.log_ratios_BS).to(log_BS.dtype))
        return sequences.share(surrogate_N.sum()), metrics


@dataclass(frozen=True)
class SoftPolicy(ClippedPolicy):
    """`ClippedPolicy` with the surrogate -A 4 / tau sigmoid(tau (ratio - 1)) instead of bounds; tau is `tau_positive`
    where A > 0, else `tau_negative` (SAPO, arXiv 2511.20347)."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def clipped(self, ratio: Tensor, advantage: Tensor) -> Result:
        tau = torch.where(advantage > 0, self.tau_positive, self.tau_negative).to(ratio.dtype)
        return -advantage * 4 / tau * torch.sigmoid(tau * (ratio - 1)), {"importance_ratio": ratio}


@dataclass(frozen=True)
class ClippedWeights(ClippedPolicy):
    """`ClippedPolicy` with the surrogate -A clip(ratio) logprobs, whose ratio has no gradient, so that every token has
    one (CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5). clip_fraction: of ratios outside of the bounds.
    """

    def surrogate(self, tokens: PolicyTokens, sequences: Sequences) -> Result:
        ratio_BS = self.clamped(tokens.log_ratios_BS.detach()).exp()
        weight_BS = ratio_BS.clamp(1 - self.eps_low, 1 + self.eps_high)
        loss = -(tokens.weights_BS * weight_BS * tokens.advantages_BS * tokens.logprobs_BS).sum()
        seen = {"importance_ratio": ratio_BS, "clip_fraction": (weight_BS != ratio_BS).to(ratio_BS.dtype)}
        return loss, {name: tokens.mean(value) for name, value in seen.items()}


@dataclass(frozen=True)
class ClippedValue(Objective):
    """sum weights / 2 * max((v - returns)^2, (clip(v, values - eps, values + eps) - returns)^2).

    PPO's second trust region (Engstrom et al., "Implementation Matters in Deep RL", arXiv 2005.12729, section 3).

    Metrics: clip_fraction (where the clipped term is the larger) and value (mean).
    """

    eps: float = 0.2
    head = "values"
    keys: ClassVar[tuple[str, ...]] = ("weights", "values", "returns")
    counts = "weights"

    def __call__(self, output_BS: Tensor, entropy_BS: Tensor | None, given: Given, sequences: Sequences) -> Result:
        weights_BS = given["weights"]
        v_BS, old_BS, returns_BS = (x.where(weights_BS != 0, 0) for x in (output_BS, given["values"], given["returns"]))
        free_BS = (v_BS - returns_BS).square()
        bound_BS = (v_BS.clamp(old_BS - self.eps, old_BS + self.eps) - returns_BS).square()
        loss = (weights_BS * torch.maximum(free_BS, bound_BS)).sum() / 2
        clipped = (weights_BS * (bound_BS > free_BS)).sum()
        return loss, {"clip_fraction": clipped, "value": (weights_BS * v_BS.detach()).sum()}
