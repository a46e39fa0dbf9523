"""The data of the current step on a rank: its values, all lengths, and the partition of samples over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from usp.rlhf.data.partition import Partition, batch_violation, partition
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Generate, ModelCall, TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph, unit
from usp.rlhf.graph.keys import KeyKind, canonical
from usp.rlhf.plan.plan import ExecutionPlan

from .transfer import Store, TransferEnd

PROMPTS = "prompt_ids"


def step_violations(graph: DataflowGraph, given: Samples) -> list[str]:
    """Return why a step cannot run on the given samples, one message per violation."""
    if not len(given):
        return ["empty batch: a step must have at least one sample"]
    violations = []
    if given.ids != tuple(range(len(given))):
        violations.append(f"ids {given.ids} must be 0 to {len(given) - 1}: every rank passes all samples of the step")
    if set(given.values) != set(graph.given):
        violations.append(f"keys {sorted(given.values)} must be the given keys of the graph, {sorted(graph.given)}")
    return violations + batch_violations(graph, len(given) * graph.group_size)


def batch_violations(graph: DataflowGraph, samples: int) -> list[str]:
    """Return why the graph's calls cannot divide a step of `samples` samples, one message per call."""
    violations = []
    for call in graph.calls:
        mini_batches = call.work.mini_batches if isinstance(call.work, TrainStep) else 1
        if violation := batch_violation(samples, mini_batches, unit(call)):
            violations.append(f"{call.name}: {violation}")
    return violations


class StepData:
    """The data of a step on this rank.

    Attributes:
        samples: total number of samples.
        lengths: key of sequences -> number of tokens by sample id; the same on every rank that has to know.
        store: values on this rank, including the given ones.
    """

    def __init__(self, graph: DataflowGraph, plan: ExecutionPlan, kinds: Mapping[str, KeyKind], samples: int) -> None:
        self.graph, self.plan, self.kinds, self.samples = graph, plan, kinds, samples
        self._partitions: dict[str, Partition] = {}
        self.store: Store = {}
        self.lengths: dict[str, Sequence[int]] = {}

    @staticmethod
    def of(graph: DataflowGraph, plan: ExecutionPlan, kinds: Mapping[str, KeyKind], given: Samples) -> StepData:
        """Begin a step with the given samples, or prompts."""
        group = graph.group_size
        step = StepData(graph, plan, kinds, len(given) * group)
        for key, values in given.values.items():
            step.store[key] = {i: values[i // group] for i in range(step.samples)}
            if key == PROMPTS or canonical(key) == "tokens":
                step.lengths[key] = [len(step.store[key][i]) for i in range(step.samples)]
        return step

    def partition(self, call: ModelCall) -> Partition:
        """Partition the samples over the data-parallel ranks of a call, balanced by tokens."""
        if call.name not in self._partitions:
            keys = [key for key in call.inputs if key == PROMPTS or canonical(key) == "tokens"]
            weights = [1 + sum(self.lengths[key][i] for key in keys) for i in range(self.samples)]
            parts = self.plan[call.name].dims.batch
            mini_batches = call.work.mini_batches if isinstance(call.work, TrainStep) else 1
            self._partitions[call.name] = partition(weights, parts, mini_batches, unit(call))
        return self._partitions[call.name]

    def transfer_end(self, call: ModelCall, keys: tuple[str, ...]) -> TransferEnd:
        """Return the call's end of a transfer of `keys`."""
        ids = tuple(tuple(sorted(i for batch in batches for i in batch)) for batches in self.partition(call))
        return TransferEnd(self.plan[call.name], ids, keys)

    def take(self, call: ModelCall, ids: Sequence[int]) -> Samples:
        """Return a call's inputs for the given ids; for a generate call those of the prompts, with prompt ids."""
        if isinstance(call.work, Generate):
            group = call.work.group_size
            prompts = sorted({i // group for i in ids})
            return Samples(tuple(prompts), {k: [self.store[k][p * group] for p in prompts] for k in call.inputs})
        ids = sorted(ids)
        return Samples(tuple(ids), {key: [self.store[key][i] for i in ids] for key in call.inputs})

    def put(self, call: ModelCall, ids: Sequence[int], result: Samples) -> None:
        """Store a call's outputs.

        Raises:
            ValueError: if they do not match the graph, which other ranks rely on.
        """
        wanted = tuple(sorted(ids))
        if result.ids != wanted:
            raise ValueError(f"call {call.name} returned samples {result.ids}, expected {wanted}")
        if missing := [key for key in call.outputs if key not in result.values]:
            raise ValueError(f"call {call.name} must return {', '.join(missing)}, got {', '.join(result.values)}")
        for key in call.outputs:
            self.store[key] = dict(zip(wanted, result[key], strict=True))
        for key in call.outputs:
            for i in wanted:
                self._check(call, key, i, self.store[key][i])

    def _check(self, call: ModelCall, key: str, i: int, value: Tensor) -> None:
        kind = self.kinds[key]
        own = self.store.get(kind.tokens, {})  # just generated, so not in `lengths` yet
        shape = (self.lengths[kind.tokens][i] if kind.tokens in self.lengths else len(own[i]),) if kind.tokens else ()
        if tuple(value.shape) != shape or value.dtype != kind.dtype:
            meaning = f"one per token of {kind.tokens!r}" if kind.tokens else "one number (see `scalars`)"
            raise ValueError(
                f"call {call.name} returned {key!r} of sample {i} as {value.dtype} of shape {tuple(value.shape)}, "
                f"expected {kind.dtype} of shape {shape}: {meaning}"
            )
