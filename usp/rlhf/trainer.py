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

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel import DamagedCheckpoint, ParallelMesh, ProcessGroups, complete_checkpoints, latest, verify
from usp.hf.export import save_weights
from usp.hf.lora.adapter_export import MergedWeights, save_adapter
from usp.hf.lora.adapters import Lora
from usp.hf.models import hide_progress_bars
from usp.hf.tokenizers import save_tokenizer
from usp.rlhf.data.datasets import example_indices, sequences_of
from usp.rlhf.data.samples import Samples
from usp.rlhf.data.seeds import derived_seed
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph.calls import Compute, ModelCall
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, optimizer_of
from usp.rlhf.plan.plan_text import PLAN_FILE, to_mapping
from usp.rlhf.replan.replan_options import ReplanOptions
from usp.rlhf.replan.replanning import Replanner, Replanning
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.executor import Executor, StepInput, StepResult
from usp.run.failures import CheckpointFailed, ConfigurationError, UserCodeFailed
from usp.run.launch import Launch, outlast, process_group
from usp.run.metrics import count
from usp.run.output import LineFile, warn
from usp.run.signals import StopRequest
from usp.run.watchdog import Watchdog
from usp.train.build import export_dtype
from usp.train.claim import from_first_rank, run_folder, settled, sound_start
from usp.train.learning_rate import LearningRate
from usp.train.loop import TrainingLoop
from usp.train.resume import ADAPTER, BEST, CHECKPOINTS, MODEL, Start, remember_folder

from .algorithms.algorithm import Algorithm, stateful
from .algorithms.policy import CLIPPED
from .algorithms.registry import ALGORITHMS
from .algorithms.rewards import RewardFailed, ScoreWith
from .checkpoints import RlhfState, sft_lora
from .config import REWARD_FLAGS, SEARCH_FLAGS, RlhfConfig, default_of
from .evaluation import Evaluator
from .prepare import SFT, Planner, PreparedRlhf, find_rlhf_start, prepare, unused_layout_flags
from .runtime.step_lengths import LENGTHS_FILE, StepLengths
from .sample_page import SAMPLES_FILE, sample_record
from .validate import without_evaluation

# Returns what predicts the steps of a run; raises ConfigurationError, on every rank, if they cannot be predicted.
BuildReplanner: TypeAlias = Callable[[PreparedRlhf, Launch], Replanner]

MOST = 0.5  # share of clipped rewards above which the run warns
_IN_FLIGHT = "in_flight"  # prefix of the names of samples in a checkpoint
SHOWN = 2  # samples of a step written to samples.jsonl
SHOWN_TOKENS = 512  # of their responses, with log-probabilities
_COLLECTED = ("tokens", "prompt_length", "score", "finished", "reward", "advantages", "logprobs", "old_logprobs")


def train_rlhf(
    config: RlhfConfig,
    launch: Launch,
    stop: StopRequest,
    error_file: str | None,
    algorithms: Mapping[str, Algorithm] = ALGORITHMS,
    planner: Planner | None = None,
    replanner: BuildReplanner | None = None,
) -> None:
    """Train as `config` asks and leave a model; every rank calls it. Raises as `usp.train.trainer.train`.

    replanner: what `config.replan` needs to predict steps.
    """
    hide_progress_bars()
    prepared = prepare(config, launch, algorithms=algorithms, planner=planner)
    predicts = replanner(prepared, launch) if replanner and config.replan else None
    timeout, sft_steps, resolved = config.hang_timeout, prepared.sft_steps, prepared.config
    with (
        process_group(launch, prepared.device, timeout),
        Watchdog(launch, timeout, error_file) as watchdog,
        run_folder(prepared.start.folder, f"{config.algorithm.rpartition(':')[2]}-{Path(config.model).name}") as folder,
    ):
        prepared = settled(
            prepared,
            folder,
            lambda damaged: find_rlhf_start(resolved, sft_steps, launch, damaged),
            lambda start: prepare(config, launch, start, algorithms, planner),
        )
        remember_folder(folder, launch)
        if prepared.sft_steps:
            prepared = _after_sft(prepared, launch, stop, watchdog, planner)
        trainer = RlhfTrainer(prepared, launch, stop, watchdog, predicts)
        outlast(timeout)
        trainer.run()


