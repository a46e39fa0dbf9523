"""Algorithms without a critic, by the baseline of a reward: the prompt's other responses (GRPO and its variants, RLOO),
the step (REINFORCE++), or the greedy response (ReMax); and distillation, whose advantages are a teacher's. Variants of
GRPO are presets of its options, or clip otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from usp.fields import AtLeast1, NotNegative
from usp.rlhf.graph import Generate, ModelCall, Reduce
from usp.rlhf.samples import Samples

from .algorithm import Above0, Algorithm, Share, logprobs
from .objectives import Aggregation, ClippedPolicy, ClippedSequences, ClippedWeights, Estimator, SoftPolicy
from .policy import SPARE, Batch, PolicyOptions, generate, policy_calls, score
from .response_rows import discounted_sums, moments, per_sample, whitened
from .rewards import RewardShape

_EQUAL = 1e-6  # rewards closer than this are equal: a reward model's differ by rounding between layouts
_GREEDY = "greedy_"  # prefix of the keys of the greedy responses
_STD_EPSILON = 1e-4  # added to a group's standard deviation, so that such differences stay small
TEACHER_KL = "teacher_kl"
_TEACHER_LOGPROBS = "teacher_logprobs"


@dataclass(frozen=True)
class GRPO(PolicyOptions):
    """Options of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1): no critic, KL penalty in the loss.

    Attributes:
        kl_estimator: of the KL term in the loss.
        scale_by_std: divide a reward's distance from its group's mean by the group's standard deviation.
        drop_equal_groups: exclude groups with equal rewards from the loss and its normalization; a mini-batch of only
            such groups has gradient 0.
        oversample: draw that many times the prompts of a step, and train on the first of them whose groups differ, at
            most as many as without: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) with a fixed bound. Needs
            `drop_equal_groups`. Groups that are not trained on still pass through the train step, with weight 0.
        overlong_buffer, overlong_penalty: see `RewardShape`.
        covariance: what is done to tokens that `covariant` finds, a share `covariance_share` of all. clip: they have no
            advantage. kl: `covariance_kl` times the distance from the old policy is added to their loss. none.
        covariance_low, covariance_high: bounds of the covariance of tokens to clip.
    """

    min_group_size = 2
    by_turns = True
    kl_in_reward = False
    whiten: ClassVar[bool] = False  # normalize advantages over all tokens of the step
    generate: Generate = field(default_factory=lambda: Generate(group_size=8))
    kl: float = 0.04
    aggregation: Aggregation = "sequence_mean"
    kl_estimator: Estimator = "k3"
    scale_by_std: bool = True
    drop_equal_groups: bool = False
    oversample: AtLeast1 = 1
    overlong_buffer: int = 0
    overlong_penalty: NotNegative = 1.0
    covariance: Literal["none", "clip", "kl"] = "none"
    covariance_share: Share = 2e-4
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    covariance_kl: Above0 = 1.0

    @property
    def unused(self) -> dict[str, str]:
        of = {"share": "clip or kl", "kl": "kl", "low": "clip", "high": "clip"}
        absent = {f"covariance_{name}": kinds for name, kinds in of.items() if self.covariance not in kinds.split()}
        return super().unused | {name: f"without covariance={kinds}" for name, kinds in absent.items()}

    def objective(self) -> ClippedPolicy:
        return replace(super().objective(), kl=self.kl, covariance_kl=self.covariance_kl * (self.covariance == "kl"))

    def shape(self) -> RewardShape:
        buffer, penalty, longest = self.overlong_buffer, self.overlong_penalty, self.generate.max_new_tokens
        return replace(super().shape(), overlong_buffer=buffer, overlong_penalty=penalty, max_tokens=longest)

    def drawn(self, prompts: int) -> int:
        return prompts * self.oversample

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.oversample > 1 and not self.drop_equal_groups:
            yield f"oversample={self.oversample} needs drop_equal_groups=True: all groups would be trained on"
        if self.covariance == "kl" and not self.old_key:
            yield "covariance=kl needs several mini_batches or epochs: the first optimizer step is at the old policy"
        longest = self.generate.max_new_tokens
        if not 0 <= self.overlong_buffer <= longest:
            yield f"overlong_buffer={self.overlong_buffer} must be from 0 to generate.max_new_tokens={longest}"


def grpo_advantages(options: GRPO, samples: Samples, reduce: Reduce) -> Samples:
    """Subtract the group's mean reward, and divide by its standard deviation if `scale_by_std` (arXiv 2402.03300,
    section 4.1.2). Also returns `informative`: 1 if the rewards of the group differ.

    With `turn_discount`, the returns of a turn are compared with those of the same turn of the group's other episodes,
    which are 0 once an episode has ended, and so on for every turn.
    """
    batch = Batch.of(samples, options)
    group_size = options.generate.group_size
    returns_NK, turns_NR = batch.turn_returns() if options.turn_discount else (batch.rewards_N[:, None], None)
    advantages_KN, differs_P = [], torch.zeros(len(samples) // group_size, dtype=torch.bool)
    for returns_N in returns_NK.unbind(1):
        distances_PG, counts_P = batch.group_distances(returns_N)
        differs_P |= distances_PG.amax(1) - distances_PG.amin(1) > _EQUAL
        if options.scale_by_std:
            variance_P = distances_PG.square().sum(1) / (counts_P - 1).clamp(min=1)
            distances_PG = distances_PG / (variance_P.sqrt() + _STD_EPSILON)[:, None]
        advantages_KN.append(distances_PG.flatten())
    differs_N = differs_P.repeat_interleave(group_size)
    trained_N = differs_N if options.drop_equal_groups else None
    if options.oversample > 1:
        trained_N = _first_groups(options, samples, differs_P, reduce).repeat_interleave(group_size)
    if turns_NR is None:
        advantages_NR = batch.spread(advantages_KN[0])
    else:
        zero_N = torch.zeros(len(samples), dtype=torch.float64)
        advantages_NR = torch.stack([zero_N, *advantages_KN], 1).gather(1, turns_NR)
    if options.whiten:
        advantages_NR = whitened(advantages_NR, moments(advantages_NR[batch.responses.inside_NR], reduce))
    covariant_NR = covariant(options, batch, advantages_NR, reduce) if options.covariance != "none" else None
    if covariant_NR is not None and options.covariance == "clip":
        advantages_NR = advantages_NR.masked_fill(covariant_NR, 0)
    result = batch.result(advantages_NR, reduce, trained_N) | {"informative": per_sample(differs_N)}
    if covariant_NR is not None and options.covariance == "kl":
        result["covariant"] = batch.responses.per_token(covariant_NR)
    if trained_N is not None and options.oversample > 1:
        result[SPARE] = per_sample(differs_N & ~trained_N)
    return Samples(samples.ids, result)


def covariant(options: GRPO, batch: Batch, advantages_NR: Tensor, reduce: Reduce) -> Tensor:
    """Return the tokens whose log-probability and advantage vary together, (N, R) bool, among all tokens of the step,
    by (log p - its mean) * (A - its mean) of the old policy p (arXiv 2505.22617, section 4).

    kl: the largest. clip: random ones between the bounds, which depend on the step's tokens only.
    """
    inside_NR, ids = batch.responses.inside_NR, torch.tensor(batch.samples.ids, dtype=torch.int64)
    logprobs_NR = batch.responses.rows(batch.samples[options.policy_key])
    apart = [x - moments(x[inside_NR], reduce).mean for x in (logprobs_NR, advantages_NR)]
    own = (apart[0] * apart[1])[inside_NR]
    empty = torch.zeros(int(reduce(torch.tensor(len(ids)))), dtype=torch.int64)
    lengths = reduce(empty.index_put((ids,), batch.responses.lengths_N))
    places = ((lengths.cumsum(0) - lengths)[ids][:, None] + torch.arange(inside_NR.shape[1]))[inside_NR]
    whole = reduce(torch.zeros(int(lengths.sum()), dtype=torch.float64).index_put((places,), own))
    number = min(max(1, int(options.covariance_share * len(whole))), len(whole))
    chosen = whole.topk(number).indices
    if options.covariance == "clip":
        seed = int(reduce(torch.tensor(sum(int(tokens.sum()) for tokens in batch.samples["tokens"]))))
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
        chosen = order[((whole > options.covariance_low) & (whole < options.covariance_high))[order]][:number]
    return inside_NR.masked_scatter(inside_NR, torch.isin(places, chosen))


def _first_groups(options: GRPO, samples: Samples, differs_P: Tensor, reduce: Reduce) -> Tensor:
    """Return which groups of this rank are among the first of all ranks' that differ, as many as are trained on."""
    group_size = options.generate.group_size
    drawn = int(reduce(torch.tensor(len(samples)))) // group_size
    numbers_P = torch.tensor(samples.ids[::group_size], dtype=torch.int64) // group_size
    differs = reduce(torch.zeros(drawn, dtype=torch.float64).index_put((numbers_P,), differs_P.double()))
    return differs_P & (differs.cumsum(0)[numbers_P] <= drawn // options.oversample)


def grpo_algorithm(options: type[GRPO], learning_rate: float = 1e-3, warmup_steps: int = 20) -> Algorithm:
    """Return GRPO with the defaults, and the objective, of `options`."""

    def calls(chosen: GRPO) -> tuple[ModelCall, ...]:
        scalars = ("informative", *((SPARE,) if chosen.oversample > 1 else ()))
        more: dict[str, Any] = {"inputs": (chosen.policy_key,)} if chosen.covariance != "none" else {}
        more |= {"per_token": ("covariant",)} if chosen.covariance == "kl" else {}
        return policy_calls(chosen, partial(grpo_advantages, chosen), scalars=scalars, grouped=True, **more)

    # Twice the rate, or a steeper warmup, undoes supervised steps before it learns.
    return Algorithm(options, calls, learning_rate=learning_rate, warmup_steps=warmup_steps)


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """Options of Dr. GRPO (arXiv 2503.20783): no division by standard deviations and lengths, and no KL penalty."""

    kl: float = 0.0
    aggregation: Aggregation = "constant"
    scale_by_std: bool = False


@dataclass(frozen=True)
class DAPO(GRPO):
    """Options of DAPO (arXiv 2503.14476): a higher upper bound, means over tokens, and only groups that differ.

    `oversample` and `overlong_buffer`, its dynamic sampling and its penalty, depend on the task: by default there are
    none.
    """

    kl: float = 0.0
    eps_high: float = 0.28
    aggregation: Aggregation = "token_mean"
    drop_equal_groups: bool = True


@dataclass(frozen=True)
class GSPO(GRPO):
    """Options of GSPO (arXiv 2507.18071): one ratio per response (`ClippedSequences`), and the paper's bounds. GMPO is
    ratio=geometric, with eps_low=0.33 and eps_high=0.49: logarithms of ratios are within 0.4 (arXiv 2507.20673)."""

    objective_type = ClippedSequences
    mini_batches: int = 4
    kl: float = 0.0
    eps_low: float = 3e-4
    eps_high: float = 4e-4
    dual_clip: float = math.inf
    ratio: Literal["sequence", "sequence_token", "geometric"] = "sequence"


@dataclass(frozen=True)
class CISPO(GRPO):
    """Options of CISPO (MiniMax-M1, arXiv 2506.13585): clipped weights of the gradient, see `ClippedWeights`. As in the
    paper, there is no lower bound; the upper one is 5."""

    objective_type = ClippedWeights
    never: ClassVar = {"dual_clip": "on CISPO, which clips every ratio"}
    mini_batches: int = 4
    kl: float = 0.0
    eps_low: float = 1.0
    eps_high: float = 4.0
    dual_clip: float = math.inf
    aggregation: Aggregation = "token_mean"


@dataclass(frozen=True)
class SAPO(GRPO):
    """Options of SAPO (arXiv 2511.20347): a soft gate instead of bounds, see `SoftPolicy`."""

    objective_type = SoftPolicy
    never: ClassVar = dict.fromkeys(("eps_low", "eps_high", "dual_clip"), "on SAPO, which has no bounds")
    mini_batches: int = 4
    kl: float = 0.0
    tau_positive: Above0 = 1.0
    tau_negative: Above0 = 1.05


@dataclass(frozen=True)
class RLOO(PolicyOptions):
    """Options of REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740). The KL penalty, kl times the estimate for
    a whole response, is subtracted from its reward."""

    min_group_size = 2
    generate: Generate = field(default_factory=lambda: Generate(group_size=4))
    kl: float = 0.05
    aggregation: Aggregation = "sequence_sum"


@dataclass(frozen=True)
class ReinforcePlusPlus(PolicyOptions):
    """Options of REINFORCE++ (Hu, arXiv 2501.03262): PPO's clipping and KL penalty, without a critic."""

    kl: float = 0.01
    gamma: Share = 1.0


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(GRPO):
    """Options of REINFORCE++ with baseline (arXiv 2501.03262, section 3): the mean reward of the group is subtracted,
    and advantages are normalized over all tokens of the step. The KL penalty is in the loss, estimated by k2.
    """

    by_turns = False
    whiten = True
    kl: float = 0.01
    kl_estimator: Estimator = "k2"
    aggregation: Aggregation = "token_mean"
    scale_by_std: bool = False


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


def remax_advantages(options: ReMax, samples: Samples, reduce: Reduce) -> Samples:
    """Subtract the reward of the greedy response to the prompt from the returns (arXiv 2310.10505)."""
    batch = Batch.of(samples, options, ("score", "greedy_score"))
    shape = options.shape()
    baselines_N = shape(samples["greedy_score"], samples["greedy_finished"], torch.zeros(len(samples)))
    returns_NR = discounted_sums(batch.token_rewards(options.kl), 1.0)
    return Samples(samples.ids, batch.result(returns_NR - baselines_N[:, None], reduce))


def _remax_calls(options: ReMax) -> tuple[ModelCall, ...]:
    greedy = generate("greedy_generate", replace(options.generate, temperature=0.0, routed=0), _GREEDY)
    inputs = (f"{_GREEDY}score", f"{_GREEDY}finished")
    between = (greedy, *score(options, _GREEDY))
    return policy_calls(options, partial(remax_advantages, options), between=between, inputs=inputs)


@dataclass(frozen=True)
class OnPolicyDistillation(PolicyOptions):
    """Options of on-policy distillation: the policy's own responses, with every token scored by a teacher.

    The advantage of a token is log teacher - log policy, so its expected gradient is that of the reverse KL divergence
    KL(policy || teacher) of the token, given the text before it (GKD: Agarwal et al., arXiv 2306.13649, section 3.2; as
    an advantage: Lu et al., "On-Policy Distillation", Thinking Machines Lab, 2025). Rewards are metrics alone. The
    teacher is the reference: there is no other one, so `kl` is 0.
    """

    never: ClassVar = {"kl": "where the teacher is the reference"} | dict.fromkeys(
        ("reward_bias", "reward_scaling", "max_reward_clip", "zero_unfinished"), "on rewards that are only metrics"
    )
    kl: float = 0.0


def distillation_advantages(options: OnPolicyDistillation, samples: Samples, reduce: Reduce) -> Samples:
    """Return log teacher - log policy of every token. Also `teacher_kl`: its negative mean over a response, which
    estimates the reverse KL divergence per token; nan for samples that are dropped or have no tokens."""
    batch = Batch.of(samples, options)
    advantages_NR = batch.responses.rows(samples[_TEACHER_LOGPROBS]) - batch.responses.rows(samples[options.policy_key])
    lengths_N = batch.responses.lengths_N
    kl_N = (-advantages_NR.sum(1) / lengths_N.clamp(min=1)).where(lengths_N > 0, math.nan)
    return Samples(samples.ids, batch.result(advantages_NR, reduce) | {TEACHER_KL: per_sample(kl_N)})


def _distillation_calls(options: OnPolicyDistillation) -> tuple[ModelCall, ...]:
    return policy_calls(
        options,
        partial(distillation_advantages, options),
        between=(logprobs("teacher", _TEACHER_LOGPROBS, options.generate.temperature),),
        inputs=(_TEACHER_LOGPROBS, options.policy_key),
        scalars=(TEACHER_KL,),
    )


CRITIC_FREE: Mapping[str, Algorithm] = {
    "grpo": grpo_algorithm(GRPO),
    "dr_grpo": grpo_algorithm(DrGRPO),
    "dapo": grpo_algorithm(DAPO),
    "gspo": grpo_algorithm(GSPO),
    "cispo": grpo_algorithm(CISPO),
    "sapo": grpo_algorithm(SAPO),
    "rloo": Algorithm(RLOO, lambda o: policy_calls(o, partial(rloo_advantages, o), grouped=True)),
    "reinforce++": Algorithm(ReinforcePlusPlus, lambda o: policy_calls(o, partial(reinforce_plus_plus_advantages, o))),
    "reinforce++_baseline": grpo_algorithm(ReinforcePlusPlusBaseline, Algorithm.learning_rate, Algorithm.warmup_steps),
    "remax": Algorithm(ReMax, _remax_calls),
    "distillation": Algorithm(OnPolicyDistillation, _distillation_calls, learning_rate=1e-3, scores=False),
}
