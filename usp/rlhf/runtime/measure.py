"""Calls that every graph gets: how far sampling and training are apart, and samples for people to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from parallel import ParallelDims
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Compute, ModelCall, Reduce
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

MAX, SUM, TOKENS = "difference_max", "difference_sum", "difference_tokens"
_COMPARED = ("logprobs", "old_logprobs", "mask")


def with_measures(
    graph: DataflowGraph, plan: ExecutionPlan, collect: tuple[str, ...], keep: Callable[[Samples], None]
) -> tuple[DataflowGraph, ExecutionPlan]:
    """The graph and the plan with two calls more, each where the graph has what it takes.

    sampling_difference compares the log-probabilities at sampling with those of the training layout, on the ranks that
    have made the latter. collect hands the samples of a step, with the keys `collect`, to `keep` on rank 0.

    Raises:
        ValueError: for keys that the graph does not have.
    """
    keys = {*graph.given, *graph.producers}
    if unknown := [key for key in collect if key not in keys]:
        raise ValueError(f"collect={list(collect)}: nobody gives {', '.join(unknown)}; keys: {', '.join(sorted(keys))}")
    calls, layouts = list(graph.calls), dict(plan.calls)

    def add(call: ModelCall, ranks: tuple[int, ...]) -> None:
        calls.append(call)
        layouts[call.name] = CallLayout(ranks, ParallelDims(dp_replicate=len(ranks), dp_shard=1))

    if keys.issuperset(_COMPARED) and "old_logprobs" in graph.producers:
        work = Compute(sampling_difference, scalars=(MAX, SUM, TOKENS))
        ranks = plan[graph.producers["old_logprobs"]].ranks
        add(ModelCall("sampling_difference", "", work, _COMPARED, work.scalars), ranks)
    if collect:
        add(ModelCall("collect", "", Compute(_Keep(keep), scalars=()), collect), (0,))
    return DataflowGraph(tuple(calls), graph.given), replace(plan, calls=layouts)


def sampling_difference(samples: Samples, reduce: Reduce) -> Samples:
    """Of each sample: the largest and the sum of |logprobs - old_logprobs|, and how many tokens count."""
    found: dict[str, list[torch.Tensor]] = {MAX: [], SUM: [], TOKENS: []}
    for sampled, trained, mask in zip(*(samples[key] for key in _COMPARED), strict=True):
        difference = (sampled - trained).abs()[mask > 0]
        found[MAX].append(difference.max() if len(difference) else torch.tensor(0.0))
        found[SUM].append(difference.sum())
        found[TOKENS].append(torch.tensor(float(len(difference))))
    return Samples(samples.ids, found)


class _Keep:
    """A function of samples that hands them over."""

    def __init__(self, keep: Callable[[Samples], None]) -> None:
        self._keep = keep

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        self._keep(samples)
        return Samples(samples.ids, {})
