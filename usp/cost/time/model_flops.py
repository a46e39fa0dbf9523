"""The model FLOPs of a step, by which its utilization of the devices is measured."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import torch

from usp.cost.job import Job
from usp.model.facts import NO_ATTENTION, ModelFacts, training_flops

from .compute import is_matrix


def model_flops(job: Job, *, masked: bool = False) -> int:
    """Return the model FLOPs of forward and backward of the global batch, recomputation not counted.

    masked: count what the causal mask and windows hide as work, too.
    """
    weights = sum(p.numel for p in job.model.head or job.model.embedding if is_matrix(p))
    for index, number in Counter(job.model.alike).items():
        layer = job.model.layers[index]
        weights += number * sum(p.numel for p in layer.parameters if is_matrix(p))
        weights += number * sum(p.numel // p.shape[0] * job.model.experts_per_token for p in layer.experts)
    facts, tokens = job.model.facts, job.config.seq_len
    flops = _sequence_flops(facts, weights, job.boundaries)
    if masked:
        layers = sum(window != NO_ATTENTION for window in facts.windows)
        flops = 6 * weights * tokens + 6 * facts.num_heads * (facts.head_dim + facts.value_dim) * layers * tokens**2
    return job.config.batch_size * job.dims.batch * flops


@lru_cache(maxsize=64)
def _sequence_flops(facts: ModelFacts, weights: int, boundaries: tuple[int, ...]) -> int:
    """Return the model FLOPs of a sequence with documents between `boundaries`."""
    documents = torch.tensor([boundaries])
    return training_flops(facts, matmul_parameters=weights, tokens=boundaries[-1], cu_seqlens=documents)
