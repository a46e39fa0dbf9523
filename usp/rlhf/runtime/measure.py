"""Calls added to every graph: the rollout/train logprob difference, and samples to log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
    """Add two calls to the graph and the plan, if the graph has their inputs.

    sampling_difference compares the log-probabilities at sampling with those of the training layout, on the ranks that
    compute the latter. collect passes the keys `collect` of a step's samples to `keep` on rank 0.

    Raises:
        ValueError: for keys that the graph does not have.
    """
    keys = {*graph.given, *graph.producers}
    if unknown := [key for key in collect if key not in keys]:
        raise ValueError(f"collect={list(collect)}: unknown {', '.join(unknown)}; keys: {', '.join(sorted(keys))}")
    added: list[tuple[ModelCall, tuple[int, ...]]] = []
    if keys.issuperset(_COMPARED) and "old_logprobs" in graph.producers:
        work = Compute(sampling_difference, scalars=(MAX, SUM, TOKENS))
        call = ModelCall("sampling_difference", "", work, _COMPARED, work.scalars)
        added.append((call, plan[graph.producers["old_logprobs"]].ranks))
    if collect:
        added.append((ModelCall("collect", "", Compute(partial(_collect, keep), scalars=()), collect), (0,)))
    layouts = {call.name: CallLayout(ranks, ParallelDims(dp_replicate=len(ranks), dp_shard=1)) for call, ranks in added}
    calls = (*graph.calls, *(call for call, _ in added))
    return replace(graph, calls=calls), replace(plan, calls={**plan.calls, **layouts})


def sampling_difference(samples: Samples, reduce: Reduce) -> Samples:
    """Return per sample the maximum and the sum of |logprobs - old_logprobs| and the number of response tokens."""
    found: dict[str, list[torch.Tensor]] = {MAX: [], SUM: [], TOKENS: []}
    for sampled, trained, mask in zip(*(samples[key] for key in _COMPARED), strict=True):
        difference = (sampled - trained).abs()[mask > 0]
        found[MAX].append(difference.max() if len(difference) else torch.tensor(0.0))
        found[SUM].append(difference.sum())
        found[TOKENS].append(torch.tensor(float(len(difference))))
    return Samples(samples.ids, found)


def _collect(keep: Callable[[Samples], None], samples: Samples, reduce: Reduce) -> Samples:
    keep(samples)
    return Samples(samples.ids, {})
