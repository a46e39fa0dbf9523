"""On-policy distillation: the policy's own responses, with every token scored by a teacher.

The advantage of a token is log teacher - log policy, so its expected gradient is that of the reverse KL divergence
KL(policy || teacher) of the token, given the text before it (GKD: Agarwal et al., arXiv 2306.13649, section 3.2; as an
advantage: Lu et al., "On-Policy Distillation", Thinking Machines Lab, 2025). Rewards are metrics alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from usp.rlhf.graph import ModelCall, Reduce
from usp.rlhf.samples import Samples

from .algorithm import Algorithm, logprobs
from .objectives import SAMPLED
from .policy import Batch, PolicyOptions, policy_calls
from .response_rows import per_sample
from .rewards import RewardShape

TEACHER = "teacher"  # the role
TEACHER_KL = "teacher_kl"
_LOGPROBS = "teacher_logprobs"


@dataclass(frozen=True)
class OnPolicyDistillation(PolicyOptions):
    """Options of on-policy distillation. The teacher is the reference: there is no other one, so `kl` is 0."""

    kl: float = 0.0

    @property
    def policy_key(self) -> str:
        """Return the key of the policy's log-probabilities: as the loss has them, else those at sampling."""
        return self.old_key or SAMPLED

    def violations(self) -> Iterator[str]:
        yield from super().violations()
        if self.kl:
            yield f"kl={self.kl}: the teacher is the reference of a distillation, use 0"
        if self.shape() != RewardShape():
            yield "reward_bias, reward_scaling, max_reward_clip and zero_unfinished have no effect: remove them"


def distillation_advantages(options: OnPolicyDistillation, samples: Samples, reduce: Reduce) -> Samples:
    """Return log teacher - log policy of every token. Also `teacher_kl`: its negative mean over a response, which
    estimates the reverse KL divergence per token; nan for samples that are dropped or have no tokens."""
    batch = Batch.of(samples, options)
    advantages_NR = batch.responses.rows(samples[_LOGPROBS]) - batch.responses.rows(samples[options.policy_key])
    lengths_N = batch.responses.lengths_N
    kl_N = (-advantages_NR.sum(1) / lengths_N.clamp(min=1)).where(lengths_N > 0, math.nan)
    return Samples(samples.ids, batch.result(advantages_NR, reduce) | {TEACHER_KL: per_sample(kl_N)})


def _calls(options: OnPolicyDistillation) -> tuple[ModelCall, ...]:
    return policy_calls(
        options,
        partial(distillation_advantages, options),
        between=(logprobs(TEACHER, _LOGPROBS, options.generate.temperature),),
        inputs=(_LOGPROBS, options.policy_key),
        scalars=(TEACHER_KL,),
    )


DISTILLATION = Algorithm(OnPolicyDistillation, _calls, learning_rate=1e-3, scores=False)
