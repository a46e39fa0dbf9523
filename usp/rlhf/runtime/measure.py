"""The metrics of a step from all ranks, the calls that measure them, and the lengths of its samples
(RUN/timeline/lengths.jsonl, one step per line).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from usp.parallel import ParallelDims
from usp.rlhf.algorithms.objectives import IS_MEAN, IS_SQUARE
from usp.rlhf.graph import Compute, DataflowGraph, Generate, ModelCall, Reduce, tokens_key
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.samples import Samples

from .timeline import FOLDER, read_lines
from .transfer import PROMPTS, StepData

LENGTHS_FILE = f"{FOLDER}/lengths.jsonl"
MAX, SUM, TOKENS = "difference_max", "difference_sum", "difference_tokens"
STALENESS, STALEST = "staleness_mean", "staleness_max"
# Of weights, with delta updates: bytes that ranks received, and those that they lacked.
SENT_BYTES, WHOLE_BYTES = "weights/sent_bytes", "weights/whole_bytes"
_COMPARED = ("logprobs", "old_logprobs", "mask")


def with_measures(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    collect: tuple[str, ...],
    keep: Callable[[Samples], None],
    first: int | None = None,
) -> tuple[DataflowGraph, ExecutionPlan]:
    """Add two calls to the graph and the plan, if the graph has their inputs.

    sampling_difference compares the log-probabilities at sampling with those of the training layout, on the ranks that
    compute the latter. collect passes the keys `collect` of a step's `first` samples (None: all) to `keep` on rank 0.

    Raises ValueError for keys that the graph does not have.
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
        shown = Compute(partial(_collect, keep), scalars=(), first=first)
        added.append((ModelCall("collect", "", shown, collect), (0,)))
    layouts = {call.name: CallLayout(ranks, ParallelDims(dp_replicate=len(ranks), dp_shard=1)) for call, ranks in added}
    calls = (*graph.calls, *(call for call, _ in added))
    return replace(graph, calls=calls), replace(plan, calls={**plan.calls, **layouts})


