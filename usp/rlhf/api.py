"""The names that an algorithm outside of this package is written with; see docs/algorithms.md. They stay."""

from __future__ import annotations

from .algorithms.algorithm import Algorithm, Options, Stateful, at_least, fraction, logprobs, one_of, train
from .algorithms.grpo import GRPO, grpo_advantages, grpo_algorithm
from .algorithms.loss_weights import Aggregation, Weighting
from .algorithms.objectives import (
    ClippedPolicy,
    ClippedSequences,
    ClippedValue,
    ClippedWeights,
    NextToken,
    ObjectiveDefaults,
    PolicyTokens,
    kl_estimate,
)
from .algorithms.policy import Batch, PolicyOptions, generate, policy_calls, score
from .algorithms.registry import ALGORITHMS, build_graph
from .algorithms.response_rows import Responses, discounted_sums, per_sample, scalars
from .algorithms.rewards import RewardShape, ScoreWith
from .algorithms.statistics import Moments, RunningMoments, moments, whitened
from .data.samples import Samples
from .graph.calls import Compute, Generate, Inference, ModelCall, Objective, Reduce, Sequences, TrainStep

__all__ = [
    "ALGORITHMS",
    "GRPO",
    "Aggregation",
    "Algorithm",
    "Batch",
    "ClippedPolicy",
    "ClippedSequences",
    "ClippedValue",
    "ClippedWeights",
    "Compute",
    "Generate",
    "Inference",
    "ModelCall",
    "Moments",
    "NextToken",
    "Objective",
    "ObjectiveDefaults",
    "Options",
    "PolicyOptions",
    "PolicyTokens",
    "Reduce",
    "Responses",
    "RewardShape",
    "RunningMoments",
    "Samples",
    "ScoreWith",
    "Sequences",
    "Stateful",
    "TrainStep",
    "Weighting",
    "at_least",
    "build_graph",
    "discounted_sums",
    "fraction",
    "generate",
    "grpo_advantages",
    "grpo_algorithm",
    "kl_estimate",
    "logprobs",
    "moments",
    "one_of",
    "per_sample",
    "policy_calls",
    "scalars",
    "score",
    "train",
    "whitened",
]
