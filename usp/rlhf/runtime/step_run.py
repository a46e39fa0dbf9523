"""The operations of a step, done by this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ProcessGroups
from usp.rlhf.data.samples import Samples
from usp.rlhf.data.seeds import derived_seed
from usp.rlhf.graph.calls import Compute, Generate, Inference, ModelCall, TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import KeyKind, canonical, tokens_key
from usp.rlhf.plan.operations import Operation, WeightCopy, copy_of
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.roles.role import RoleModel

from .copies import RoleCopies
from .step_plan import Step
from .timeline import Timeline, Traffic
from .transfer import Arriving, Messenger, plan_transfer

LANE = "transfer"  # a transfer is on its way while its ranks compute: what their models send must not wait for it


@dataclass(frozen=True)
class Setting:
    """What all steps of a run have in common."""

    graph: DataflowGraph
    plan: ExecutionPlan
    kinds: Mapping[str, KeyKind]
    groups: ProcessGroups
    copies: RoleCopies
    operations: tuple[Operation, ...]
    timeline: Timeline
    device: torch.device


@dataclass(frozen=True, eq=False)
class _Posted:
    """A transfer that this rank has not waited for."""

    consumers: tuple[str, ...]
    name: str
    start: float
    traffic: Traffic
    arriving: Arriving


class StepRun:
    """One step on this rank; `run` does its operations one after another, `finish` waits for what is on its way.

    Attributes:
        metrics: of the train steps that this rank is the first of: "actor/loss".
    """

    def __init__(self, setting: Setting, step: Step, seed: int) -> None:
        self._setting, self._step, self._seed = setting, step, seed
        self._rank = dist.get_rank()
        self._posted: list[_Posted] = []
        self.metrics: dict[str, float] = {}

    def run(self, operation: Operation) -> None:
        """Do an operation that names this rank."""
        if operation.kind == "call":
            self._call(self._setting.graph[operation.call])
        elif operation.kind == "transfer":
            self._transfer(operation)
        else:
            with self._setting.timeline.record(operation.kind, operation.name) as traffic:
                if operation.kind == "announce":
                    self._announce(operation.calls)
                else:
                    assert operation.copy
                    self._weights(operation.kind, operation.copy, traffic)

    def finish(self) -> None:
        """Wait for everything that was posted: what has left may be forgotten."""
        self._wait(self._posted)

    def _weights(self, kind: str, copy: WeightCopy, traffic: Traffic) -> None:
        copies = self._setting.copies
        if kind == "reallocate":
            copies.reallocate(copy, traffic)
        elif kind == "release":
            copies.model(copy).release()
        elif kind == "load":
            copies.model(copy).load()
        else:
            assert kind == "offload", kind
            copies.model(copy).offload()

    def _announce(self, calls: Sequence[str]) -> None:
        """Tell every rank the lengths of what was generated: each leader those of its samples, in one sum."""
        step, graph = self._step, self._setting.graph
        keys = [tokens_key(graph[name]) for name in calls]
        lengths = torch.zeros(len(keys), step.samples, dtype=torch.int64, device=self._setting.device)
        for row, (key, name) in enumerate(zip(keys, calls, strict=True)):
            if self._rank in self._setting.plan[name].leaders:
                for i, value in step.store.get(key, {}).items():
                    lengths[row, i] = len(value)
        dist.all_reduce(lengths)
        step.lengths.update(zip(keys, lengths.tolist(), strict=True))

    def _transfer(self, operation: Operation) -> None:
        """Post the messages of this rank; calls wait for those that they need."""
        setting, step = self._setting, self._step
        producer, *consumers = (setting.graph[name] for name in (operation.call, *operation.calls))
        served = [step.part(call := setting.graph[name], call.inputs) for name in operation.served]
        plan = plan_transfer(
            step.part(producer, producer.outputs), [step.part(call, call.inputs) for call in consumers], served
        )
        if not plan.items:
            return
        group = setting.groups.get(operation.ranks, LANE)
        assert group
        start = setting.timeline.now()
        sizes = (setting.kinds, step.lengths)
        received = plan.received(self._rank, *sizes)
        traffic = Traffic(plan.sent(self._rank, *sizes), received, received)
        messenger = Messenger(group, setting.device, *sizes)
        arriving = messenger.post(plan, step.store, tag=setting.operations.index(operation))
        if traffic.sent and not traffic.received:
            setting.timeline.add("transfer", operation.name, start, traffic)
        self._posted.append(_Posted(operation.calls, operation.name, start, traffic, arriving))

    def _wait(self, posted: Sequence[_Posted]) -> None:
        for one in posted:
            one.arriving.wait(self._step.store)
            if one.traffic.received:
                self._setting.timeline.add("transfer", one.name, one.start, one.traffic)
        self._posted = [one for one in self._posted if one not in posted]

    def _call(self, call: ModelCall) -> None:
        setting = self._setting
        layout = setting.plan[call.name]
        needed = [one for one in self._posted if call.name in one.consumers and one.traffic.received]
        if needed:
            with setting.timeline.record("wait", call.name):
                self._wait(needed)
        batches = self._step.parts(call)[layout.number_of(self._rank)]
        with setting.timeline.record(call.kind, call.name):
            ids = sorted(i for batch in batches for i in batch)
            if isinstance(call.work, TrainStep):
                mini_batches = [self._step.take(call, batch) for batch in batches]
                said = self._model(call).train_step(mini_batches, call.work)
                if self._rank == layout.ranks[0]:
                    self.metrics.update({f"{call.role}/{name}": float(value) for name, value in said.items()})
                return
            result = self._work(call, self._step.take(call, ids))
        if self._rank in layout.leaders:
            self._step.put(call, ids, result)

    def _model(self, call: ModelCall) -> RoleModel:
        return self._setting.copies.model(copy_of(self._setting.graph, self._setting.plan, call))

    def _work(self, call: ModelCall, samples: Samples) -> Samples:
        if isinstance(call.work, Generate):
            made = self._model(call).generate(samples, call.work, derived_seed(self._seed, call.name))
            names = {key: canonical(key) for key in call.outputs}
            return Samples(made.ids, {key: made[name] for key, name in names.items() if name in made.values})
        if isinstance(call.work, Inference):
            key = tokens_key(call)
            sequences = Samples(samples.ids, {**samples.only(set(call.inputs) - {key}).values, "tokens": samples[key]})
            return self._model(call).inference(sequences, call.work, call.outputs[0])
        assert isinstance(call.work, Compute)
        group = self._setting.groups.get(self._setting.plan[call.name].ranks)
        assert group
        return call.work.function(samples, lambda value: self._sum(value, group))

    def _sum(self, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = value.detach().to(self._setting.device, copy=True)
        dist.all_reduce(total, group=group)
        return total.to(value.device)
