"""The traffic of one optimizer step: the sum of its passes."""

from __future__ import annotations

from usp.cost.job import Job

from .attention_traffic import attention_traffic
from .pass_traffic import layer_traffic, pass_traffic
from .sent import Sent, merged
from .sharding import block_fsdp_traffic


def step_traffic(job: Job, rank: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in one step, without groups of one rank, the most bytes first."""
    return merged(sent for sents in pass_traffic(job, rank).values() for sent in sents)


def block_traffic(job: Job, rank: int) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """Return what the first decoder layer of `rank` sends in a step: (for parameters, for activations)."""
    index = job.stage_layers[job.stages(rank)[0]][0]
    inside = layer_traffic(job, index, attention_traffic(job, rank, job.model.facts.windows[index]))
    activations = [sent.times(job.config.micro_batches) for sents in inside.values() for sent in sents]
    inside_groups = [s for s in activations if job.degree(s.axis) > 1]
    return merged(s for s in block_fsdp_traffic(job, rank) if job.degree(s.axis) > 1), merged(inside_groups)
