"""The data of a step on a rank, and its transfer from the ranks that produce values to those that consume them.

The leader that has a sample sends it, as in ReaL (arXiv 2406.14088); a receiver gets what it lacks, in one message per
sender. All sizes are known in advance, so messages are posted early and waited for where they are needed.

Samples in flight are made and not trained on yet: each rank that trains keeps its own between two iterations. A
checkpoint holds all of them, whole, so that any plan and number of ranks continues with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp.rlhf.graph import Compute, DataflowGraph, Generate, KeyKind, ModelCall, TrainStep, canonical, key_kinds, unit
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.samples import Partition, Samples, batch_violation, partition

from .timeline import Event

PROMPTS = "prompt_ids"
Lengths = Mapping[str, Sequence[int]]  # key of sequences -> number of tokens by sample id
Store = dict[str, dict[int, Tensor]]  # key -> sample id -> value, of the values on this rank
# (key, id) of each value in a message, in order, by the ranks (source, target)
Messages = Mapping[tuple[int, int], Sequence[tuple[str, int]]]


@dataclass(frozen=True)
class TransferEnd:
    """The producer or a consumer of a transfer: ids of each data-parallel index, and keys to send or receive."""

    layout: CallLayout
    ids: tuple[tuple[int, ...], ...]
    keys: tuple[str, ...]


def message_bytes(message: Sequence[tuple[str, int]], kinds: Mapping[str, KeyKind], lengths: Lengths) -> int:
    """Return the size of a message."""
    items = ((kinds[key], i) for key, i in message)
    return sum((lengths[k.tokens][i] * k.width if k.tokens else 1) * k.dtype.itemsize for k, i in items)


def plan_transfer(
    producer: TransferEnd, consumers: Sequence[TransferEnd], served: Sequence[TransferEnd] = ()
) -> Messages:
    """Plan the messages that bring outputs of `producer` to the ranks of `consumers`.

    served: consumers that already have their inputs.
    """
    leaders = {i: leader for leader, ids in zip(producer.layout.leaders, producer.ids, strict=True) for i in ids}
    produced = set(producer.keys)

    def needs(ends: Sequence[TransferEnd]) -> dict[int, set[tuple[str, int]]]:
        needed: dict[int, set[tuple[str, int]]] = {}
        for end in ends:
            keys = produced & set(end.keys)
            for ranks, ids in zip(end.layout.groups, end.ids, strict=True):
                wanted = {(key, i) for key in keys for i in ids}
                for rank in ranks:
                    needed.setdefault(rank, set()).update(wanted)
        return needed

    held = needs(served)
    messages: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for target, wanted in sorted(needs(consumers).items()):
        for key, i in sorted(wanted - held.get(target, set())):
            if leaders[i] != target:
                messages.setdefault((leaders[i], target), []).append((key, i))
    return messages


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
        lengths: key of sequences -> number of tokens by sample id; the same on every rank that has to know.
        store: values on this rank, including the given ones.
        tickets: with `Rollouts`, those of the samples' prompts; others than this rank's are known once it is told.
        number, seed: of the step.
        version: of the weights that make its samples: how many steps had trained them.
        metrics: of all iterations so far, the same on every rank.
        numbers: by key and id: those of the samples, one each, that the last iteration made; the same on every rank.
    """

    def __init__(self, graph: DataflowGraph, plan: ExecutionPlan, samples: int) -> None:
        self.graph, self.plan, self.kinds, self.samples = graph, plan, key_kinds(graph), samples
        self._partitions: dict[str, Partition] = {}
        self.store: Store = {}
        self.lengths: dict[str, Sequence[int]] = {}
        self.tickets: list[int] | None = None
        self.number = self.version = self.seed = 0
        self.metrics: dict[str, float] = {}
        self.numbers: Mapping[str, Mapping[int, float]] = {}

    @staticmethod
    def of(graph: DataflowGraph, plan: ExecutionPlan, given: Samples) -> StepData:
        """Begin a step with the given samples, or prompts."""
        group = graph.group_size
        step = StepData(graph, plan, len(given) * group)
        for key, values in given.values.items():
            step.store[key] = {i: values[i // group] for i in range(step.samples)}
            if key == PROMPTS or canonical(key) == "tokens":
                step.lengths[key] = [len(step.store[key][i]) for i in range(step.samples)]
        return step

    def partition(self, call: ModelCall) -> Partition:
        """Partition the samples of a call over its data-parallel ranks, balanced by tokens."""
        if call.name not in self._partitions:
            keys = [key for key in call.inputs if key == PROMPTS or canonical(key) == "tokens"]
            weights = [1 + sum(self.lengths[key][i] for key in keys) for i in range(self.samples)]
            parts = len(self.plan[call.name].groups)
            mini_batches = call.work.mini_batches if isinstance(call.work, TrainStep) else 1
            first = call.work.first if isinstance(call.work, Compute) else None
            group = self.graph.sharing_group(call)
            self._partitions[call.name] = partition(weights[:first], parts, mini_batches, unit(call), group)
        return self._partitions[call.name]

    def messages(self, producer: str, consumers: Sequence[str], served: Sequence[str]) -> Messages:
        """Return the messages that bring the outputs of a call to others; see `plan_transfer`."""
        call = self.graph[producer]
        calls = ([self.graph[name] for name in names] for names in (consumers, served))
        ends = ([self.transfer_end(each, each.inputs) for each in of] for of in calls)
        return plan_transfer(self.transfer_end(call, call.outputs), *ends)

    def transfer_end(self, call: ModelCall, keys: tuple[str, ...]) -> TransferEnd:
        """Return the call's end of a transfer of `keys`."""
        ids = tuple(tuple(sorted(i for batch in batches for i in batch)) for batches in self.partition(call))
        return TransferEnd(self.plan[call.name], ids, keys)

    def led(self, call: ModelCall) -> tuple[int, ...]:
        """Return the samples that this rank returns from a call, as one of its leaders."""
        layout, rank = self.plan[call.name], dist.get_rank()
        return self.transfer_end(call, ()).ids[layout.number_of(rank)] if rank in layout.leaders else ()

    def take(self, call: ModelCall, ids: Sequence[int]) -> Samples:
        """Return a call's inputs for the given ids; for a generate call those of the prompts, with prompt ids."""
        if isinstance(call.work, Generate):
            group = call.work.group_size
            prompts = sorted({i // group for i in ids})
            return Samples(tuple(prompts), {k: [self.store[k][p * group] for p in prompts] for k in call.inputs})
        ids = sorted(ids)
        return Samples(tuple(ids), {key: [self.store[key][i] for i in ids] for key in call.inputs})

    def put(self, call: ModelCall, ids: Sequence[int], result: Samples) -> None:
        """Store a call's outputs. Raises ValueError if they do not match the graph, which other ranks rely on."""
        wanted = tuple(sorted(ids))
        if result.ids != wanted:
            raise ValueError(f"call {call.name} returned samples {result.ids}, expected {wanted}")
        if missing := [key for key in call.outputs if key not in result.values]:
            raise ValueError(f"call {call.name} must return {', '.join(missing)}, got {', '.join(result.values)}")
        for key in call.outputs:
            self.store[key] = dict(zip(wanted, result[key], strict=True))
        for key, kind in ((key, self.kinds[key]) for key in call.outputs):
            for i, value in self.store[key].items():
                shape: tuple[int, ...] = ()
                if kind.tokens:  # those of sequences that were just generated are not in `lengths` yet
                    known = kind.tokens in self.lengths
                    length = self.lengths[kind.tokens][i] if known else len(self.store[kind.tokens][i])
                    shape = (length * kind.width,)
                if tuple(value.shape) != shape or value.dtype != kind.dtype:
                    meaning = f"one per token of {kind.tokens!r}" if kind.tokens else "one number (see `scalars`)"
                    raise ValueError(
                        f"call {call.name} returned {key!r} of sample {i} as {value.dtype} of shape "
                        f"{tuple(value.shape)}, expected {kind.dtype} of shape {shape}: {meaning}"
                    )

    def readers(self) -> dict[str, ModelCall]:
        """Map the keys of samples in flight to a call that reads them: one that makes no samples, and best trains."""
        calls = [call for call in self.graph.calls if not call.outputs]
        calls.sort(key=lambda call: isinstance(call.work, TrainStep))  # a function may read only the first samples
        return {key: call for call in calls for key in sorted(call.inputs) if key in self.kinds}

    def sizes(self, key: str) -> list[int]:
        """Return how many numbers each sample has under a key."""
        kind = self.kinds[key]
        return [n * kind.width for n in self.lengths[kind.tokens]] if kind.tokens else [1] * self.samples

    def to_extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds of samples in flight besides `whole`, as JSON values."""
        lengths = {key: list(of_key) for key, of_key in self.lengths.items()}
        extra = {"step": self.number, "samples": self.samples, "lengths": lengths, "metrics": self.metrics}
        return extra | ({} if self.tickets is None else {"tickets": self.tickets})

    def blank(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return zeros like `whole`."""
        sizes = {key: sum(self.sizes(key)) for key in self.readers()}
        return {key: torch.zeros(size, dtype=self.kinds[key].dtype, device=device) for key, size in sizes.items()}

    def whole(self, device: torch.device) -> dict[str, Tensor]:
        """Return the values in flight of all samples by key, one after another, on every rank. Collective."""
        whole = self.blank()
        for key, call in self.readers().items():
            pieces = whole[key].split(self.sizes(key))
            for i in self.led(call):
                pieces[i].copy_(self.store[key][i].reshape(-1))
        return whole_of_parts(whole, device)

    def fill(self, whole: Mapping[str, Tensor]) -> None:
        """Take the values of all samples, on every rank."""
        for key, joined in whole.items():
            pieces = joined.cpu().split(self.sizes(key))
            shaped = pieces if self.kinds[key].tokens else [piece.reshape(()) for piece in pieces]
            self.store[key] = dict(enumerate(shaped))


def whole_of_parts(parts: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors of which each rank has other parts, and zeros elsewhere, whole on every rank. Collective."""
    whole = {}
    for key, own in parts.items():
        joined = own.view(torch.uint8).to(device)
        dist.all_reduce(joined)
        whole[key] = joined.view(own.dtype)
    return whole


class PendingTransfer:
    """The messages of this rank in a transfer, one per peer, posted without waiting.

    Point to point: a collective that waits for one sender would delay the next one in its group.

    Args:
        consumers: the calls that need the values.
        event: is filled in with the bytes.
        tag: unique among the group's concurrent transfers.
    """

    def __init__(
        self,
        messages: Messages,
        consumers: tuple[str, ...],
        step: StepData,
        event: Event,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        tag: int,
    ) -> None:
        self.consumers, self.event, self._messages, self._step = consumers, event, messages, step
        # The buffers must stay alive until the messages complete.
        self._outgoing: list[Tensor] = []
        self._incoming: dict[int, Tensor] = {}
        posts, rank = [], dist.get_rank()
        for (source, target), message in messages.items():
            if source == rank:
                values = [step.store[key][i].reshape(-1).contiguous().view(torch.uint8) for key, i in message]
                self._outgoing.append(torch.cat(values).to(device))
                posts.append(dist.P2POp(dist.isend, self._outgoing[-1], target, group, tag))
            elif target == rank:
                size = message_bytes(message, step.kinds, step.lengths)
                self._incoming[source] = torch.empty(size, dtype=torch.uint8, device=device)
                posts.append(dist.P2POp(dist.irecv, self._incoming[source], source, group, tag))
        event.sent, event.received = sum(map(len, self._outgoing)), sum(map(len, self._incoming.values()))
        event.minimum = event.received
        self._works = dist.batch_isend_irecv(posts) if posts else []

    def wait(self) -> None:
        """Wait, and put the received values into the store."""
        kinds = self._step.kinds
        for work in self._works:
            work.wait()
        for source, received in self._incoming.items():
            message = self._messages[source, dist.get_rank()]
            sizes = [message_bytes([item], kinds, self._step.lengths) for item in message]
            for (key, i), piece in zip(message, received.cpu().split(sizes), strict=True):
                value = piece.clone().view(kinds[key].dtype)  # pieces may be misaligned for their dtype
                self._step.store.setdefault(key, {})[i] = value if kinds[key].tokens else value.reshape(())
