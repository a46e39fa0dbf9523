"""Execute the steps of a graph under a plan, without a controller: every rank runs the same program.

The ranks compare the graph (a hash of each call) and the plan at the start, and from then on know what the others do.
Each rank runs the operations of `schedule` that it takes part in, in order, then all exchange metrics. With staleness 1
one step trains while the next one's samples are made. Between two steps another plan may begin: all values move to its
layouts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp.parallel import agree
from usp.parallel.groups import gather_objects
from usp.rlhf.algorithms.algorithm import stateful
from usp.rlhf.algorithms.policy import SPARE
from usp.rlhf.graph import Compute, DataflowGraph, Generate, Inference, ModelCall, TrainStep, canonical, tokens_key
from usp.rlhf.plan.operations import Operation, copy_of, schedule
from usp.rlhf.plan.plan import ExecutionPlan, staleness_violations, to_mapping
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.samples import Samples, derived_seed, fingerprint
from usp.run.failures import UserCodeFailed

from .copies import CopyOptions, RoleCopies
from .measure import SENT_BYTES, WHOLE_BYTES, Summary, merge, numbers_of, summarize, with_measures
from .rollouts import RolloutOptions, Rollouts
from .timeline import Event, Timeline, clock_offset
from .transfer import PendingTransfer, StepData, batch_violations, plan_transfer

TRANSFER_LANE = "transfer"  # transfers overlap with calls, whose communication must not wait for them


class StepRunner:
    """Runner of one step on this rank: `run` for each operation in order, then `finish`.

    metrics: of the train steps whose first rank this is, such as "actor/loss".
    """

    def __init__(self, executor: Executor, step: StepData, seed: int) -> None:
        self._executor, self.step, self._seed = executor, step, seed
        self._rank = dist.get_rank()
        self._posted: list[tuple[PendingTransfer, Event]] = []  # which this rank has not waited for yet
        self.metrics: dict[str, float] = {}

    def run(self, operation: Operation) -> None:
        """Run an operation that this rank takes part in."""
        executor = self._executor
        if operation.kind == "call":
            self._call(executor.graph[operation.call])
        elif operation.kind == "transfer":
            self._transfer(operation)
        else:
            with executor.timeline.record(operation.kind, operation.name) as event:
                if operation.kind == "announce":
                    self._announce(operation.calls, operation.ranks)
                elif operation.kind == "reallocate":
                    assert operation.copy
                    executor.copies.reallocate(operation.copy, operation.sources, event)
                    if executor.copies.delta_updates:
                        for name, nbytes in ((SENT_BYTES, event.received), (WHOLE_BYTES, event.minimum)):
                            self.metrics[name] = self.metrics.get(name, 0) + nbytes
                else:
                    assert operation.copy and operation.kind in ("release", "load", "offload"), operation.kind
                    getattr(executor.copies.model(operation.copy), operation.kind)()

    def finish(self) -> None:
        """Wait for all posted transfers: with staleness, for those of the samples that the next iteration trains on."""
        if any(transfer.received for transfer, _ in self._posted):
            with self._executor.timeline.record("wait", "the next iteration"):
                self._wait(self._posted)
        self._wait(self._posted)

    def _announce(self, calls: Sequence[str], ranks: Sequence[int]) -> None:
        """Tell ranks the lengths of the generated sequences: leaders fill in theirs, an all-reduce sums them."""
        step, executor = self.step, self._executor
        keys = [tokens_key(executor.graph[name]) for name in calls]
        lengths = torch.zeros(len(keys) + 1, step.samples, dtype=torch.int64, device=executor.device)
        for row, (key, name) in enumerate(zip(keys, calls, strict=True)):
            for i in step.led(executor.graph[name]):
                lengths[row, i] = len(step.store[key][i])
                lengths[-1, i] = step.tickets[i] if step.tickets is not None else 0
        dist.all_reduce(lengths, group=None if len(ranks) == dist.get_world_size() else executor.groups.get(ranks))
        *told, tickets = lengths.tolist()
        step.lengths.update(zip(keys, told, strict=True))
        if executor.rollouts is not None:
            step.tickets = tickets
            executor.rollouts.know_prompts(step)

    def _transfer(self, operation: Operation) -> None:
        """Post this rank's messages; calls wait for those that they need."""
        executor, step = self._executor, self.step
        producer = executor.graph[operation.call]
        consumers, served = (
            [step.transfer_end(executor.graph[name], executor.graph[name].inputs) for name in names]
            for names in (operation.calls, operation.served)
        )
        messages = plan_transfer(step.transfer_end(producer, producer.outputs), consumers, served)
        if not messages:
            return
        group = executor.groups.get(operation.ranks, TRANSFER_LANE)
        assert group
        event = executor.timeline.begin("transfer", operation.name)
        tag = executor.operations.index(operation)
        transfer = PendingTransfer(messages, operation.calls, step, group=group, device=executor.device, tag=tag)
        event.sent = transfer.sent
        event.received = event.minimum = transfer.received
        if transfer.sent and not transfer.received:
            executor.timeline.end(event)
        self._posted.append((transfer, event))

    def _wait(self, posted: Sequence[tuple[PendingTransfer, Event]]) -> None:
        for transfer, event in posted:
            transfer.wait()
            if transfer.received:
                self._executor.timeline.end(event)
        self._posted = [pair for pair in self._posted if pair not in posted]

    def _call(self, call: ModelCall) -> None:
        executor = self._executor
        layout = executor.plan[call.name]
        needed = [(t, event) for t, event in self._posted if call.name in t.consumers and t.received]
        if needed:
            with executor.timeline.record("wait", call.name):
                self._wait(needed)
        number = layout.number_of(self._rank)
        batches = self.step.partition(call)[number]
        with executor.timeline.record(call.kind, call.name) as recorded:
            if (isinstance(call.work, Generate) and layout.dims.ep == 1) or isinstance(call.work, Compute):
                recorded.group = number  # data-parallel ranks do not meet, unless a function reduces
            if isinstance(call.work, TrainStep):
                mini_batches = [self.step.take(call, batch) for batch in batches]
                metrics = self._model(call).train_step(mini_batches, call.work)
                if self._rank == layout.ranks[0]:
                    self.metrics.update({f"{call.role}/{name}": float(value) for name, value in metrics.items()})
                return
            ids = sorted(i for batch in batches for i in batch)
            if isinstance(call.work, Generate) and executor.rollouts is not None:
                result = executor.rollouts.generate(self._model(call), self.step, ids)
            else:
                result = self._run_work(call, self.step.take(call, ids), recorded)
        if self._rank in layout.leaders:
            self.step.put(call, ids, result)

    def _model(self, call: ModelCall) -> RoleModel:
        return self._executor.copies.model(self._executor.copy_of[call.name])

    def _run_work(self, call: ModelCall, samples: Samples, recorded: Event) -> Samples:
        if isinstance(call.work, Generate):
            result = self._model(call).generate(samples, call.work, derived_seed(self._seed, call.name))
            names = {key: canonical(key) for key in call.outputs}
            return Samples(result.ids, {key: result[name] for key, name in names.items() if name in result.values})
        if isinstance(call.work, Inference):
            key = tokens_key(call)
            sequences = Samples(samples.ids, {**samples.only(set(call.inputs) - {key}).values, "tokens": samples[key]})
            return self._model(call).inference(sequences, call.work, call.outputs[0], self._executor.plan[call.name])
        assert isinstance(call.work, Compute)
        group = self._executor.groups.get(self._executor.plan[call.name].ranks)
        assert group

        def reduce(value: Tensor) -> Tensor:
            recorded.group = 0
            total = value.detach().to(self._executor.device, copy=True)
            dist.all_reduce(total, group=group)
            return total.to(value.device)

        return call.work.function(samples, reduce)