def _after_sft(
    prepared: PreparedRlhf, launch: Launch, stop: StopRequest, watchdog: Watchdog, planner: Planner | None
) -> PreparedRlhf:
    """Train the supervised steps, as a run in a subfolder, and prepare the run that starts from their model."""
    assert prepared.start.folder is not None
    folder = prepared.start.folder / SFT
    if not (folder / MODEL).is_dir():
        config = replace(
            prepared.config,
            algorithm="sft",
            plan="flattening",
            options="",
            rollout="",
            reward_model="",
            **{name: default_of(RlhfConfig, name) for name in (*REWARD_FLAGS, *SEARCH_FLAGS)},
            critic="",
            ref="",
            stop="",
            stop_ids="",
            models="",
            staleness=0,
            steps=prepared.sft_steps,
            learning_rate=prepared.config.sft_learning_rate,
            warmup_steps=default_of(RlhfConfig, "warmup_steps"),
            prompts=prepared.config.prompts * prepared.graph.group_size,
            output=str(folder),
            export_dtype="float32",  # the run's own start: nothing is rounded
            **without_evaluation(),
            replan="",
            eval_prompts=0 if prepared.config.eval_data else prepared.config.eval_prompts,  # still held out
            **sft_lora(prepared.config),
        )
        with run_folder(folder, SFT):  # a run of its own could be started there, too
            start = sound_start(folder, lambda d: Start(folder, latest(folder / CHECKPOINTS, d), finished_too=True))
            try:
                RlhfTrainer(prepare(config, launch, start), launch, stop, watchdog).run()
            except CheckpointFailed as error:  # the model is what is needed
                if dist.get_rank() == 0:
                    warn(str(error))
            dist.barrier()
    # Degrees that the plan does not use were for the supervised steps.
    rest = {"model": str(folder / MODEL), "sft_steps": 0, **unused_layout_flags(prepared.config)}
    config = replace(prepared.config, **rest)
    return prepare(config, launch, prepared.start, {config.algorithm: prepared.algorithm}, planner)


@dataclass(frozen=True)
class RlhfRecord:
    """The record of one step: its number, its metrics, with those of an evaluation, and its seconds without that."""

    step: int
    metrics: dict[str, float]
    seconds: float

    @property
    def printed(self) -> bool:
        return "eval/score" in self.metrics

    def numbers(self) -> dict[str, float | None]:
        return {**self.metrics, "seconds": self.seconds}

    def line(self) -> str:
        shown = {
            "score": "score",
            "reward": "reward",
            "kl": "KL",
            "actor/loss": "loss",
            "critic/loss": "critic loss",
            "reward/loss": "loss",
            "reward/accuracy": "accuracy",
            "actor/accuracy": "accuracy",
            "actor/grad_norm": "grad norm",
            "logprob_difference_max": "rollout/train logprob diff",
            "eval/score": "eval score",
            "eval/pass@1": "pass@1",
        }
        said = [f"{text} {self.metrics[name]:.4g}" for name, text in shown.items() if name in self.metrics]
        tokens = sum(value for name, value in self.metrics.items() if name == "tokens_length")
        return "  ".join([*said, f"{count(tokens)} tokens/sample", f"{self.seconds:.1f} s"])


