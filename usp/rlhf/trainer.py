"""One RLHF run, from a configuration to a trained model.

    prepare -> process group -> supervised steps, where weights are random -> executor -> steps, checkpoints -> model

RUN/                          what a run leaves
    config.yaml, plan.yaml    the resolved configuration, and the layout of every call; rlhf.py takes both
    metrics.jsonl             every step
    tensorboard/              the same
    samples.jsonl             some prompts with their responses and scores
    bad-samples.jsonl         what a reward function could not score
    timeline/                 every operation on every rank: python -m usp rlhf-trace RUN
    checkpoints/step-N/       trained weights, optimisers, places in the data: --resume continues from the newest
    model/, critic/           the trained weights, for transformers' from_pretrained
    sft/                      the run of the supervised steps
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from parallel import Checkpointer, ParallelMesh, ProcessGroups, latest
from usp.config import config_to_mapping
from usp.hf.export import save_weights
from usp.hf.models import hide_progress_bars
from usp.hf.tokenizers import save_tokenizer
from usp.rlhf.data.datasets import Example, example_indices
from usp.rlhf.data.samples import Samples
from usp.rlhf.data.seeds import derived_seed
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph.calls import ModelCall
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.plan.plan_text import to_mapping
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.executor import Executor
from usp.run.failures import ConfigurationError, Stopped, UserCodeFailed
from usp.run.launch import Launch, outlast, process_group
from usp.run.metrics import RunLog, count, open_wandb
from usp.run.signals import StopRequest
from usp.run.watchdog import Watchdog
from usp.train.resume import CHECKPOINTS, Start, run_folder
from usp.train.trainer import learning_rate

from .algorithms.graphs import stateful
from .algorithms.rewards import RewardFailed
from .checkpoints import RlhfState
from .config import RlhfConfig
from .prepare import MODEL, PAIRS, SFT, Prepared, prepare, sft_steps, without_layout_flags

SHOWN = 2  # samples of a step that are kept to be read


def train_rlhf(config: RlhfConfig, launch: Launch, stop: StopRequest, error_file: str | None) -> None:
    """Train as `config` asks and leave a model; every rank calls it. Raises as `usp.train.trainer.train`."""
    hide_progress_bars()
    prepared = prepare(config, launch)
    timeout = config.hang_timeout
    with process_group(launch, prepared.device, timeout), Watchdog(launch, timeout, error_file) as watchdog:
        folder = run_folder(prepared.start, launch, f"{config.algorithm}-{Path(config.model).name}", prepared.device)
        prepared = replace(prepared, start=replace(prepared.start, folder=folder))
        if steps := sft_steps(config):
            prepared = _after_sft(prepared, steps, launch, stop, watchdog)
        trainer = RlhfTrainer(prepared, launch, stop, watchdog)
        outlast(timeout)
        trainer.run()


def _after_sft(prepared: Prepared, steps: int, launch: Launch, stop: StopRequest, watchdog: Watchdog) -> Prepared:
    """The run with the model that supervised steps leave, which are a run of their own."""
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
            reward_function="match",
            critic="",
            ref="",
            steps=steps,
            learning_rate=prepared.config.sft_learning_rate,
            prompts=prepared.config.prompts * prepared.graph.group_size,
            output=str(folder),
        )
        start = Start(folder, latest(folder / CHECKPOINTS), finished_too=True)
        RlhfTrainer(prepare(config, launch, start), launch, stop, watchdog).run()
        dist.barrier()
    # Degrees that the plan has no use for were those of the supervised steps.
    rest = {"model": str(folder / MODEL), "sft_steps": 0, **without_layout_flags(prepared.config)}
    config = replace(prepared.config, **rest)
    return prepare(config, launch, prepared.start)


@dataclass(frozen=True)
class RlhfRecord:
    """One step: its number, what the executor measured, and its seconds."""

    step: int
    metrics: dict[str, float]
    seconds: float

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
            "logprob_difference_max": "sampling off by",
        }
        said = [f"{text} {self.metrics[name]:.4g}" for name, text in shown.items() if name in self.metrics]
        tokens = sum(value for name, value in self.metrics.items() if name == "tokens_length")
        return "  ".join([*said, f"{count(tokens)} tokens a sample", f"{self.seconds:.1f} s"])


class RlhfTrainer:
    """A graph's models under a plan, with their data. Every rank calls every method, in the same order."""

    def __init__(self, prepared: Prepared, launch: Launch, stop: StopRequest, watchdog: Watchdog) -> None:
        self.prepared, self.launch, self.stop, self.watchdog = prepared, launch, stop, watchdog
        self.config, self.device = prepared.config, prepared.device
        self.is_writer = dist.get_rank() == 0
        assert prepared.start.folder is not None
        self.folder = prepared.start.folder
        self.groups = ProcessGroups()
        self.trained: dict[str, RoleModel] = {}  # of this rank, by role
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
                collect=("tokens", "prompt_length", "score") if {"score", "prompt_length"} <= keys else (),
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self.checkpointer = Checkpointer(self.folder / CHECKPOINTS, prepared.config.keep_checkpoints, self.device.type)
        self.done, self.taken, self.stopping = 0, 0, False
        if prepared.saved is not None:
            self._resume(prepared.saved)

    def run(self) -> None:
        """The steps that are left, with their checkpoints, then the trained models."""
        if self.is_writer:
            self._begin_folder()
        with self._log() as log:
            for number in range(self.done + 1, self.config.steps + 1):
                record = self.step(number)
                if log is not None:
                    log.record(record)
                self._keep(number)
        self.watchdog.progress(self.done, "writing the model", long=True)
        self.checkpointer.wait()
        self._export()

    def step(self, number: int) -> RlhfRecord:
        """Step `number` (from 1)."""
        begin = time.perf_counter()
        self.watchdog.progress(number, "step", long=True)
        rate = learning_rate(number, self.config) / self.config.learning_rate
        for model in self.trained.values():
            model.learning_rate = model.spec.learning_rate * rate
        indices = example_indices(self.taken, self.config.prompts, len(self.prepared.examples), self.config.seed)
        seed = derived_seed(self.config.seed, number)
        try:
            result = self.executor.run_step(self._given(indices), number, seed)
        except RewardFailed as failed:
            file = self._keep_bad(number, failed)
            raise UserCodeFailed(f"step {number}: {failed}; the sample is in {file}") from failed
        self.done, self.taken = number, self.taken + self.config.prompts
        if result.samples is not None and (number == 1 or number % self.config.log_every == 0):
            self._keep_samples(number, result.samples)
        self.stopping = self._any(self.stop.requested)
        return RlhfRecord(number, result.metrics, time.perf_counter() - begin)

    def _given(self, indices: Sequence[int]) -> Samples:
        """What the graph begins with, the same on every rank."""
        examples = [self.prepared.examples[index] for index in indices]
        given = self.prepared.graph.given
        if "prompt_ids" in given:
            values: dict[str, list[Tensor]] = {"prompt_ids": [torch.from_numpy(e.prompt) for e in examples]}
            if "prompt_index" in given:
                values["prompt_index"] = [torch.tensor(index) for index in indices]
        else:
            pairs = self.config.algorithm in PAIRS
            whole = [
                self._sequence(e, text) for e in examples for text in ((e.answer, e.rejected) if pairs else (e.answer,))
            ]
            values = {"tokens": [tokens for tokens, _ in whole], "mask": [mask for _, mask in whole]}
        ids = tuple(range(len(next(iter(values.values())))))
        return Samples(ids, {key: values[key] for key in given})

    def _sequence(self, example: Example, response: str) -> tuple[Tensor, Tensor]:
        """A prompt with a response that ends, and the mask of the response."""
        ids = self.prepared.tokenizer.encode(response.encode())
        tokens = torch.cat((torch.from_numpy(example.prompt), torch.from_numpy(ids)))
        mask = torch.zeros(len(tokens))
        mask[len(example.prompt) - 1 : -1] = 1
        return tokens, mask

    def _build_role(self, call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> RoleModel:
        def generator(model: RoleModel) -> Generator:
            stage = model.stage
            return Generator(stage.model, mesh, first=stage.first, last=stage.last, slots=self.config.slots)

        spec, trained = self.prepared.roles[call.role], call.kind == "train_step"
        model = RoleModel(spec, layout, mesh, trained=trained, make_generator=generator)
        if trained:
            self.trained[call.role] = model
        return model

    def _any(self, asked: bool) -> bool:
        flag = torch.tensor(int(asked), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _state(self) -> dict[str, Tensor]:
        trained = self.trained.items()
        return {f"{role}.{name}": tensor for role, model in trained for name, tensor in model.state().items()}

    def _keep(self, number: int) -> None:
        """After a step: a checkpoint where one is due, and the end where a signal asked for it."""
        every = self.config.checkpoint_every
        due = bool(every) and (number % every == 0 or number == self.config.steps)
        if due or self.stopping:
            self.watchdog.progress(number, "checkpoint", long=True)
            state = RlhfState(number, self.taken, self._remembered(), config_to_mapping(self.config))
            self.checkpointer.save(number, self._state(), state.to_extra())
        if self.stopping and number < self.config.steps:
            self.checkpointer.wait()
            raise Stopped(self.stop.signal_number or signal.SIGTERM, number, latest(self.folder / CHECKPOINTS))

    def _remembered(self) -> dict[str, dict[str, float]]:
        """What functions of samples remember, which only the ranks that call them know."""
        found = {}
        for name, function in stateful(self.prepared.graph).items():
            state = [function.state_dict()]
            dist.broadcast_object_list(state, src=self.prepared.plan[name].ranks[0], device=self.device)
            found[name] = state[0]
        return found

    def _resume(self, saved: RlhfState) -> None:
        assert self.prepared.start.checkpoint is not None
        state = self._state()
        try:
            self.checkpointer.load(self.prepared.start.checkpoint, state)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        for role, model in self.trained.items():
            prefix = f"{role}."
            model.restore({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})
        for name, function in stateful(self.prepared.graph).items():
            function.load_state_dict(saved.functions[name])
        self.done, self.taken = saved.step, saved.examples

    def _export(self) -> None:
        """Write every trained model; they are whole when any rank returns."""
        graph, plan = self.prepared.graph, self.prepared.plan
        for role in graph.trained_roles:
            call = graph.train_call(role)
            assert call is not None
            group = self.groups.get(plan[call.name].ranks)
            path = self.folder / (MODEL if len(graph.trained_roles) == 1 or role == "actor" else role)
            if group is not None:
                model = self.trained[role]
                inner = model.stage.model
                generation = inner.generation_config if role == "actor" else None
                save_weights(model.weights(), path, config=inner.config, generation_config=generation, group=group)
                if dist.get_rank(group) == 0:
                    save_tokenizer(self.prepared.tokenizer, path)
                    print(f"{role}: {path}", flush=True)
        dist.barrier()

    def _begin_folder(self) -> None:
        """Make the run's folder with its configuration, and say what is about to run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config, plan = self.config, self.prepared.plan
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config_to_mapping(config), sort_keys=False))
        (self.folder / "plan.yaml").write_text(yaml.safe_dump(to_mapping(plan), sort_keys=False))
        models = ", ".join(f"{role} {spec.source}" for role, spec in self.prepared.roles.items())
        print(f"algorithm: {config.algorithm}, models: {models}")
        print(f"ranks: {dist.get_world_size()}, plan {plan.name}")
        for name, layout in plan.calls.items():
            print(f"  {name}: {layout}")
        print(self.prepared.kernel_choice)
        if self.prepared.saved is not None:
            print(f"continues: {self.prepared.start.checkpoint}")
        print(f"run: {self.folder}", flush=True)

    def _log(self) -> RunLog | nullcontext[None]:
        if not self.is_writer:
            return nullcontext()
        return RunLog(
            self.folder,
            steps=self.config.steps,
            log_every=self.config.log_every,
            out=sys.stdout,
            after=self.done,
            wandb=open_wandb(self.config.wandb_project, self.folder, config_to_mapping(self.config)),
        )

    def _keep_samples(self, number: int, samples: Samples) -> None:
        decode = self.prepared.tokenizer.decode
        with (self.folder / "samples.jsonl").open("a") as file:
            for tokens, length, score in list(
                zip(samples["tokens"], samples["prompt_length"], samples["score"], strict=True)
            )[:SHOWN]:
                ids, cut = tokens.tolist(), int(length)
                record: dict[str, Any] = {
                    "step": number,
                    "prompt": decode(ids[:cut]),
                    "response": decode(ids[cut:]),
                    "score": float(score),
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _keep_bad(self, number: int, failed: RewardFailed) -> Path:
        """The sample, so that people can see what their function could not score; by whichever rank saw it."""
        path = self.folder / "bad-samples.jsonl"
        with path.open("a") as file:
            file.write(json.dumps({"step": number, **failed.record}, ensure_ascii=False) + "\n")
        return path
