"""One RLHF step, from top to bottom, as every rank runs it: without a controller, by operations that all ranks know.

    Executor.run                       makes the samples of a step, and trains on those made `graph.depth` steps before
      StepRunner.run                   runs each operation of `schedule` that this rank takes part in, in order:
        reallocate, release, load, offload   move weights where the plan says                    copies.py
        call                                 generate, infer, compute rewards and so on, train   roles/role_model.py
        announce                             tell ranks how long the responses are               transfer.py
        transfer                             send results to the ranks whose calls read them     transfer.py
      _add_metrics                     sums the metrics of all ranks                             measure.py

state.py has what lasts from step to step, and how it moves to another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from usp.parallel import agree
from usp.parallel.groups import gather_objects
from usp.rlhf.algorithms.policy import SPARE
from usp.rlhf.graph import Compute, DataflowGraph, Generate, Inference, ModelCall, TrainStep, canonical, tokens_key
from usp.rlhf.plan.operations import Operation
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.samples import Samples, derived_seed
from usp.run.failures import UserCodeFailed

from .measure import SENT_BYTES, WHOLE_BYTES, announce_lengths, merge, numbers_of, summarize
from .state import TRANSFER_LANE, ExecutorState
from .timeline import Event
from .transfer import PendingTransfer, StepData, batch_violations


@dataclass(frozen=True, eq=False)
class StepInput:
    """The samples of a step, the same on every rank: prompts, if the graph generates."""

    given: Samples
    number: int
    seed: int


@dataclass(frozen=True)
class StepResult:
    """The result of a step; samples and events differ between ranks."""

    metrics: dict[str, float]  # see `measure.merge`
    samples: Samples | None  # those collected, on rank 0
    events: tuple[Event, ...]  # of this rank
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)  # see `StepData`
    numbers: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # see `StepData`
    tickets: Sequence[int] | None = None  # with `Rollouts`, those of the samples' prompts


class Executor(ExecutorState):
    """Executor of steps with the models of a plan."""

    def another(
        self, graph: DataflowGraph, plan: ExecutionPlan, *, collect: tuple[str, ...], progress: Callable[[str], None]
    ) -> Executor:
        """Return an executor of another graph with the weight copies of this one. Collective over the world.

        plan: needs no other copies.
        """
        shared: dict[str, Any] = {"first": self._first, "copies": self.copies, "before_changes": self._before_changes}
        return Executor(graph, plan, self._options, **shared, collect=collect, progress=progress)

    def run_step(self, given: Samples, number: int, seed: int) -> StepResult:
        """Make the samples of step `number` and train on them: `run` on policy."""
        result = self.run(StepInput(given, number, seed))
        assert result is not None
        return result

    def run(self, begins: StepInput | None) -> StepResult | None:
        """Make the samples of a step, and train on those made `graph.depth` steps before. Collective.

        On policy these are the same samples; otherwise the new ones are made with the weights before this training.

        begins: None at the end of a run, when all samples are made.

        Returns None at the beginning of a run, until samples are due for training.

        Raises:
            ValueError: before anything runs, for samples that the calls cannot divide, such as an empty batch; and if a
                call's outputs do not match the graph.
            RanksDisagree: on every rank, if ranks pass samples of different lengths, or different seeds.
            UserCodeFailed: what `before_changes` raised. If another step has trained meanwhile, that step is done, the
                samples are dropped, and the next call raises it.
        """
        if self.failure is not None:
            raise self.failure
        new = None if begins is None else self._begin(begins)
        steps = [*self.in_flight, *([new] if new else [])]
        due = steps.pop(0) if len(steps) > (self.graph.depth if new else 0) else None
        runners = {ahead: StepRunner(self, step) for ahead, step in ((self.graph.depth, new), (0, due)) if step}
        self.timeline.step = runners[min(runners)].step.number

        checked = self._operate(runners)
        self._progress("end of the step")
        for runner in runners.values():
            runner.finish()
        if self.failure is not None:
            if due is None or due is new:
                raise self.failure
            del runners[self.graph.depth], steps[-1]  # the new step

        self._add_metrics(runners)
        if new and self.failure is None:
            new.metrics |= checked
            if self.rollouts is not None:
                self.rollouts.end(new, [i for i, spare in new.numbers.get(SPARE, {}).items() if spare])
        for step in steps:
            step.store = {key: step.store[key] for key in step.readers() if key in step.store}  # of later iterations
        self.in_flight = steps
        if due is None:
            return None
        samples = self._collected.pop() if self._collected else None
        return StepResult(due.metrics, samples, self.timeline.take(), due.lengths, due.numbers, due.tickets)

    def _begin(self, begins: StepInput) -> StepData:
        """Return the data of a step, on which all ranks agree."""
        rollouts = self.rollouts
        step = StepData.of(self.graph, self.plan, begins.given) if rollouts is None else rollouts.begin_step()
        step.number, step.seed = begins.number, begins.seed
        step.version = max(0, begins.number - 1 - self.graph.depth)
        if violations := batch_violations(self.graph, step.samples):
            raise ValueError("; ".join(violations))
        value = {"step": begins.number, "seed": begins.seed, "samples": step.samples, "lengths": step.lengths}
        agree(value, self._world, "number, seed and samples of a step", self.device)
        return step

    def _operate(self, runners: Mapping[int, StepRunner]) -> Mapping[str, float]:
        """Run the operations of this rank on steps by `Operation.ahead`; return the metrics from `before_changes`."""

        def run(operation: Operation) -> None:
            if operation.ahead in runners and self._rank in operation.ranks:
                self._progress(f"{operation.kind} {operation.name}")
                runners[operation.ahead].run(operation)

        checked: Mapping[str, float] = {}
        for operation in self.operations[: self._first_change]:
            run(operation)
        if self.graph.depth in runners:
            try:
                checked = self._before_changes(runners[self.graph.depth].step.number)
            except UserCodeFailed as failed:
                self.failure = failed
        for operation in self.operations[self._first_change :]:
            if self.failure is None or operation.kind in ("release", "offload"):
                run(operation)
        return checked

    def _add_metrics(self, runners: Mapping[int, StepRunner]) -> None:
        """Add what all ranks measured in this iteration to the metrics of each step. Collective."""
        summaries = gather_objects({ahead: summarize(of.step, of.ran, of.metrics) for ahead, of in runners.items()})
        for ahead, runner in runners.items():
            of_step = [of_rank[ahead] for of_rank in summaries]
            runner.step.metrics |= merge(of_step, runner.step.lengths)
            runner.step.numbers = numbers_of(of_step)


class StepRunner:
    """Runner of a step's operations on this rank: `run` for each in order, then `finish`.

    ran: names of the calls so far.
    metrics: of the train steps whose first rank this is, such as "actor/loss"; and bytes of weights.
    """

    def __init__(self, executor: Executor, step: StepData) -> None:
        self._executor, self.step, self._rank = executor, step, dist.get_rank()
        self._posted: list[PendingTransfer] = []  # which this rank has not waited for yet
        self.ran: set[str] = set()
        self.metrics: dict[str, float] = {}

    def run(self, operation: Operation) -> None:
        """Run an operation that this rank takes part in."""
        if operation.kind == "call":
            self._call(self._executor.graph[operation.call])
        elif operation.kind == "announce":
            self._announce(operation)
        elif operation.kind == "transfer":
            self._transfer(operation)
        else:
            self._move_weights(operation)

    def finish(self) -> None:
        """Wait for all posted transfers, those to calls of the next iteration included."""
        self._wait(self._posted, "the next iteration")

    def _move_weights(self, operation: Operation) -> None:
        """Fill a copy of the weights from others, free it, or move it between the device and the host."""
        executor, copies, kind = self._executor, self._executor.copies, operation.kind
        assert operation.copy and kind in ("reallocate", "release", "load", "offload"), kind
        with executor.timeline.record(kind, operation.name) as event:
            if kind != "reallocate":
                getattr(copies.model(operation.copy), kind)()
                return
            copies.reallocate(operation.copy, operation.sources, event)
        if copies.delta_updates:
            for name, nbytes in ((SENT_BYTES, event.received), (WHOLE_BYTES, event.minimum)):
                self.metrics[name] = self.metrics.get(name, 0) + nbytes

    def _call(self, call: ModelCall) -> None:
        """Run a call on this rank's samples, once its inputs have arrived."""
        executor, step, layout = self._executor, self.step, self._executor.plan[call.name]
        self._wait([t for t in self._posted if call.name in t.consumers and t.event.received], call.name)
        self.ran.add(call.name)
        number = layout.number_of(self._rank)
        batches = step.partition(call)[number]
        ids = sorted(i for batch in batches for i in batch)
        with executor.timeline.record(call.kind, call.name) as event:
            if (isinstance(call.work, Generate) and layout.dims.ep == 1) or isinstance(call.work, Compute):
                event.group = number  # data-parallel ranks do not meet, unless a function reduces
            results = None
            if isinstance(call.work, TrainStep):
                self._train(call, call.work, batches)
            elif isinstance(call.work, Generate):
                results = self._generate(call, call.work, ids)
            elif isinstance(call.work, Inference):
                results = self._infer(call, call.work, ids)
            else:
                results = self._compute(call, call.work, ids, event)
        if results is not None and self._rank in layout.leaders:
            step.put(call, ids, results)

    def _generate(self, call: ModelCall, work: Generate, ids: Sequence[int]) -> Samples:
        executor, model = self._executor, self._model(call)
        if executor.rollouts is not None:
            return executor.rollouts.generate(model, self.step, ids)
        results = model.generate(self.step.take(call, ids), work, derived_seed(self.step.seed, call.name))
        names = {key: canonical(key) for key in call.outputs}
        return Samples(results.ids, {key: results[name] for key, name in names.items() if name in results.values})

    def _infer(self, call: ModelCall, work: Inference, ids: Sequence[int]) -> Samples:
        samples, key = self.step.take(call, ids), tokens_key(call)
        sequences = Samples(samples.ids, {**samples.only(set(call.inputs) - {key}).values, "tokens": samples[key]})
        return self._model(call).inference(sequences, work, call.outputs[0], self._executor.plan[call.name])

    def _compute(self, call: ModelCall, work: Compute, ids: Sequence[int], event: Event) -> Samples:
        executor = self._executor
        group = executor.groups.get(executor.plan[call.name].ranks)
        assert group

        def reduce(value: Tensor) -> Tensor:
            event.group = 0
            total = value.detach().to(executor.device, copy=True)
            dist.all_reduce(total, group=group)
            return total.to(value.device)

        return work.function(self.step.take(call, ids), reduce)

    def _train(self, call: ModelCall, work: TrainStep, batches: Sequence[Sequence[int]]) -> None:
        metrics = self._model(call).train_step([self.step.take(call, batch) for batch in batches], work)
        if self._rank == self._executor.plan[call.name].ranks[0]:
            self.metrics.update({f"{call.role}/{name}": float(value) for name, value in metrics.items()})

    def _model(self, call: ModelCall) -> RoleModel:
        return self._executor.copies.model(self._executor.copy_of[call.name])

    def _announce(self, operation: Operation) -> None:
        """Tell ranks the lengths of the generated sequences, and with `Rollouts` the prompts that the step takes."""
        executor, ranks = self._executor, operation.ranks
        group = None if len(ranks) == dist.get_world_size() else executor.groups.get(ranks)
        with executor.timeline.record(operation.kind, operation.name):
            announce_lengths(self.step, operation.calls, group, executor.device)
            if executor.rollouts is not None:
                executor.rollouts.know_prompts(self.step)

    def _transfer(self, operation: Operation) -> None:
        """Post this rank's messages with the results of a call; the calls that need them wait."""
        executor, step = self._executor, self.step
        messages = step.messages(operation.call, operation.calls, operation.served)
        if not messages:
            return
        group = executor.groups.get(operation.ranks, TRANSFER_LANE)
        assert group
        event = executor.timeline.begin("transfer", operation.name)
        tag = executor.operations.index(operation)
        transfer = PendingTransfer(messages, operation.calls, step, event, group=group, device=executor.device, tag=tag)
        self._posted.append(transfer)
        if event.sent and not event.received:
            executor.timeline.end(event)

    def _wait(self, posted: Sequence[PendingTransfer], what: str) -> None:
        """Wait for messages, and record the wait for `what` if this rank receives any."""
        timeline, receives = self._executor.timeline, any(transfer.event.received for transfer in posted)
        with timeline.record("wait", what) if receives else nullcontext():
            for transfer in posted:
                transfer.wait()
                if transfer.event.received:
                    timeline.end(transfer.event)
        self._posted = [transfer for transfer in self._posted if transfer not in posted]
