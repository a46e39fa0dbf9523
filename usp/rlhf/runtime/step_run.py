"""Run the operations of a step on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ProcessGroups
from usp.rlhf.graph import (
    Compute,
    DataflowGraph,
    Generate,
    Inference,
    KeyKind,
    ModelCall,
    TrainStep,
    canonical,
    tokens_key,
)
from usp.rlhf.plan.operations import Operation, copy_of
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.roles.role import Role
from usp.rlhf.samples import Samples, derived_seed

from .copies import RoleCopies
from .timeline import Event, Timeline
from .transfer import PendingTransfer, StepData, plan_transfer

TRANSFER_LANE = "transfer"  # transfers overlap with calls, whose communication must not wait for them


@dataclass(frozen=True)
class RunContext:
    """The state that all steps of a run share."""

    graph: DataflowGraph
    plan: ExecutionPlan
    kinds: Mapping[str, KeyKind]
    groups: ProcessGroups
    copies: RoleCopies
    operations: tuple[Operation, ...]
    timeline: Timeline
    device: torch.device


class StepRunner:
    """Runner of one step on this rank: `run` for each operation in order, then `finish`.

    metrics: of the train steps whose first rank this is, such as "actor/loss".
    """

    def __init__(self, context: RunContext, step: StepData, seed: int) -> None:
        self._context, self.step, self._seed = context, step, seed
        self._rank = dist.get_rank()
        self._posted: list[tuple[PendingTransfer, Event]] = []  # which this rank has not waited for yet
        self.metrics: dict[str, float] = {}

    def run(self, operation: Operation) -> None:
        """Run an operation that this rank takes part in."""
        context = self._context
        if operation.kind == "call":
            self._call(context.graph[operation.call])
        elif operation.kind == "transfer":
            self._transfer(operation)
        else:
            with context.timeline.record(operation.kind, operation.name) as event:
                if operation.kind == "announce":
                    self._announce(operation.calls, operation.ranks)
                elif operation.kind == "reallocate":
                    assert operation.copy
                    context.copies.reallocate(operation.copy, operation.sources, event)
                else:
                    assert operation.copy and operation.kind in ("release", "load", "offload"), operation.kind
                    getattr(context.copies.model(operation.copy), operation.kind)()

    def finish(self) -> None:
        """Wait for all posted transfers: with staleness, for those of the samples that the next iteration trains on."""
        if any(transfer.received for transfer, _ in self._posted):
            with self._context.timeline.record("wait", "the next iteration"):
                self._wait(self._posted)
        self._wait(self._posted)

    def _announce(self, calls: Sequence[str], ranks: Sequence[int]) -> None:
        """Tell ranks the lengths of the generated sequences: leaders fill in theirs, an all-reduce sums them."""
        step, graph = self.step, self._context.graph
        keys = [tokens_key(graph[name]) for name in calls]
        lengths = torch.zeros(len(keys), step.samples, dtype=torch.int64, device=self._context.device)
        for row, (key, name) in enumerate(zip(keys, calls, strict=True)):
            for i in step.led(graph[name]):
                lengths[row, i] = len(step.store[key][i])
        dist.all_reduce(lengths, group=None if len(ranks) == dist.get_world_size() else self._context.groups.get(ranks))
        step.lengths.update(zip(keys, lengths.tolist(), strict=True))

    def _transfer(self, operation: Operation) -> None:
        """Post this rank's messages; calls wait for those that they need."""
        context, step = self._context, self.step
        producer = context.graph[operation.call]
        consumers, served = (
            [step.transfer_end(context.graph[name], context.graph[name].inputs) for name in names]
            for names in (operation.calls, operation.served)
        )
        messages = plan_transfer(step.transfer_end(producer, producer.outputs), consumers, served)
        if not messages:
            return
        group = context.groups.get(operation.ranks, TRANSFER_LANE)
        assert group
        event = context.timeline.begin("transfer", operation.name)
        tag = context.operations.index(operation)
        transfer = PendingTransfer(messages, operation.calls, step, group=group, device=context.device, tag=tag)
        event.sent = transfer.sent
        event.received = event.minimum = transfer.received
        if transfer.sent and not transfer.received:
            context.timeline.end(event)
        self._posted.append((transfer, event))

    def _wait(self, posted: Sequence[tuple[PendingTransfer, Event]]) -> None:
        for transfer, event in posted:
            transfer.wait()
            if transfer.received:
                self._context.timeline.end(event)
        self._posted = [pair for pair in self._posted if pair not in posted]

    def _call(self, call: ModelCall) -> None:
        context = self._context
        layout = context.plan[call.name]
        needed = [(t, event) for t, event in self._posted if call.name in t.consumers and t.received]
        if needed:
            with context.timeline.record("wait", call.name):
                self._wait(needed)
        number = layout.number_of(self._rank)
        batches = self.step.partition(call)[number]
        with context.timeline.record(call.kind, call.name) as recorded:
            if (isinstance(call.work, Generate) and layout.dims.ep == 1) or isinstance(call.work, Compute):
                recorded.group = number  # data-parallel ranks do not meet, unless a function reduces
            if isinstance(call.work, TrainStep):
                mini_batches = [self.step.take(call, batch) for batch in batches]
                metrics = self._model(call).train_step(mini_batches, call.work)
                if self._rank == layout.ranks[0]:
                    self.metrics.update({f"{call.role}/{name}": float(value) for name, value in metrics.items()})
                return
            ids = sorted(i for batch in batches for i in batch)
            result = self._run_work(call, self.step.take(call, ids), recorded)
        if self._rank in layout.leaders:
            self.step.put(call, ids, result)

    def _model(self, call: ModelCall) -> Role:
        return self._context.copies.model(copy_of(self._context.graph, self._context.plan, call))

    def _run_work(self, call: ModelCall, samples: Samples, recorded: Event) -> Samples:
        if isinstance(call.work, Generate):
            result = self._model(call).generate(samples, call.work, derived_seed(self._seed, call.name))
            names = {key: canonical(key) for key in call.outputs}
            return Samples(result.ids, {key: result[name] for key, name in names.items() if name in result.values})
        if isinstance(call.work, Inference):
            key = tokens_key(call)
            sequences = Samples(samples.ids, {**samples.only(set(call.inputs) - {key}).values, "tokens": samples[key]})
            return self._model(call).inference(sequences, call.work, call.outputs[0], self._context.plan[call.name])
        assert isinstance(call.work, Compute)
        group = self._context.groups.get(self._context.plan[call.name].ranks)
        assert group

        def reduce(value: Tensor) -> Tensor:
            recorded.group = 0
            total = value.detach().to(self._context.device, copy=True)
            dist.all_reduce(total, group=group)
            return total.to(value.device)

        return call.work.function(samples, reduce)
