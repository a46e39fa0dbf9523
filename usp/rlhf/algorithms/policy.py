"""The shared parts of algorithms that train a policy on its own responses: options, calls, and the scored batch.

    prompt_ids -> generate -> score, old and reference log-probabilities -> advantages -> train step

Shapes as in `response_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from usp.fields import NotNegative, Rule, parameter_violations, shared_values
from usp.rlhf.graph import ROUTED, Compute, Generate, Inference, ModelCall, Reduce, generated_keys
from usp.rlhf.samples import Samples

from .algorithm import NONZERO, Options, Share, above, at_least, logprobs, train
from .objectives import SAMPLED, Aggregation, ClippedPolicy, Estimator, RolloutIS, Weighting, kl_estimate
from .response_rows import Responses, discounted_sums, per_sample, scalars
from .rewards import RewardShape, ScoreWith

CLIPPED = "reward_clipped"
# 1: a step could train on the sample, and has enough others; partial rollouts keep it for later ones
SPARE = "spare"


@dataclass(frozen=True)
class PolicyOptions(Options):
    """Options of every algorithm that trains a policy on its own responses.

    Attributes:
        reward: reward function; None: the model of the role "reward", or the environment of `generate.episodes`.
        reward_bias, reward_scaling, max_reward_clip, zero_unfinished: see `RewardShape`.
        kl: weight of the KL divergence from the role "ref"; 0: no such role. kl_estimator: see `kl_estimate`.
        eps_low, eps_high, dual_clip, max_log_ratio: see `ClippedPolicy`. The last two have verl's values.
        entropy_bonus: weight of the entropy term of the loss.
        aggregation: see `Weighting`; the length of "constant" is generate.max_new_tokens.
        old_logprobs: the log-probabilities of the old policy. recompute: by the call actor_inference, in its layout.
            rollout: those at sampling, uncorrected, so the ratio holds the difference of the two layouts as well. auto:
            recompute, but where a step has one optimizer step and no KL penalty in the reward, the policy is the old
            one when it trains (see `ClippedPolicy.old`), and nothing is computed twice. With staleness that holds only
            if `rollout_is` accounts for the policy that sampled; otherwise the ratio does.
        rollout_is: truncated importance sampling, see `ClippedPolicy`; auto: token_truncate with staleness, unless
            old_logprobs are those at sampling, else none.
        rollout_is_threshold, rollout_is_lower: its bounds; inf and 0: none.
        max_importance_ratio: end the train step when a mini-batch's mean ratio is above; 0 disables.
        turn_discount: of episodes, the discount of a turn's reward in the return of the turn before: rewards then count
            at their turns, and a turn only for what follows it. 0: their sum counts at the end, for all tokens.
        staleness: by how many steps the policy that trains may be newer than the one that sampled: --staleness.
        min_group_size: 2 if the responses to a prompt are compared with each other.
        by_turns: the algorithm has returns of turns.
    """

    min_group_size: ClassVar[int] = 1
    by_turns: ClassVar[bool] = False
    objective_type: ClassVar[type[ClippedPolicy]] = ClippedPolicy
    generate: Generate = field(default_factory=Generate)
    reward: ScoreWith | None = None
    reward_bias: float = 0.0
    reward_scaling: Annotated[float, NONZERO] = 1.0
    max_reward_clip: Annotated[float, above(0, "rewards would all be 0")] = math.inf
    zero_unfinished: bool = False
    kl: NotNegative = 0.1
    kl_estimator: Estimator = "k1"
    eps_low: Annotated[float, Rule(lambda x: 0 <= x <= 1, "at most 1, which is no lower bound, and at least 0")] = 0.2
    eps_high: Annotated[float, Rule(lambda x: x >= 0, "at least 0")] = 0.2
    dual_clip: Annotated[float, above(1, "it bounds ratios that are; inf disables it")] = 3.0
    max_log_ratio: Annotated[float, above(0, "policies could not differ; inf disables it")] = 20.0
    entropy_bonus: NotNegative = 0.0
    aggregation: Aggregation = "token_mean"
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    rollout_is: Literal["auto", RolloutIS] = "auto"
    rollout_is_threshold: Annotated[float, above(0, "nothing would be trained on")] = 2.0
    rollout_is_lower: NotNegative = 0.0
    max_importance_ratio: NotNegative = 5.0
    turn_discount: Share = 0.0
    staleness: int = 0

    @property
    def kl_in_reward(self) -> bool:
        """Return whether the KL penalty is subtracted from rewards."""
        return self.kl > 0

    @property
    def old_key(self) -> str:
        """Return the key of the old policy's log-probabilities; "" where the policy itself is the old one."""
        if self.old_logprobs == "rollout":
            return SAMPLED
        once = self.mini_batches * self.epochs == 1 and not self.kl_in_reward
        accounted_for = not self.staleness or self.correction != "none"
        return "" if self.old_logprobs == "auto" and once and accounted_for else "old_logprobs"

    @property
    def policy_key(self) -> str:
        """Return the key of the policy's log-probabilities: as the loss has them, else those at sampling."""
        return self.old_key or SAMPLED

    @property
    def unused(self) -> dict[str, str]:
        bounds = ("rollout_is_threshold", "rollout_is_lower") if self.correction == "none" else ()
        estimator = {} if self.kl else {"kl_estimator": "without kl"}
        return super().unused | dict.fromkeys(bounds, "without rollout_is") | estimator

    @property
    def correction(self) -> RolloutIS:
        """Return the importance sampling of the loss."""
        if self.rollout_is != "auto":
            return self.rollout_is
        return "token_truncate" if self.staleness and self.old_logprobs != "rollout" else "none"

    @property
    def reward_numbers(self) -> tuple[str, ...]:
        """Return the keys of `Batch.result` with one number per sample."""
        clipped = (CLIPPED,) if math.isfinite(self.max_reward_clip) else ()
        return ("reward", *clipped, *(("kl",) if self.kl_in_reward else ()))

    def shape(self) -> RewardShape:
        return RewardShape(self.reward_bias, self.reward_scaling, self.max_reward_clip, self.zero_unfinished)

    def objective(self) -> ClippedPolicy:
        """Return the actor's objective."""
        different: dict[str, Any] = {"kl": 0.0, "temperature": self.generate.temperature}
        different |= {"old": self.old_key, "rollout_is": self.correction}
        return self.objective_type(**shared_values(self, self.objective_type) | different)

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        yield from parameter_violations(self.generate)
        yield from at_least(self.generate, 1, "max_new_tokens")
        yield from at_least(self.generate, self.min_group_size, "group_size")
        if self.rollout_is not in ("auto", "none") and self.old_logprobs == "rollout":
            yield f"rollout_is={self.rollout_is} has no effect with old_logprobs=rollout, whose ratio is all: remove it"
        if not self.rollout_is_lower < self.rollout_is_threshold:
            yield f"rollout_is_lower={self.rollout_is_lower} must be below {self.rollout_is_threshold}, the upper bound"
        if self.kl_in_reward and self.kl_estimator == "k3_unbiased":
            yield "kl_estimator=k3_unbiased is of a loss, and here rewards have the KL penalty: use k1, k2 or k3"
        if self.turn_discount and not self.by_turns:
            yield f"turn_discount={self.turn_discount}: this algorithm has no returns of turns, GRPO and PPO do: remove"
        if self.turn_discount and self.generate.episodes is None:
            yield f"turn_discount={self.turn_discount} is of episodes: give --environment, or remove it"
        shape = self.shape()
        if self.turn_discount and (replace(shape, scaling=1.0, max_tokens=0) != RewardShape()):
            yield f"turn_discount={self.turn_discount} takes rewards of turns as they are, but for their scaling"
        if not self.generate.temperature > 0:
            yield f"temperature={self.generate.temperature} must be above 0: greedy responses are not policy samples"
        if self.zero_unfinished and not (self.generate.stop_ids or self.generate.stop_strings):
            yield "zero_unfinished=True needs generate.stop_ids or stop_strings: otherwise every reward is 0"