class RlhfTrainer(TrainingLoop):
    """The models of a graph under a plan, with their data. Every rank calls every method, in the same order."""

    def __init__(
        self,
        prepared: PreparedRlhf,
        launch: Launch,
        stop: StopRequest,
        watchdog: Watchdog,
        replanner: Replanner | None = None,
        groups: ProcessGroups | None = None,
    ) -> None:
        """groups: to share with other trainers of this process."""
        if bool(prepared.config.replan) != bool(replanner):
            raise ValueError(f"replan={prepared.config.replan!r} and a replanner must be given together")
        begin = time.perf_counter()
        assert prepared.start.folder is not None
        self.prepared, self.config, self.device = prepared, prepared.config, prepared.device
        super().__init__(self.config, self.config.steps, prepared.start.folder, self.device.type, stop, watchdog)
        self.schedule = LearningRate.of(self.config, self.config.steps, self.config.warmup_steps)
        self.groups = groups or ProcessGroups()
        if self.config.lora_rank:
            self.result = ADAPTER
        keys = {*prepared.graph.given, *prepared.graph.producers}
        try:
            self.executor = Executor(
                prepared.graph,
                prepared.plan,
                self.groups,
                self._build_role,
                self.device,
                ranks_per_host=launch.local_world_size,
                folder=self.folder,
                progress=lambda doing: self.watchdog.progress(self.done + 1, doing, long=True),
                before_changes=self._check_rewards,
                collect=tuple(key for key in _COLLECTED if key in keys) if {"score", "prompt_length"} <= keys else (),
                staleness=self.config.staleness,
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self.evaluator = self._evaluator()
        self.replanning: Replanning | None = None
        if replanner is not None:
            took, steps = time.perf_counter() - begin, self.config.steps
            options = ReplanOptions.parse(self.config.replan)
            self.replanning = Replanning(options, replanner, prepared.graph, steps, took, self.folder)
        self.samples, self.lengths = LineFile(self.folder / SAMPLES_FILE), LineFile(self.folder / LENGTHS_FILE)
        self.taken = 0  # examples, with those of samples in flight
        self._number = 0  # of the step whose samples are scored, or were last
        self._failed = 0  # its samples that the reward function failed for
        self._warned: set[str] = set()
        if prepared.saved is not None:
            self._resume(prepared.saved)

    @property
    def trained(self) -> dict[str, RoleModel]:
        """The models that this rank trains, by role."""
        return {role: model for role, model in self.executor.trained.items() if isinstance(model, RoleModel)}

    def step(self, number: int) -> RlhfRecord:
        """Run step `number` (from 1): from prompts to new weights."""
        begin = time.perf_counter()
        self.watchdog.progress(number, "step", long=True)
        for model in self.trained.values():
            model.learning_rate = model.spec.learning_rate * self.schedule.at(number)
        try:
            result = self._iteration(number) if self.config.staleness else self._run_step(number)
        except UserCodeFailed as failed:
            raise UserCodeFailed(f"step {number}: {failed}; {self.keep_done()}") from failed
        self.done = number
        if result.samples is not None and (number == 1 or number % self.config.log_every == 0):
            self._keep_samples(number, result.samples)
        if self.is_writer and self.prepared.algorithm.data == "prompts":
            self.lengths.append(number, [StepLengths.of(self.prepared.graph, result.lengths).line(number)])
        if result.metrics.get(CLIPPED, 0) > MOST:
            share, option = result.metrics[CLIPPED], "--options max_reward_clip"
            self._warn_once(CLIPPED, f"step {number}: {share:.0%} of the rewards are clipped by {option}: raise it")
        seconds = time.perf_counter() - begin
        evaluated = self._evaluate(number)
        self.stopping = self._any(self.stop.requested)
        replanned = self._replan(number, result)
        return RlhfRecord(number, {**result.metrics, **evaluated, **replanned}, seconds)

    def _run_step(self, number: int) -> StepResult:
        asked = self._asked(number)
        result = self.executor.run_step(asked.given, number, asked.seed)
        self._made(result.metrics)
        return result

    def _iteration(self, number: int) -> StepResult:
        """Train step `number`, and meanwhile make the samples of the next one."""
        if self.executor.in_flight is None:
            self.executor.roll_out(self._asked(number))
            self._roll_out_done()
        result = self.executor.train(self._asked(number + 1) if number < self.config.steps else None)
        self._roll_out_done()
        self._number = number
        return result

    def _roll_out_done(self) -> None:
        if self.executor.in_flight is not None:  # as after every roll-out that did not fail, but the last
            self._made(self.executor.in_flight.metrics)

    def _asked(self, number: int) -> StepInput:
        """Return the input of the step that draws the next examples."""
        self._number = number
        drawn = example_indices(self.taken, self.prepared.drawn, len(self.prepared.examples), self.config.seed)
        return StepInput(self._given(drawn), number, derived_seed(self.config.seed, number))

    def _made(self, metrics: dict[str, float]) -> None:
        """Count the examples of samples that have just been made."""
        self.taken += self.prepared.drawn
        if self._scorers:
            metrics["reward_failures"] = self._failed

    def _evaluate(self, number: int) -> dict[str, float]:
        """Return the metrics of an evaluation, if one follows this step."""
        if self.evaluator is None or not self.evaluator.due(number):
            return {}
        try:
            metrics, samples = self.evaluator.run(number)
        except UserCodeFailed as failed:
            raise UserCodeFailed(f"evaluation after step {number}: {failed}; {self.keep_done()}") from failed
        if samples is not None:
            self._keep_samples(number, samples, evaluation=True)
        return metrics

    def _evaluator(self) -> Evaluator | None:
        prepared = self.prepared
        if not prepared.held_out:
            return None
        return Evaluator(
            self.config,
            self.executor,
            prepared.graph,
            prepared.plan,
            prepared.held_out,
            progress=lambda doing: self.watchdog.progress(self.done, f"evaluation: {doing}", long=True),
        )

    def _replan(self, number: int, result: StepResult) -> dict[str, float]:
        """Return the figures of a decision, if one follows this step, after which another plan may run."""
        if self.replanning is None:
            return {}
        self.replanning.add(number, result)
        if self.stopping or not self.replanning.due(number):
            return {}
        self.watchdog.progress(number, "searching a plan", long=True)
        decision = self.replanning.decide(self.prepared.plan)
        if not decision.switches:
            return decision.metrics()
        begin = time.perf_counter()
        self.watchdog.progress(number, "changing the plan", long=True)
        self._change_plan(decision.best)
        seconds = time.perf_counter() - begin
        self.replanning.changed(decision, seconds)
        return {**decision.metrics(), "replan/seconds": seconds}

    def _change_plan(self, plan: ExecutionPlan) -> None:
        """Run the steps that follow under another plan."""
        self.prepared = replace(self.prepared, plan=plan)
        past = self.evaluator.past if self.evaluator else None
        self.executor.change_plan(plan)
        self.evaluator = self._evaluator()
        if self.evaluator and past:
            self.evaluator.past = past
        if self.is_writer:
            self.write_files()

    def _check_rewards(self) -> None:
        """Keep the samples that the reward function failed for; raise UserCodeFailed on every rank if it must not."""
        if not self._scorers:
            return
        number, file = self._number, self.folder / "bad-samples.jsonl"
        records = [record for scorer in self._scorers for record in scorer.take_failures()]
        self._keep_bad(number, file, records)
        count = torch.tensor(len(records), device=self.device)
        dist.all_reduce(count)
        self._failed = int(count)
        if not self._failed:
            return
        messages = [str(RewardFailed(records[0])) if records else ""] * dist.get_world_size()
        dist.all_gather_object(messages, messages[0])
        first = next(filter(None, messages))
        where = f"the sample is in {file}" if self._failed == 1 else f"{self._failed} samples are in {file}"
        if self.config.reward_failure == "stop":
            raise UserCodeFailed(f"{first}; {where}")
        self._warn_once("failures", f"step {number}: {first}; --reward-failure {self.config.reward_failure}; {where}")

    @cached_property
    def _scorers(self) -> list[ScoreWith]:
        works = (call.work for call in self.prepared.graph.calls)
        return [work.function for work in works if isinstance(work, Compute) and isinstance(work.function, ScoreWith)]

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warn(message)
        self._warned.add(about)

    def _given(self, indices: Sequence[int]) -> Samples:
        """Return the input samples of the graph, the same on every rank."""
        examples = [self.prepared.examples[index] for index in indices]
        given = self.prepared.graph.given
        if "prompt_ids" in given:
            values: dict[str, list[Tensor]] = {"prompt_ids": [torch.from_numpy(e.prompt) for e in examples]}
            if "prompt_index" in given:
                values["prompt_index"] = [torch.tensor(index) for index in indices]
        else:
            pairs = self.prepared.algorithm.data == "pairs"
            whole = [one for e in examples for one in sequences_of(e, self.prepared.tokenizer, pairs)]
            values = {
                "tokens": [torch.from_numpy(ids) for ids, _ in whole],
                "mask": [torch.from_numpy(np.append(targets[1:], False)).float() for _, targets in whole],
            }
        ids = tuple(range(len(next(iter(values.values())))))
        return Samples(ids, {key: values[key] for key in given})

    def _build_role(self, call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> RoleModel:
        def generator(model: RoleModel) -> Generator:
            stage, slots = model.stage, self.config.slots
            first, last, transform = stage.first, stage.last, stage.transform
            decode = self.prepared.tokenizer.decode
            return Generator(stage.model, mesh, first=first, last=last, slots=slots, transform=transform, decode=decode)

        spec, trained = self.prepared.roles[call.role], call.kind == "train_step"
        offloads = optimizer_of(call.role) in self.prepared.plan.offload
        return RoleModel(
            spec, layout, mesh, trained=trained, make_generator=generator, offload_optimizer=trained and offloads
        )

    def _any(self, asked: bool) -> bool:
        flag = torch.tensor(int(asked), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def state(self) -> dict[str, Tensor]:
        trained, in_flight = self.trained.items(), self.executor.in_flight
        state = {f"{role}.{name}": tensor for role, model in trained for name, tensor in model.state().items()}
        if in_flight is not None:
            state |= {f"{_IN_FLIGHT}.{key}": joined for key, joined in in_flight.whole(self.device).items()}
        return state

    def _save(self) -> None:
        super()._save()  # which returns when it has copied the state
        for model in self.trained.values():
            model.offload_optimizer()

    def extra(self) -> dict[str, Any]:
        evaluations = self.evaluator.past.to_extra() if self.evaluator else {}
        in_flight = self.executor.in_flight.to_extra() if self.executor.in_flight else {}
        config, functions = asdict(self.config), self.executor.function_states()
        running = (
            {"plan": to_mapping(self.prepared.plan), "world_size": dist.get_world_size()} if self.replanning else {}
        )
        return RlhfState(self.done, self.taken, functions, config, evaluations, in_flight, running).to_extra()

    def _resume(self, saved: RlhfState) -> None:
        assert self.prepared.start.checkpoint is not None
        if saved.in_flight:
            samples = self.executor.saved_in_flight(saved.in_flight)
            values = {f"{_IN_FLIGHT}.{key}": joined for key, joined in samples.values.items()}
            self._restore(self.prepared.start.checkpoint, values)
            self.executor.in_flight = samples.restored()
        else:
            self._restore(self.prepared.start.checkpoint)
        for name, function in stateful(self.prepared.graph).items():
            function.load_state_dict(saved.functions[name])
        self.done, self.taken = saved.step, saved.examples
        if self.evaluator is not None:
            self.evaluator.past.restore(saved.evaluations)

    def _restore(self, checkpoint: Path, more: Mapping[str, Tensor] | None = None) -> None:
        """Restore the weights, optimizer states and `more` tensors of a checkpoint that has been verified."""
        state = self.load(checkpoint, more)
        for role, model in self.trained.items():
            prefix = f"{role}."
            model.restore({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})

    def best_first(self) -> Sequence[int]:
        return self.evaluator.past.best_first() if self.evaluator and self.config.keep_best else ()

    def export(self) -> None:
        """Write every trained model; they are complete when any rank returns."""
        roles = self.prepared.graph.trained_roles
        for role in roles:
            name = MODEL if len(roles) == 1 or role == "actor" else role
            self._export_role(role, name, ADAPTER)
        dist.barrier()

    def export_best(self) -> None:
        """Write the actor of the best evaluation, from its checkpoint if it is not the last step."""
        kept = from_first_rank(lambda: complete_checkpoints(self.folder / CHECKPOINTS)) if self.best_first() else {}
        best = next((step for step in self.best_first() if step in kept or step == self.done), None)
        if best is None:
            return
        if best != self.done:
            try:
                verify(kept[best])
            except DamagedCheckpoint as error:
                self._warn(f"{error}; {self.folder / BEST} is not written")
                return
            self._restore(kept[best])
        self._export_role("actor", f"{BEST}-{MODEL}" if self.config.lora_rank else BEST, BEST)
        dist.barrier()
        if self.is_writer:
            assert self.evaluator is not None
            score = self.evaluator.past.values[best]
            print(f"best: {self.folder / BEST}, of step {best}, eval score {score:.4g}", flush=True)

    def _export_role(self, role: str, name: str, adapter: str) -> None:
        """Write a trained model to folder `name`, or with LoRA its adapters to folder `adapter`; merged to `name`."""
        call = self.prepared.graph.train_call(role)
        assert call is not None
        group = self.groups.get(self.prepared.plan[call.name].ranks)
        if group is None:
            return
        model = self.trained[role]
        if model.spec.lora is None:
            self._export_model(model, model.weights(), name, group)
        else:
            self._export_adapter(model, model.spec.lora, adapter, group)
            if self.config.lora_merge:
                self._export_model(model, MergedWeights([model.stage.model], model.spec.lora), name, group)

    def _export_adapter(self, model: RoleModel, lora: Lora, name: str, group: dist.ProcessGroup) -> None:
        base, dtype = Path(model.spec.source).expanduser().resolve(), export_dtype(self.config, torch.float32)
        save_adapter(model.weights(), self.folder / name, lora=lora, base=base, dtype=dtype, group=group)
        self._say_exported(model, name, group)

    def _export_model(
        self, model: RoleModel, weights: Mapping[str, Tensor], name: str, group: dist.ProcessGroup
    ) -> None:
        inner = model.stage.model
        save_weights(
            weights,
            self.folder / name,
            config=inner.config,
            generation_config=inner.generation_config if model.spec.role == "actor" else None,
            dtype=export_dtype(self.config, model.spec.dtype),
            group=group,
        )
        self._say_exported(model, name, group)

    def _say_exported(self, model: RoleModel, name: str, group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == 0:
            save_tokenizer(self.prepared.tokenizer, self.folder / name)
            print(f"{model.spec.role}: {self.folder / name}", flush=True)

    def logs(self) -> Iterator[LineFile]:
        yield self.samples
        yield self.lengths
        if self.executor.timeline.file is not None:
            yield self.executor.timeline.file
        if self.replanning is not None:
            yield self.replanning.file

    def files(self) -> Mapping[str, Mapping[str, Any]]:
        return {**super().files(), PLAN_FILE: to_mapping(self.prepared.plan)}

    def summary(self) -> Iterator[str]:
        plan = self.prepared.plan
        models = ", ".join(f"{role} {spec.source}" for role, spec in self.prepared.roles.items())
        dtype = str(self.prepared.roles[self.prepared.graph.trained_roles[0]].dtype).removeprefix("torch.")
        yield f"algorithm: {self.config.algorithm}, models: {models}, {dtype} on {self.device.type}"
        yield (
            "learning rate: "
            + ", ".join(
                f"{role} {self.prepared.roles[role].learning_rate:g}" for role in self.prepared.graph.trained_roles
            )
            + f", {self.schedule}"
        )
        actor = self.prepared.roles.get("actor")
        if actor is not None and actor.lora is not None:
            lora = actor.lora
            yield f"LoRA: rank {lora.rank}, alpha {lora.alpha}, on {', '.join(lora.targets)}"
        if dropped := self.prepared.examples.dropped:
            kept = len(self.prepared.examples)
            yield f"data: {kept} of {kept + dropped} lines; {dropped} are too long for the context and dropped"
        if self.evaluator is not None:
            yield f"evaluation: {len(self.prepared.held_out)} prompts every {self.config.eval_every} steps"
        ahead = ", samples are made one step ahead" if self.config.staleness else ""
        yield f"ranks: {dist.get_world_size()}, plan {plan.name}{ahead}"
        yield from (f"  {name}: {layout}" for name, layout in plan.calls.items())
        yield self.prepared.kernel_choice
        if self.prepared.saved is not None:
            yield f"resumed from: {self.prepared.start.checkpoint}"

    def _keep_samples(self, number: int, samples: Samples, evaluation: bool = False) -> None:
        decode = self.prepared.tokenizer.decode
        lines = []
        for sample in samples.ids[:SHOWN]:
            of_sample = {key: values[0] for key, values in samples.of([sample]).values.items()}
            record = {"step": number, "evaluation": evaluation, **sample_record(of_sample, decode, SHOWN_TOKENS)}
            lines.append(json.dumps(record, ensure_ascii=False))
        self.samples.append(number, lines)

    def _keep_bad(self, number: int, path: Path, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the samples that the reward function failed for, from the rank that called it."""
        if records:
            with path.open("a") as file:
                file.writelines(json.dumps({"step": number, **one}, ensure_ascii=False) + "\n" for one in records)
