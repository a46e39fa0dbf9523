"""The metrics of a step, from what its ranks know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import KeyKind
from usp.rlhf.plan.plan import ExecutionPlan

from .measure import MAX, SUM, TOKENS
from .step_plan import Step


@dataclass(frozen=True)
class Summary:
    """What one rank adds.

    Attributes:
        trained: metrics of train steps.
        numbers: key -> the value of each sample that this rank is the leader for.
    """

    trained: Mapping[str, float]
    numbers: Mapping[str, list[float]]


def summarise(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    kinds: Mapping[str, KeyKind],
    step: Step,
    trained: Mapping[str, float],
) -> Summary:
    """This rank's summary of a step that has ended: each sample counts where its leader is."""
    rank = dist.get_rank()
    numbers = {
        key: [float(step.store[key][i]) for i in step.part(call, ()).ids[plan[call.name].leaders.index(rank)]]
        for call in graph.calls
        if rank in plan[call.name].leaders
        for key in call.outputs
        if not kinds[key].tokens
    }
    return Summary(trained, numbers)


def exchange(summary: Summary) -> list[Summary]:
    """Every rank's summary, on every rank. Collective over the world."""
    summaries: list[Summary] = [summary] * dist.get_world_size()
    dist.all_gather_object(summaries, summary)
    return summaries


def merge(summaries: Sequence[Summary], lengths: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """The metrics of a step.

    "actor/loss": what a train step says. "score": the mean over samples, for every key with one number per sample.
    "tokens_length": the mean length, for every key of sequences. logprob_difference_max, logprob_difference_mean: of
    |logprobs - old_logprobs| over the tokens in `mask`, where the graph has these keys.
    """
    metrics: dict[str, float] = {}
    numbers: dict[str, list[float]] = {}
    for summary in summaries:
        metrics.update(summary.trained)
        for key, values in summary.numbers.items():
            numbers.setdefault(key, []).extend(values)
    of_keys = {key: torch.tensor(values, dtype=torch.float64) for key, values in numbers.items()}
    if {MAX, SUM, TOKENS} <= of_keys.keys():
        largest, total, tokens = (of_keys.pop(key) for key in (MAX, SUM, TOKENS))
        metrics["logprob_difference_max"] = largest.max().item()
        metrics["logprob_difference_mean"] = (total.sum() / tokens.sum().clamp(min=1)).item()
    metrics.update({key: _mean(values) for key, values in of_keys.items()})
    metrics.update({f"{key}_length": _mean(torch.tensor(n, dtype=torch.float64)) for key, n in lengths.items()})
    return metrics


def _mean(values: Tensor) -> float:
    return values.mean().item()
