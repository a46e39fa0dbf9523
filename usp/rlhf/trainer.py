"""One RLHF run, from a configuration to a trained model.

    prepare -> process group -> claim the folder -> supervised steps for random weights -> executor -> steps,
    checkpoints -> model

RUN/                          the output of a run
    run.lock                  locked by the run that writes here
    config.yaml, plan.yaml    the resolved configuration, and the layout of every call; rlhf.py takes both
    metrics.jsonl             every step
    tensorboard/              the same
    samples.jsonl             some prompts with their responses and scores: python -m usp rlhf-samples RUN
    bad-samples.jsonl         samples that the reward function failed for
    replan.jsonl              with --replan: every decision; plan.yaml is the plan that runs
    timeline/                 every operation of every rank: python -m usp rlhf-trace RUN; the lengths of each step's
                              samples: python -m usp rlhf-plan --workload RUN
    checkpoints/step-N/       trained weights, optimizers, data position: --resume continues from the newest
    model/, critic/           the trained weights, for transformers' from_pretrained; with LoRA model/ only for
                              --lora-merge
    adapter/                  the trained adapters, for peft's from_pretrained
    best/                     with --keep-best: the weights with the highest score in an evaluation
    sft/                      the run of the supervised steps
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp.hf.models import hide_progress_bars
from usp.parallel import ParallelMesh, ProcessGroups
from usp.rlhf.generation.graphs import decoding_notes
from usp.rlhf.generation.vllm import ServedEngine, VllmEngine, most_drift
from usp.rlhf.plan.plan import OWN, PLAN_FILE, CallLayout, optimizer_of, to_mapping
from usp.rlhf.roles.engine_model import EngineModel
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor, StepInput, StepResult
from usp.rlhf.runtime.measure import STALEST
from usp.rlhf.runtime.rollouts import RolloutOptions, Rollouts
from usp.rlhf.runtime.transfer import StepData
from usp.run.failures import CheckpointFailed, ConfigurationError, TrainingDiverged, UserCodeFailed
from usp.run.launch import Launch, StopRequest, all_ready, outlast, process_group
from usp.run.metrics import RunLog
from usp.run.output import LineFile, warn, working
from usp.run.watchdog import Watchdog
from usp.train.checkpoints import ADAPTER, BEST, MODEL, Start, newest_checkpoint, run_folder, settled, sound_start
from usp.train.loop import TrainingLoop
from usp.train.step import Evaluations, LearningRate
from usp.train.summary import next_steps

from .algorithms.algorithm import stateful
from .algorithms.policy import CLIPPED
from .checkpoints import RlhfState
from .config import ReplanOptions, RlhfConfig, unused_layout_flags
from .datasets import example_indices, given_samples
from .evaluation import COLLECTED, Evaluator
from .graph import ModelCall, TrainStep
from .prepare import SFT, Planner, PreparedRlhf, engine_calls, engine_options, find_rlhf_start, prepare, sft_config
from .records import SHOWN, RlhfRecord, SampleFiles
from .replanning import DECISIONS_FILE, FIGURES, Replanner, Replanning
from .samples import Samples, derived_seed

MOST = 0.5  # share of clipped rewards above which the run warns
_COLLECTED = (*COLLECTED, "reward", "advantages", "old_logprobs")


def train_rlhf(
    config: RlhfConfig,
    launch: Launch,
    stop: StopRequest,
    error_file: str | None,
    planner: Planner | None = None,
    replanner: Callable[[PreparedRlhf], Replanner] | None = None,
) -> None:
    """Train as `config` asks and leave a model; every rank calls it. Raises as `usp.train.trainer.train`.

    replanner: returns what `config.replan` needs to predict steps, or raises ConfigurationError.
    """
    hide_progress_bars()
    prepared = prepare(config, launch, planner=planner)
    predicts = replanner(prepared) if replanner and config.replan else None
    timeout, sft_steps, resolved = config.hang_timeout, prepared.sft_steps, prepared.config
    all_ready(launch, timeout)
    with (
        Watchdog(launch, timeout, error_file) as watchdog,
        process_group(launch, prepared.device, timeout),
        run_folder(prepared.start.folder, f"{config.algorithm.rpartition(':')[2]}-{Path(config.model).name}") as folder,
    ):
        prepared = settled(
            prepared,
            folder,
            lambda damaged: find_rlhf_start(resolved, sft_steps, launch, damaged),
            lambda start: prepare(config, launch, start, planner),
        )
        if prepared.sft_steps:
            prepared = _after_sft(prepared, launch, stop, watchdog, planner)
        with working("building the models, and reading their weights", shown=launch.rank == 0):
            trainer = RlhfTrainer(prepared, launch, stop, watchdog, predicts)
        outlast(timeout)
        trainer.run()
        if trainer.is_writer and trainer.done:
            kind = "CausalLM" if "actor" in prepared.graph.trained_roles else "SequenceClassification"
            lines = next_steps("rlhf", prepared.config, folder, launch, prepared.tokenizer, trainer.done, kind)
            print("\n".join(lines), flush=True)


def _after_sft(
    prepared: PreparedRlhf, launch: Launch, stop: StopRequest, watchdog: Watchdog, planner: Planner | None
) -> PreparedRlhf:
    """Train the supervised steps, as a run in a subfolder, and prepare the run that starts from their model."""
    assert prepared.start.folder is not None
    folder = prepared.start.folder / SFT
    if not (folder / MODEL).is_dir():
        with run_folder(folder, SFT):  # a run of its own could be started there, too
            start = sound_start(folder, lambda d: Start(folder, newest_checkpoint(folder, d), finished_too=True))
            try:
                RlhfTrainer(prepare(sft_config(prepared, folder), launch, start), launch, stop, watchdog).run()
            except CheckpointFailed as error:  # the model is what is needed
                if dist.get_rank() == 0:
                    warn(str(error))
            dist.barrier()
    # Degrees that the plan does not use were for the supervised steps.
    unused = ("sft_learning_rate", *unused_layout_flags(prepared.config.plan))
    rest: dict[str, Any] = {name: getattr(RlhfConfig, name) for name in unused}
    rest |= {"model": str(folder / MODEL), "sft_steps": 0}
    config = replace(prepared.config, **rest)
    return prepare(config, launch, prepared.start, planner)


class RlhfTrainer(TrainingLoop):
    """The models of a graph under a plan, with their data. Every rank calls every method, in the same order."""

    def __init__(
        self,
        prepared: PreparedRlhf,
        launch: Launch,
        stop: StopRequest,
        watchdog: Watchdog,
        replanner: Replanner | None = None,
    ) -> None:
        begin = time.perf_counter()
        assert prepared.start.folder is not None
        self.prepared, self.config, self.device = prepared, prepared.config, prepared.device
        super().__init__(self.config, self.config.steps, prepared.start.folder, self.device.type, stop, watchdog)
        self.schedule = LearningRate.of(self.config, self.config.steps, self.config.warmup_steps)
        self.groups = ProcessGroups()
        if self.config.lora_rank:
            self.result = ADAPTER
        self._warned: set[str] = set()
        given = (self.folder, prepared.graph, prepared.tokenizer, self.device, self.config.reward_failure)
        self.samples = SampleFiles(*given, self._warn_once)
        keys, config = {*prepared.graph.given, *prepared.graph.producers}, self.config
        ahead = config.staleness if config.partial_rollouts else 0
        rollouts = RolloutOptions(prepared.drawn, config.begun, ahead, config.steps, self._draw, config.seed)
        try:
            self._engine = self._start_engine()
            self.executor = Executor(
                prepared.graph,
                prepared.plan,
                CopyOptions(
                    self.groups, self._build_role, self.device, launch.local_world_size, self.config.delta_updates
                ),
                folder=self.folder,
                progress=lambda doing: self.watchdog.progress(self.done + 1, doing, long=True),
                before_changes=self.samples.check_rewards,
                collect=tuple(key for key in _COLLECTED if key in keys) if {"score", "prompt_length"} <= keys else (),
                first=SHOWN,
                rollouts=rollouts if config.begins_ahead else None,
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self.evaluator: Evaluator | None = None
        if prepared.held_out:
            self.evaluator = Evaluator(
                self.config,
                self.executor,
                prepared.graph,
                prepared.plan,
                prepared.held_out,
                progress=lambda doing: self.watchdog.progress(self.done, f"evaluation: {doing}", long=True),
            )
        self.replanning: Replanning | None = None
        if replanner is not None:
            options, took = ReplanOptions.parse(self.config.replan), time.perf_counter() - begin
            file = LineFile(self.folder / DECISIONS_FILE)
            self.replanning = Replanning(options, replanner, prepared.graph, self.config.steps, took, file)
        self.taken = 0  # examples, with those of samples in flight
        if prepared.saved is not None:
            self._resume(prepared.saved)

    @property
    def trained(self) -> dict[str, RoleModel]:
        """The models that this rank trains, by role."""
        return self.executor.copies.trained

    @property
    def _updated(self) -> list[RoleModel]:
        """This rank's models whose weights change without being trained."""
        return self.executor.copies.of_role("ref") if self.config.ref_update_every else []

    @property
    def _ahead(self) -> dict[str, StepData | Rollouts]:
        """What is made of later steps, by its name in checkpoints."""
        in_flight = next(iter(self.executor.in_flight), None)  # of a depth of at most 1
        made = {"in_flight": in_flight, "rollouts": self.executor.rollouts}
        return {name: samples for name, samples in made.items() if samples is not None}

    def step(self, number: int) -> RlhfRecord:
        """Run step `number` (from 1): from prompts to new weights."""
        begin = time.perf_counter()
        self.watchdog.progress(number, "step", long=True)
        for model in self.trained.values():
            model.learning_rate = model.spec.learning_rate * self.schedule.at(number)
        if (supervised := self.prepared.supervised) is not None and (policy := self.trained.get("actor")):
            call = self.prepared.graph.train_call("actor")
            assert call is not None and isinstance(call.work, TrainStep)
            part, parts = policy.mesh.rank("batch"), policy.mesh.size("batch")
            policy.supervised = supervised.of_step(number, call.work.mini_batches, part, parts), supervised.weight
        try:
            result = self._run()
        except UserCodeFailed as failed:
            raise UserCodeFailed(f"step {number}: {failed}; {self.keep_done()}") from failed
        self._check_drift(number, result.metrics)
        if self.config.ref_update_every and number % self.config.ref_update_every == 0:
            self.watchdog.progress(number, "updating the reference", long=True)
            self.executor.follow("ref", "actor", self.config.ref_update_weight)
        self.done = number
        if result.samples is not None and (number == 1 or number % self.config.log_every == 0):
            self.samples.keep(number, result.samples)
        if self.is_writer and self.prepared.algorithm.data == "prompts":
            self.samples.keep_lengths(number, result.lengths, result.tickets)
        if (share := result.metrics.get(CLIPPED, 0)) > MOST:
            message = f"{share:.0%} of the rewards are clipped by --options max_reward_clip: raise it"
            self._warn_once(CLIPPED, f"step {number}: {message}")
        seconds = time.perf_counter() - begin
        evaluated = self._evaluate(number)
        stopping = torch.tensor(int(self.stop.signal_number), device=self.device)
        dist.all_reduce(stopping, dist.ReduceOp.MAX)
        self.stopping = bool(stopping)
        replanned = self._replan(number, result)
        return RlhfRecord(number, {**result.metrics, **evaluated, **replanned}, seconds)

    def _check_drift(self, number: int, metrics: Mapping[str, float]) -> None:
        """Raise TrainingDiverged if an engine gives its tokens other log-probabilities than the weights that it was
        sent, where no optimizer step lies between both."""
        run, drift = self.prepared, metrics.get("logprob_difference_mean", 0.0)
        call, calls = run.graph.train_call("actor"), engine_calls(run)
        if not calls or call is None or not isinstance(call.work, TrainStep):
            return
        same = "old_logprobs" in run.graph.producers or call.work.mini_batches * call.work.epochs == 1
        stale = metrics.get(STALEST, min(run.graph.depth, number - 1))
        dtype = run.roles[call.role].dtype
        if same and not stale and not drift <= (most := most_drift(dtype, self.config.temperature)):
            engine, told = run.plan[calls[0].name].engine, f"{dtype}".removeprefix("torch.")
            raise TrainingDiverged(
                f"step {number}: the log-probabilities of engine {engine} differ from those in training by {drift:.3g} "
                f"in the mean of its tokens, and rounding in {told} explains at most {most:.3g}: what it computes is "
                f"not the policy; the step is not saved"
            )

    def _run(self) -> StepResult:
        """Run the executor until a step has trained; meanwhile it makes the samples of later steps."""
        result = None
        while result is None:
            new = self._next_input()
            result = self.executor.run(new)
            if self.executor.rollouts is not None:
                self.taken = self.executor.rollouts.queue.drawn
            elif new is not None and self.executor.failure is None:
                self.taken += self.prepared.drawn
        return result

    def _next_input(self) -> StepInput | None:
        """Draw the samples of the step after those that are in flight; None after the last one."""
        number = self.done + len(self.executor.in_flight) + 1
        if number > self.config.steps:
            return None
        drawn = () if self.executor.rollouts else range(self.taken, self.taken + self.prepared.drawn)
        return StepInput(self._draw(drawn), number, derived_seed(self.config.seed, number))

    def _draw(self, tickets: Sequence[int]) -> Samples:
        """Return the given samples of the examples at some positions of the stream."""
        prepared, begin = self.prepared, min(tickets, default=0)
        count = max(tickets, default=begin - 1) + 1 - begin
        stream = example_indices(begin, count, len(prepared.examples), self.config.seed)
        indices = [stream[ticket - begin] for ticket in tickets]
        examples, pairs = [prepared.examples[index] for index in indices], prepared.algorithm.data == "pairs"
        return given_samples(examples, indices, prepared.graph.given, prepared.tokenizer, pairs)

    def _train(self, log: RunLog | None) -> None:
        """Evaluate benchmarks before the first step, and train."""
        begin = time.perf_counter()
        if not self.done and (evaluated := self._evaluate(0)) and log is not None:
            log.record(RlhfRecord(0, evaluated, time.perf_counter() - begin))
        super()._train(log)

    def _evaluate(self, number: int) -> dict[str, float]:
        """Return the metrics of an evaluation, if one follows this step."""
        if self.evaluator is None or not self.evaluator.due(number):
            return {}
        try:
            metrics, samples = self.evaluator.run(number)
        except UserCodeFailed as failed:
            raise UserCodeFailed(f"evaluation after step {number}: {failed}; {self.keep_done()}") from failed
        if samples is not None:
            self.samples.keep(number, samples, evaluation=True)
        return metrics

    def _replan(self, number: int, result: StepResult) -> dict[str, float]:
        """Return the figures of a decision, if one follows this step, after which another plan may run."""
        if self.replanning is None:
            return {}
        self.replanning.add(number, result)
        if self.stopping or not self.replanning.due(number):
            return {}
        self.watchdog.progress(number, "searching a plan", long=True)
        decision = self.replanning.decide(self.prepared.plan)
        if decision.verdict:
            return decision.figures(FIGURES)
        begin = time.perf_counter()
        self.watchdog.progress(number, "changing the plan", long=True)
        self.prepared = replace(self.prepared, plan=decision.best)
        self.executor.change_plan(decision.best)
        if self.evaluator:
            self.evaluator.change_plan(decision.best)
        if self.is_writer:
            self.write_files()
        seconds = time.perf_counter() - begin
        self.replanning.changed(decision, seconds)
        return {**decision.figures(FIGURES), "replan/seconds": seconds}

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warn(message)
        self._warned.add(about)

    def _build_role(self, call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> RoleModel:
        trained = call.kind == "train_step"
        if layout.engine != OWN:
            assert self._engine is not None
            return EngineModel(self.prepared.roles[call.role], layout, mesh, self._engine)
        return RoleModel(
            self.prepared.roles[call.role],
            layout,
            mesh,
            trained=trained,
            slots=self.config.slots,
            cache_tokens=self.config.cache_tokens,
            decode=self.prepared.tokenizer.decode,
            eager=self.config.eager_decoding,
            offload_optimizer=trained and optimizer_of(call.role) in self.prepared.plan.offload,
        )

    def _start_engine(self) -> VllmEngine | None:
        """Start vLLM where calls decode with it, asleep. Collective over the world. Raises as `VllmEngine.start`."""
        run = self.prepared
        calls = engine_calls(run)
        if not calls:
            return None
        layout, spec, options = run.plan[calls[0].name], run.roles[calls[0].role], engine_options(run)
        mesh = ParallelMesh.create(layout.dims, self.device.type, layout.ranks, self.groups)
        decode, naming = run.tokenizer.decode, self.watchdog.naming
        if layout.served:
            return ServedEngine(spec.config, layout.engine, options, mesh, decode, naming) if mesh.member else None
        engine = VllmEngine.start(spec.config, options, mesh, decode, naming)
        if engine is not None:
            engine.sleep()
        return engine

    def state(self) -> dict[str, Tensor]:
        trained = self.trained.items()
        state = {f"{role}.{name}": tensor for role, model in trained for name, tensor in model.state().items()}
        for model in self._updated:
            model.load()
            state |= {f"ref.{name}": weight for name, weight in model.weights().items()}
        for name, samples in self._ahead.items():
            state |= {f"{name}.{key}": joined for key, joined in samples.whole(self.device).items()}
        return state

    def _save(self) -> None:
        super()._save()  # which returns when it has copied the state
        self._offload_again()

    def _offload_again(self) -> None:
        """Move back to the host what `state` has loaded."""
        for model in self.trained.values():
            model.offload_optimizer()
        for reference in self._updated if "ref" in self.prepared.plan.offload else ():
            reference.offload()

    def extra(self) -> dict[str, Any]:
        evaluations = self.evaluator.past.to_extra() if self.evaluator else {}
        config, functions = asdict(self.config), self.executor.function_states()
        running: dict[str, Any] = {"plan": to_mapping(self.prepared.plan), "world_size": dist.get_world_size()}
        running |= {"factors": self.replanning.factors} if self.replanning else {}
        ahead = {name: samples.to_extra() for name, samples in self._ahead.items()}
        return asdict(RlhfState(self.done, self.taken, functions, config, evaluations, running=running, **ahead))

    def _resume(self, saved: RlhfState) -> None:
        assert self.prepared.start.checkpoint is not None
        ahead: dict[str, StepData | Rollouts] = {}
        in_flight = [self.executor.saved_in_flight(saved.in_flight)] if saved.in_flight else []
        if in_flight:
            ahead["in_flight"] = in_flight[0]
        if saved.rollouts and self.executor.rollouts is not None:
            self.executor.rollouts.read_extra(saved.rollouts)
            ahead["rollouts"] = self.executor.rollouts
        values = {name: samples.blank(self.device) for name, samples in ahead.items()}
        more = {f"{name}.{key}": blank for name, of in values.items() for key, blank in of.items()}
        self.restore(self.prepared.start.checkpoint, more)
        for name, samples in ahead.items():
            samples.fill(values[name])
        self.executor.in_flight = in_flight  # only now: `restore` asks for the state, and these had no values yet
        for name, function in stateful(self.prepared.graph).items():
            function.load_state_dict(saved.functions[name])
        self.done, self.taken = saved.step, saved.examples
        if self.replanning is not None and saved.config.get("hardware") == self.config.hardware:
            self.replanning.factors = saved.running.get("factors", {})
        if self.evaluator is not None:
            self.evaluator.past.restore(saved.evaluations)

    def restore(self, checkpoint: Path, more: Mapping[str, Tensor] | None = None) -> None:
        self.load(checkpoint, more)
        for model in self.trained.values():
            model.restore()
        self._offload_again()

    def evaluations(self) -> Evaluations | None:
        return self.evaluator.past if self.evaluator and self.config.keep_best else None

    def export(self) -> None:
        """Write every trained model; they are complete when any rank returns."""
        roles = self.prepared.graph.trained_roles if self.done else ()
        names = {role: MODEL if len(roles) == 1 or role == "actor" else role for role in roles}
        for role, name in names.items():
            self._export(role, name, ADAPTER)
        dist.barrier()
        for role, name in names.items() if self.is_writer else ():
            merged = [name] if self.config.lora_merge else []
            written = [name] if self.prepared.roles[role].lora is None else [ADAPTER, *merged]
            print("\n".join(f"{role}: {self.folder / folder}" for folder in written), flush=True)

    def write_best(self) -> None:
        self._export("actor", f"{BEST}-{MODEL}" if self.config.lora_rank else BEST, BEST)
        dist.barrier()

    def _export(self, role: str, name: str, adapter: str) -> None:
        """Write a trained model to folder `name`, or with LoRA its adapters to folder `adapter`; merged to `name`."""
        call = self.prepared.graph.train_call(role)
        assert call is not None
        group = self.groups.get(self.prepared.plan[call.name].ranks)
        if group is None:
            return
        model = self.trained[role]
        spec, has_adapters = model.spec, model.spec.lora is not None
        self.write_model(
            model.weights(),
            [model.stage.model],
            self.prepared.tokenizer,
            spec.dtype,
            result=adapter if has_adapters else name,
            merged=name if self.config.lora_merge else "",
            lora=spec.lora,
            base=spec.source,
            generates=role == "actor",
            group=group,
        )

    def logs(self) -> Iterator[LineFile]:
        others = self.executor.timeline.file, self.replanning.file if self.replanning else None
        yield from (*self.samples.files, *(file for file in others if file))

    def files(self) -> Mapping[str, Mapping[str, Any]]:
        return {**super().files(), PLAN_FILE: to_mapping(self.prepared.plan)}

    def summary(self) -> Iterator[str]:
        plan, roles, trained = self.prepared.plan, self.prepared.roles, self.prepared.graph.trained_roles
        models = ", ".join(f"{role} {spec.source}" for role, spec in roles.items())
        dtype = str(roles[trained[0]].dtype).removeprefix("torch.")
        yield f"algorithm: {self.config.algorithm}, models: {models}, {dtype} on {self.device.type}"
        rates = [f"{role} {roles[role].learning_rate:g}" for role in trained]
        yield f"learning rate: {', '.join(rates)}, {self.schedule}"
        if "actor" in roles and (lora := roles["actor"].lora) is not None:
            yield f"LoRA: rank {lora.rank}, alpha {lora.alpha}, on {', '.join(lora.targets)}"
        yield from self.prepared.data_notes
        if self.evaluator is not None:
            yield f"evaluation: {len(self.prepared.held_out)} prompts every {self.config.eval_every} steps"
        if dist.get_world_size() > 1:
            ahead = ", samples are made one step ahead" if self.config.staleness else ""
            ahead += f", begun up to {self.config.staleness}" if self.config.partial_rollouts else ""
            yield f"ranks: {dist.get_world_size()}, plan {plan.name}{ahead}"
            yield from (f"  {name}: {layout}" for name, layout in plan.calls.items())
        yield self.prepared.kernel_choice
        if self.device.type == "cuda":
            configs = {role: spec.config for role, spec in roles.items()}
            yield from decoding_notes(self.prepared.graph, plan, configs, self.config.eager_decoding)
        if self.prepared.saved is not None:
            yield f"resumed from: {self.prepared.start.checkpoint}"
