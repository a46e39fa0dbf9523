"""The names that an algorithm outside of this package is written with; see docs/algorithms.md. They stay."""

from __future__ import annotations

from usp.rlhf.algorithms.objectives import Aggregation, Weighting
from usp.rlhf.algorithms.response_rows import Moments, RunningMoments, moments, whitened

from .algorithms.algorithm import Algorithm, Options, Stateful, at_least, fraction, logprobs, one_of, train
from .algorithms.critic_free import GRPO, grpo_advantages, grpo_algorithm
from .algorithms.objectives import (
    ClippedPolicy,
    ClippedSequences,
    ClippedValue,
    ClippedWeights,
    NextToken,
    PolicyTokens,
    SoftPolicy,
    kl_estimate,
)
from .algorithms.policy import Batch, PolicyOptions, generate, policy_calls, score
from .algorithms.registry import ALGORITHMS, build_graph
from .algorithms.response_rows import Responses, discounted_sums, per_sample, scalars
from .algorithms.rewards import RewardShape, ScoreWith
from .graph import Compute, Generate, Inference, ModelCall, Objective, Reduce, Sequences, TrainStep
from .samples import Samples

ObjectiveDefaults = Objective  # its earlier name
