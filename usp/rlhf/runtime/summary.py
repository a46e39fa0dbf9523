"""Compute the metrics of a step from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import KeyKind
from usp.rlhf.plan.plan import ExecutionPlan

from .measure import MAX, SUM, TOKENS
from .step_plan import StepData


@dataclass(frozen=True)
class Summary:
    """The contribution of one rank.

    Attributes:
        trained: metrics of train steps.
        numbers: key -> the value of each sample whose leader this rank is.
    """

    trained: Mapping[str, float]
    numbers: Mapping[str, list[float]]


def summarize(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    kinds: Mapping[str, KeyKind],
    step: StepData,
    trained: Mapping[str, float],
) -> Summary:
    """Return this rank's summary of a finished step. Each sample counts on its leader."""
    rank = dist.get_rank()
    numbers = {
        key: [float(step.store[key][i]) for i in step.transfer_end(call, ()).ids[plan[call.name].leaders.index(rank)]]
        for call in graph.calls
        if rank in plan[call.name].leaders
        for key in call.outputs
        if not kinds[key].tokens
    }
    return Summary(trained, numbers)


def exchange(summary: Summary) -> list[Summary]:
    """Gather every rank's summary on every rank. Collective over the world."""
    summaries: list[Summary] = [summary] * dist.get_world_size()
    dist.all_gather_object(summaries, summary)
    return summaries


def merge(summaries: Sequence[Summary], lengths: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the metrics of a step.

    "actor/loss": of a train step. "score": mean over samples, for every key with one number per sample.
    "tokens_length": mean length, for every key of sequences. logprob_difference_max, logprob_difference_mean: of
    |logprobs - old_logprobs| over the tokens in `mask`, if the graph has these keys.
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
    of_keys |= {f"{key}_length": torch.tensor(of_key, dtype=torch.float64) for key, of_key in lengths.items()}
    return metrics | {key: values.mean().item() for key, values in of_keys.items()}