@dataclass(frozen=True, eq=False)
class StepInput:
    """What a step begins with: see `Executor.run_step`."""

    given: Samples
    number: int
    seed: int


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank but for samples and events."""

    metrics: dict[str, float]  # see `measure.merge`
    samples: Samples | None  # those collected, on rank 0
    events: tuple[Event, ...]  # of this rank
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)  # see `StepData`
    numbers: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # by key and id; empty with staleness
    tickets: Sequence[int] | None = None  # with `Rollouts`, those of the samples' prompts


class Executor:
    """Executor of steps with the models of a plan. Construction is collective over the world.

    Args:
        folder: of the run, for its timeline; None: no files.
        collect: keys whose values are collected on rank 0 after every step, of the `first` samples; None: of all.
        progress: called with every operation of this rank as it begins.
        before_changes: called on every rank before the first operation of a step that changes weights, or the state of
            a function, else at its end. It returns metrics of the step's samples; what it raises on all ranks leaves
            everything as the last step did.
        copies: those of another executor, which hold all that this plan needs; None: built here.
        staleness: by how many steps samples are made ahead of the training on them; see `schedule`.
        rollouts: prompts are begun before their step, which takes those that are complete first. No change of plans.

    graph, plan, operations: of a step, with what is measured. copies: the models of this rank. copy_of: which of them
    each call uses.
    in_flight: the samples that are made and not trained on yet; set to continue from a checkpoint.
    rollouts: what is begun.

    Raises:
        ValueError: naming every violation, if the plan does not fit the graph, the world size and the staleness.
        RanksDisagree: on every rank, if ranks have different graphs or plans.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        options: CopyOptions,
        *,
        folder: Path | None = None,
        collect: tuple[str, ...] = (),
        first: int | None = None,
        progress: Callable[[str], None] = lambda doing: None,
        before_changes: Callable[[], Mapping[str, float]] = dict,
        copies: RoleCopies | None = None,
        staleness: int = 0,
        rollouts: RolloutOptions | None = None,
    ) -> None:
        self._rank, self._staleness = dist.get_rank(), staleness
        self._asked, self._options, self._collect, self._first = graph, options, collect, first
        self.groups, self.device = options.groups, options.device
        self._progress, self._before_changes = progress, before_changes
        self._failure: UserCodeFailed | None = None
        self._checked: Mapping[str, float] = {}
        self.in_flight: StepData | None = None
        self._collected: list[Samples] = []
        assert dist.group.WORLD
        self._world = [dist.group.WORLD]
        graph, plan = self._agreed(plan)
        self.copies = copies or RoleCopies(graph, plan, options)
        self.rollouts = None if rollouts is None else Rollouts(rollouts, graph, plan)
        self.timeline = Timeline(self._rank, clock_offset(device=self.device), self.device, folder)
        self._get_ready(graph, plan)
        for operation in self.operations if copies is None else ():
            if operation.kind == "offload" and operation.copy and self._rank in operation.ranks:
                self.copies.model(operation.copy).offload()

    def change_plan(self, plan: ExecutionPlan) -> None:
        """Run the following steps under another plan, with all values as they are. Collective, between two steps.

        Weights, optimizer states, the state of functions and samples in flight move to the new layouts, as `RoleCopies`
        does. Executors from `another` cannot be used afterwards. A timeline event of kind switch records it.

        Raises ValueError and RanksDisagree as construction, before anything moves.
        """
        graph, plan = self._agreed(plan)
        with self.timeline.record("switch", plan.name) as event:
            for name, state in self.function_states().items():
                stateful(self._asked)[name].load_state_dict(state)
            in_flight = self.in_flight and (self.in_flight.to_extra(), self.in_flight.whole(self.device))
            self.copies = RoleCopies(graph, plan, self._options, self.copies, event)
            self._get_ready(graph, plan)
            if in_flight:
                extra, whole = in_flight
                self.in_flight = self.saved_in_flight(extra)
                self.in_flight.fill(whole)
            gc.collect()  # models refer to themselves
        self.timeline.take()

    def follow(self, role: str, trained: str, weight: float) -> None:
        """Move an untrained role towards a trained one between two steps, as `RoleCopies.follow`."""
        with self.timeline.record("reallocate", f"{role} from {trained}") as event:
            self.copies.follow(role, trained, weight, event)

    def function_states(self) -> dict[str, dict[str, float]]:
        """Collect the state of stateful functions, which only the ranks that call them have. Collective."""
        states = {}
        for name, function in stateful(self._asked).items():
            state = [function.state_dict()]
            dist.broadcast_object_list(state, src=self.plan[name].ranks[0], device=self.device)
            states[name] = state[0]
        return states

    def _agreed(self, plan: ExecutionPlan) -> tuple[DataflowGraph, ExecutionPlan]:
        """Check a plan, on all ranks the same, and return it and the graph with what is measured."""
        plan.check(self._asked, dist.get_world_size())
        if self._staleness and (shared := list(staleness_violations(self._asked, plan))):
            raise ValueError(f"plan {plan.name!r} with staleness={self._staleness}: {'; '.join(shared)}")
        graph, plan = with_measures(self._asked, plan, self._collect, self._collected.append, self._first)
        calls = {call.name: fingerprint(call) for call in graph.calls}
        compared = {"graph": calls, "given": graph.given, "plan": to_mapping(plan), "collect": self._collect}
        options = {"ranks_per_host": self._options.ranks_per_host, "staleness": self._staleness}
        agree({**compared, **options}, self._world, "the graph and the plan", self.device)
        return graph, plan

    def _get_ready(self, graph: DataflowGraph, plan: ExecutionPlan) -> None:
        """Get ready for steps under a plan, and connect their process groups. Collective."""
        self.graph, self.plan, world_size = graph, plan, dist.get_world_size()
        self.copy_of = {call.name: copy_of(graph, plan, call) for call in graph.calls if call.role}
        weights = self.copies.plan_step(graph, plan, self._staleness)
        self.operations = schedule(graph, plan, world_size, self.copies.aliases, weights, self._staleness)
        for operation in self.operations:
            announces = operation.kind == "announce" and len(operation.ranks) < world_size
            if not announces and operation.kind not in ("call", "transfer"):
                continue
            # NCCL connects at a group's first communication, in which all members must take part.
            if group := self.groups.get(operation.ranks, TRANSFER_LANE if operation.kind == "transfer" else ""):
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        trains = (call.name for call in graph.calls if isinstance(call.work, TrainStep))
        changing = {*stateful(graph), *(() if self._staleness else trains)}  # with it, of samples checked before
        changes = (operation.kind == "call" and operation.call in changing for operation in self.operations)
        self._first_change = next((place for place, change in enumerate(changes) if change), len(self.operations))

    def another(
        self, graph: DataflowGraph, plan: ExecutionPlan, *, collect: tuple[str, ...], progress: Callable[[str], None]
    ) -> Executor:
        """Return an executor of another graph with the weight copies of this one. Collective over the world.

        plan: needs no other copies.
        """
        shared: dict[str, Any] = {"first": self._first, "copies": self.copies, "before_changes": self._before_changes}
        return Executor(graph, plan, self._options, **shared, collect=collect, progress=progress)

    def run_step(self, given: Samples, number: int, seed: int) -> StepResult:
        """Make the samples of step `number` and train on them: `run` with staleness 0."""
        result = self.run(StepInput(given, number, seed))
        assert result is not None
        return result

    def run(self, asked: StepInput | None) -> StepResult | None:
        """Make the samples of a step, and train on those made `staleness` steps before; those are made with the weights
        from before this training. Every rank passes all samples: prompts, if the graph generates.

        asked: None at the end of a run, when all samples are made. Returns None at its beginning, when none are due.

        Raises:
            ValueError: before anything runs, for samples that the calls cannot divide, such as an empty batch; and if a
                call's outputs do not match the graph.
            RanksDisagree: on every rank, if ranks pass samples of different lengths, or different seeds.
            UserCodeFailed: what `before_changes` raised. If a step has trained meanwhile, that step is done, no samples
                are in flight, and the next call raises it.
        """
        if self._failure is not None:
            raise self._failure
        due, runners = self.in_flight, dict[int, StepRunner]()
        if due is not None:
            runners[0] = StepRunner(self, due, seed=0)
            self.timeline.step = due.number
        if asked is not None:
            runners[self._staleness] = self._begin(asked)
            self.timeline.step = due.number if due else asked.number
        self._checked = {}
        self._operate(runners)
        self._progress("end of the step")
        summaries: dict[int, Summary] = {} if due is None else {0: (runners[0].metrics, {})}
        if asked is not None:
            runner = runners[self._staleness]
            runner.finish()
            if self._failure is None:
                summaries[self._staleness] = summarize(runner.step, runner.metrics)
        self.in_flight = None
        if self._failure is not None and due is None:
            raise self._failure
        told = gather_objects(summaries)
        if asked is not None and self._failure is None:
            step = runners[self._staleness].step
            made = [summaries[self._staleness] for summaries in told]
            metrics, numbers = merge(made, step.lengths) | self._checked, numbers_of(made)
            if self.rollouts is not None:
                self.rollouts.end(step, [i for i, spare in numbers.get(SPARE, {}).items() if spare])
            if not self._staleness:
                return self._result(step, metrics, numbers)
            step.store = {key: step.store[key] for key in step.readers() if key in step.store}
            step.metrics, self.in_flight = metrics, step
        if due is None:
            return None
        return self._result(due, due.metrics | merge([summaries[0] for summaries in told], {}), {})

    def saved_in_flight(self, extra: Mapping[str, Any]) -> StepData:
        """Return samples in flight of a checkpoint, to be filled and then set as `in_flight`."""
        step = StepData(self.graph, self.plan, extra["samples"])
        step.lengths.update(extra["lengths"])
        step.number, step.metrics, step.tickets = extra["step"], dict(extra["metrics"]), extra.get("tickets")
        return step

    def _begin(self, asked: StepInput) -> StepRunner:
        rollouts = self.rollouts
        step = StepData.of(self.graph, self.plan, asked.given) if rollouts is None else rollouts.begin_step()
        step.number, step.version = asked.number, asked.number - 1 - min(self._staleness, asked.number - 1)
        if violations := batch_violations(self.graph, step.samples):
            raise ValueError("; ".join(violations))
        value = {"step": asked.number, "seed": asked.seed, "samples": step.samples, "lengths": step.lengths}
        agree(value, self._world, "number, seed and samples of a step", self.device)
        return StepRunner(self, step, asked.seed)

    def _operate(self, runners: Mapping[int, StepRunner]) -> None:
        """Run the operations that have a runner: by `Operation.ahead`."""
        for place, operation in enumerate((*self.operations, None)):
            if place == self._first_change and self._staleness in runners:
                try:
                    self._checked = self._before_changes()
                except UserCodeFailed as failed:
                    self._failure = failed
            if operation is None or (self._failure is not None and operation.kind not in ("release", "offload")):
                continue
            if operation.ahead in runners and self._rank in operation.ranks:
                self._progress(f"{operation.kind} {operation.name}")
                runners[operation.ahead].run(operation)

    def _result(
        self, step: StepData, metrics: dict[str, float], numbers: Mapping[str, Mapping[int, float]]
    ) -> StepResult:
        samples = self._collected.pop() if self._collected else None
        return StepResult(metrics, samples, self.timeline.take(), step.lengths, numbers, step.tickets)
