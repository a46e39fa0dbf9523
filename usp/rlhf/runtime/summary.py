"""Compute the metrics of a step from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from usp.rlhf.algorithms.objectives import IS_MEAN, IS_SQUARE

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


def summarize(step: StepData, trained: Mapping[str, float]) -> Summary:
    """Return this rank's summary of a finished step. Each sample counts on its leader."""
    rank = dist.get_rank()
    numbers: dict[str, list[float]] = {}
    for call in step.graph.calls:
        leaders = step.plan[call.name].leaders
        if rank in leaders:
            ids = step.transfer_end(call, ()).ids[leaders.index(rank)]
            scalars = [key for key in call.outputs if not step.kinds[key].tokens]
            numbers.update({key: [float(step.store[key][i]) for i in ids] for key in scalars})
    return Summary(trained, numbers)


def merge(summaries: Sequence[Summary], lengths: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the metrics of a step.

    "actor/loss": of a train step. "score": mean over samples but those with nan, for every key with one number per
    sample.
    "tokens_length": mean length, for every key of sequences. logprob_difference_max, logprob_difference_mean: of
    |logprobs - old_logprobs| over the tokens in `mask`, if the graph has these keys, or else the actor's train step's.
    "actor/rollout_is_eff_sample_size": as a fraction of all tokens, of a train step with importance sampling.
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
    for name in ("logprob_difference_max", "logprob_difference_mean"):
        if f"actor/{name}" in metrics:
            metrics[name] = metrics.pop(f"actor/{name}")
    for name in [name for name in metrics if name.endswith(f"/{IS_SQUARE}")]:
        role, square = name.removesuffix(IS_SQUARE), metrics.pop(name)
        metrics[f"{role}rollout_is_eff_sample_size"] = metrics[f"{role}{IS_MEAN}"] ** 2 / square if square else 0.0
    of_keys |= {f"{key}_length": torch.tensor(of_key, dtype=torch.float64) for key, of_key in lengths.items()}
    return metrics | {key: values.nanmean().item() for key, values in of_keys.items()}