def policy_calls(
    options: PolicyOptions,
    advantages: Callable[..., Any],
    *,
    between: tuple[ModelCall, ...] = (),
    inputs: tuple[str, ...] = (),
    per_token: tuple[str, ...] = (),
    scalars: tuple[str, ...] = (),
    grouped: bool = False,
) -> tuple[ModelCall, ...]:
    """Return the calls that sample and score responses, compute advantages, and train the actor.

    Args:
        advantages: function of samples that returns `Batch.result` and the keys `per_token` and `scalars`.
        between: calls whose outputs `inputs` names, such as values or a baseline's score.
        inputs: keys that `advantages` reads in addition to those of `Batch`.
        grouped: keep all responses to a prompt on one rank of `advantages`.
    """
    temperature = options.generate.temperature
    numbers = (*options.reward_numbers, *scalars)
    compute = Compute(advantages, options.generate.group_size if grouped else 1, numbers)
    penalty = (options.old_key, "ref_logprobs") if options.kl_in_reward else ()
    by_turn = ("turns", "turn_rewards") if options.turn_discount and options.generate.episodes else ()
    reads = tuple(dict.fromkeys(("tokens", "mask", "score", "finished", *by_turn, *penalty, *inputs)))
    recompute = "old_logprobs" in (*reads, options.old_key)
    gives = ("advantages", "weights", "token_weights", *per_token, *numbers)
    routed = (ROUTED,) if options.generate.routed else ()
    stop_above = ("importance_ratio", options.max_importance_ratio) if options.max_importance_ratio else None
    return (
        generate("actor_generate", options.generate),
        *score(options),
        *((logprobs("actor", "old_logprobs", temperature, routed),) if recompute else ()),
        *((logprobs("ref", "ref_logprobs", temperature),) if options.kl else ()),
        *between,
        ModelCall("advantages", "", compute, reads, gives),
        train("actor", options.objective(), options, stop_above, routed),
    )