def announce_lengths(
    step: StepData, calls: Sequence[str], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Tell the ranks of a group the lengths of the sequences that calls generated, and the tickets of their prompts if
    there are any. Collective: leaders fill in theirs, an all-reduce sums them."""
    keys = [tokens_key(step.graph[name]) for name in calls]
    lengths = torch.zeros(len(keys) + 1, step.samples, dtype=torch.int64, device=device)
    for row, (key, name) in enumerate(zip(keys, calls, strict=True)):
        for i in step.led(step.graph[name]):
            lengths[row, i] = len(step.store[key][i])
            lengths[-1, i] = step.tickets[i] if step.tickets is not None else 0
    dist.all_reduce(lengths, group=group)
    *of_keys, tickets = lengths.tolist()
    step.lengths.update(zip(keys, of_keys, strict=True))
    step.tickets = None if step.tickets is None else tickets


def sampling_difference(samples: Samples, reduce: Reduce) -> Samples:
    """Return per sample the maximum and the sum of |logprobs - old_logprobs| and the number of response tokens."""
    differences: dict[str, list[torch.Tensor]] = {MAX: [], SUM: [], TOKENS: []}
    for sampled, trained, mask in zip(*(samples[key] for key in _COMPARED), strict=True):
        difference = (sampled - trained).abs()[mask > 0]
        differences[MAX].append(difference.max() if len(difference) else torch.tensor(0.0))
        differences[SUM].append(difference.sum())
        differences[TOKENS].append(torch.tensor(float(len(difference))))
    return Samples(samples.ids, differences)


def _collect(keep: Callable[[Samples], None], samples: Samples, reduce: Reduce) -> Samples:
    keep(samples)
    return Samples(samples.ids, {})


# Of a rank: metrics of train steps, and by key and id the values of the samples whose leader it is.
Summary: TypeAlias = tuple[Mapping[str, float], Mapping[str, Mapping[int, float]]]


def summarize(step: StepData, ran: Collection[str], trained: Mapping[str, float]) -> Summary:
    """Return this rank's summary of the calls of a step that it `ran`. Each sample counts on its leader."""
    numbers: dict[str, dict[int, float]] = {}
    for call in step.graph.calls:
        if call.name in ran and (ids := step.led(call)):
            scalars = [key for key in call.outputs if not step.kinds[key].tokens]
            numbers |= {key: {i: float(step.store[key][i]) for i in ids} for key in scalars}
            if "versions" in call.outputs:
                written = {i: step.store["versions"][i][step.store["mask"][i] > 0] for i in ids}
                numbers[STALENESS] = {i: step.number - 1 - float(of.double().mean()) for i, of in written.items()}
                numbers[STALEST] = {i: float(step.number - 1 - of.min()) for i, of in written.items()}
    return trained, numbers


def numbers_of(summaries: Sequence[Summary]) -> dict[str, dict[int, float]]:
    """Return the values of all samples, by key and id."""
    numbers: dict[str, dict[int, float]] = {}
    for _, of_rank in summaries:
        for key, values in of_rank.items():
            numbers.setdefault(key, {}).update(values)
    return numbers


def merge(summaries: Sequence[Summary], lengths: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the metrics of a step.

    "actor/loss": of a train step. "score": mean over samples but those with nan, for every key with one number per
    sample.
    "tokens_length": mean length, for every key of sequences. logprob_difference_max, logprob_difference_mean: of
    |logprobs - old_logprobs| over the tokens in `mask`, if the graph has these keys, or else the actor's train step's.
    staleness_mean, staleness_max: of partial rollouts, by how many steps the weights that train on a token are newer
    than those that wrote it.
    "weights/sent_bytes", "weights/whole_bytes": with delta updates, what ranks received and what they lacked.
    "actor/rollout_is_eff_sample_size": as a fraction of all tokens, of a train step with importance sampling.
    """
    metrics = {name: value for trained, _ in summaries for name, value in trained.items()}
    for name in {SENT_BYTES, WHOLE_BYTES} & metrics.keys():
        metrics[name] = sum(trained.get(name, 0) for trained, _ in summaries)
    numbers = numbers_of(summaries).items()
    of_keys = {key: torch.tensor([*values.values()], dtype=torch.float64) for key, values in numbers}
    if {MAX, SUM, TOKENS} <= of_keys.keys():
        largest, total, tokens = (of_keys.pop(key) for key in (MAX, SUM, TOKENS))
        metrics["logprob_difference_max"] = largest.max().item()
        metrics["logprob_difference_mean"] = (total.sum() / tokens.sum().clamp(min=1)).item()
    if STALEST in of_keys:
        metrics[STALEST] = of_keys.pop(STALEST).max().item()
    for name in ("logprob_difference_max", "logprob_difference_mean"):
        if f"actor/{name}" in metrics:
            metrics[name] = metrics.pop(f"actor/{name}")
    for name in [name for name in metrics if name.endswith(f"/{IS_SQUARE}")]:
        role, square = name.removesuffix(IS_SQUARE), metrics.pop(name)
        metrics[f"{role}rollout_is_eff_sample_size"] = metrics[f"{role}{IS_MEAN}"] ** 2 / square if square else 0.0
    of_keys |= {f"{key}_length": torch.tensor(of_key, dtype=torch.float64) for key, of_key in lengths.items()}
    return metrics | {key: values.nanmean().item() for key, values in of_keys.items()}


@dataclass(frozen=True)
class StepLengths:
    """Tokens of each sample's prompt and response. The samples of a prompt, group_size of them, are adjacent."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    group_size: int

    @staticmethod
    def of_step(graph: DataflowGraph, lengths: Mapping[str, Sequence[int]]) -> StepLengths:
        """Return those of the first call that generates, from the lengths of a step's sequences by key."""
        call = next(call for call in graph.calls if isinstance(call.work, Generate))
        prompts = lengths[PROMPTS]
        responses = (whole - prompt for whole, prompt in zip(lengths[tokens_key(call)], prompts, strict=True))
        return StepLengths(tuple(prompts), tuple(responses), graph.group_size)


def read_lengths(run: Path) -> StepLengths:
    """Return the lengths of a run's last step. Raises ValueError if the run or the file does not exist, has no step, or
    a line that is none."""
    path = run / LENGTHS_FILE
    if not path.is_file():
        raise ValueError(f"{run} is not the folder of an RLHF run that generates: {LENGTHS_FILE} does not exist")
    steps = list(read_lines(path, "a step's lengths", {"prompts", "responses", "group_size"}))
    if not steps:
        raise ValueError(f"{path} has the lengths of no step")
    return StepLengths(tuple(steps[-1]["prompts"]), tuple(steps[-1]["responses"]), steps[-1]["group_size"])