def generate(name: str, work: Generate, prefix: str = "") -> ModelCall:
    """Return a call that samples responses; `prefix` is that of its output keys."""
    inputs = ("prompt_ids",) if work.episodes is None else ("prompt_ids", "prompt_index")
    return ModelCall(name, "actor", work, inputs, tuple(f"{prefix}{key}" for key in generated_keys(work)))


def score(options: PolicyOptions, prefix: str = "") -> tuple[ModelCall, ...]:
    """Return the call that scores responses, by the reward function or the reward model; none for episodes, which their
    environments score."""
    if options.generate.episodes is not None:
        return ()
    if options.reward is None:
        inputs, outputs = (f"{prefix}tokens",), (f"{prefix}score",)
        return (ModelCall(f"{prefix}reward_inference", "reward", Inference("score"), inputs, outputs),)
    reward = replace(options.reward, prefix=prefix)
    work = Compute(reward, scalars=(reward.output,))
    return (ModelCall(f"{prefix}reward", "", work, reward.inputs, (reward.output,)),)


@dataclass(frozen=True, eq=False)
class Batch:
    """The scored samples of this rank, from which `advantages` functions start.

    Attributes:
        responses: without the tokens of samples that are dropped.
        rewards_N: of whole responses, shaped by `RewardShape`, float64; 0 for samples that are dropped.
        log_ratios_NR: log(policy / ref) per token by `kl_estimate`, float64; 0 if the reward has no KL penalty.
        kept_N: bool, False for samples that the reward function failed for, if such samples are dropped: statistics
            must leave them out, and their advantages do not count.
    """

    samples: Samples
    options: PolicyOptions
    responses: Responses
    rewards_N: Tensor
    log_ratios_NR: Tensor
    kept_N: Tensor

    @staticmethod
    def of(samples: Samples, options: PolicyOptions, scores: tuple[str, ...] = ("score",)) -> Batch:
        """Collect what `advantages` functions read; `scores` are the keys of the scores that a sample must have."""
        kept_N = torch.ones(len(samples), dtype=torch.bool)
        scorer = options.generate.episodes or options.reward
        if scorer is not None and scorer.failure == "drop":
            kept_N = torch.stack([scalars(samples[key]).isfinite() for key in scores]).all(0)
        responses = Responses([mask * kept for mask, kept in zip(samples["mask"], kept_N, strict=True)])
        rewards_N = options.shape()(samples["score"], samples["finished"], responses.lengths_N).where(kept_N, 0)
        log_ratios_NR = torch.zeros(responses.inside_NR.shape, dtype=torch.float64)
        if options.kl_in_reward:
            policy_NR, ref_NR = (responses.rows(samples[key]) for key in (options.old_key, "ref_logprobs"))
            log_ratios_NR = kl_estimate(policy_NR - ref_NR, options.kl_estimator, options.max_log_ratio)
        return Batch(samples, options, responses, rewards_N, log_ratios_NR, kept_N)

    def token_rewards(self, kl: float) -> Tensor:
        """Return -kl * log-ratio per token, plus the reward at the last one, (N, R) (arXiv 1909.08593, equation 2).

        A response without tokens drops its reward. With `turn_discount`, rewards are at the last tokens of their turns.
        """
        if "turns" in self.samples.values:
            return self._turn_rewards_NR() - kl * self.log_ratios_NR
        last_NR = torch.arange(self.log_ratios_NR.shape[1]) == self.responses.lengths_N[:, None] - 1
        return self.rewards_N.double()[:, None] * last_NR - kl * self.log_ratios_NR

    def _turn_rewards_NR(self) -> Tensor:
        return self.responses.rows(self.samples["turn_rewards"]) * self.options.reward_scaling

    def token_discounts(self, gamma: float) -> Tensor | float:
        """Return the discount from a token to the next one: gamma, and `turn_discount` between turns, (N, R)."""
        if "turns" not in self.samples.values:
            return gamma
        turns_NR = self.responses.rows(self.samples["turns"])
        ends_NR = turns_NR != pad(turns_NR[:, 1:], (0, 1))
        return torch.where(ends_NR, gamma * self.options.turn_discount, gamma).double()

    def turn_returns(self) -> tuple[Tensor, Tensor]:
        """Return the discounted return of every turn, (N, K), 0 after the last; and the turn of each token, (N, R)."""
        turns_NR = self.responses.rows(self.samples["turns"]).long()
        most = int(turns_NR.max()) if turns_NR.numel() else 0
        rewards_NK = torch.zeros(len(turns_NR), most + 1, dtype=torch.float64)
        rewards_NK = rewards_NK.scatter_add(1, turns_NR, self._turn_rewards_NR())[:, 1:]
        return discounted_sums(rewards_NK, self.options.turn_discount), turns_NR

    def result(self, advantages_NR: Tensor, reduce: Reduce, trained_N: Tensor | None = None) -> dict[str, list[Tensor]]:
        """Return the outputs of every `advantages` function. Four all-reduces.

        weights: by `options.aggregation`, over samples in `trained_N`. token_weights: equal for all tokens of a
        mini-batch. reward and kl (of whole responses, if the reward has a KL penalty) are nan for samples that are
        dropped. reward_clipped: 1 where `max_reward_clip` changed the reward, if it is finite.
        """
        ids, masks = self.samples.ids, list(self.responses.masks)
        counted = masks if trained_N is None else [m * trained for m, trained in zip(masks, trained_N, strict=True)]
        options = self.options
        weighting = Weighting(options.aggregation, options.mini_batches, length=options.generate.max_new_tokens)
        by_token = replace(weighting, aggregation="token_mean")
        result = {
            "advantages": self.responses.per_token(advantages_NR),
            "weights": weighting(ids, counted, reduce),
            "token_weights": by_token(ids, masks, reduce),
            "reward": per_sample(self.rewards_N.where(self.kept_N, math.nan)),
        }
        if CLIPPED in options.reward_numbers:
            result[CLIPPED] = per_sample(options.shape().clips(self.samples["score"]))
        if options.kl_in_reward:
            result["kl"] = per_sample(self.log_ratios_NR.sum(1).where(self.kept_N, math.nan))
        return result

    def group_distances(self, rewards_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance of each reward from the mean of its prompt's, (P, G), and how many these are, (P,). P
        prompts with G responses each. Samples that are dropped have distance 0 and do not count."""
        size = self.options.generate.group_size
        shape = (len(rewards_N) // size, size)
        rewards_PG, kept_PG = rewards_N.view(shape), self.kept_N.view(shape)
        counts_P = kept_PG.sum(1)
        means_P = (rewards_PG * kept_PG).sum(1) / counts_P.clamp(min=1)
        return (rewards_PG - means_P[:, None]) * kept_PG, counts_P

    def spread(self, x_N: Tensor) -> Tensor:
        """Repeat one number per response over its tokens, (N, R)."""
        return x_N[:, None] * self.responses.inside_NR
