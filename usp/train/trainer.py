"""One training run, from a configuration to a trained model.

    prepare -> process group -> mesh -> engine with its stages -> steps, checkpoints -> model

RUN/                          what a run leaves
    config.yaml               the resolved configuration; train.py --config takes it
    metrics.jsonl             every step
    tensorboard/              the same
    checkpoints/step-N/       weights, optimiser, data position: --resume continues from the newest
    profile/                  traces of the steps that --profile names
    model/                    the trained weights, for transformers' from_pretrained
    tokenizer/                where the tokenizer is bytes; another one is in model/
    last-good/                only when loss or gradient were not finite: the weights from before that step
"""

from __future__ import annotations

import math
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn, Protocol, cast

import torch
import torch.distributed as dist
import yaml

from parallel import Checkpointer, ParallelMesh, latest, local_tensor, peak_flops
from usp.config import config_to_mapping
from usp.data.stream import PackedBatch
from usp.hf.export import save_weights
from usp.hf.models import hide_progress_bars
from usp.hf.tokenizers import save_tokenizer
from usp.losses.cross_entropy import global_token_count
from usp.losses.output_heads import NextTokenLoss
from usp.model.facts import training_flops
from usp.run.failures import ConfigurationError, Stopped, TrainingDiverged
from usp.run.launch import Launch, outlast, process_group
from usp.run.metrics import RunLog, StepRecord, count, open_wandb, peak_memory
from usp.run.profiling import StepProfiler, parse_steps
from usp.run.signals import StopRequest
from usp.run.watchdog import Watchdog
from usp.sp.batch import shard_batch, split_rows
from usp.sp.sp_attention import UnifiedSPAttention

from .build import build_engine
from .checkpoints import TrainingState, random_state, restore_random_state, resume_changes
from .prepare import Prepared
from .resume import CHECKPOINTS, run_folder

FINAL_LEARNING_RATE = 0.1  # of the peak


def train(prepared: Prepared, launch: Launch, stop: StopRequest | None = None, error_file: str | None = None) -> None:
    """Train what `prepare` made of a configuration, and leave a model; every rank calls it.

    stop: asks for a checkpoint and the end after the step at hand. error_file: where torchrun reads of failures.

    Raises ConfigurationError for a model that cannot be divided as asked, TrainingDiverged when loss or gradient are no
    longer finite, and Stopped.
    """
    hide_progress_bars()
    timeout = prepared.config.hang_timeout
    with process_group(launch, prepared.device, timeout), Watchdog(launch, timeout, error_file) as watchdog:
        trainer = Trainer(prepared, launch, stop or StopRequest(), watchdog)
        outlast(timeout)
        trainer.run()


class Schedule(Protocol):
    """What a configuration says of learning rates."""

    @property
    def learning_rate(self) -> float: ...

    @property
    def warmup_steps(self) -> int: ...

    @property
    def steps(self) -> int: ...


def learning_rate(step: int, config: Schedule) -> float:
    """The rate of step 1, 2, ...: linear to the peak over warmup_steps, then a cosine to a tenth at the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


class Trainer:
    """A model on a mesh, with its optimiser and data. Every rank calls every method, in the same order."""

    def __init__(
        self,
        prepared: Prepared,
        launch: Launch | None = None,
        stop: StopRequest | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.prepared, self.launch = prepared, launch or Launch()
        self.stop = stop or StopRequest()
        self.watchdog = watchdog or Watchdog(self.launch, seconds=0)
        self.config = config = prepared.config
        self.device = prepared.device
        self.is_writer = dist.get_rank() == 0
        self.mesh = ParallelMesh.create(prepared.dims, device_type=self.device.type)
        self.mesh.agree((config, prepared.model_config.to_dict(), prepared.start), "the configuration")
        try:
            self.engine = build_engine(prepared, self.mesh)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self.folder = run_folder(prepared.start, self.launch, Path(config.model).name, self.device)
        self.checkpointer = Checkpointer(self.folder / CHECKPOINTS, config.keep_checkpoints, self.device.type)
        self.done, self.tokens, self.stopping = 0, 0, False
        if prepared.start.checkpoint is not None:
            self._resume(prepared.start.checkpoint)

    def run(self) -> None:
        """The steps that are left, with their checkpoints, then the trained model."""
        if self.is_writer:
            self._begin_folder()
        steps = parse_steps(self.config.profile, self.config.steps)
        profiler = StepProfiler(steps, self.folder, dist.get_rank(), self.device)
        with self._log() as log, profiler:
            for number in range(self.done + 1, self.config.steps + 1):
                with profiler.step(number):
                    record = self.step(number)
                if log is not None:
                    log.record(record)
                self._keep(number)
        self.watchdog.progress(self.done, "writing the model", long=True)
        self.checkpointer.wait()
        self._export("model")
        if self.is_writer:
            print(f"model: {self.folder / 'model'}", flush=True)

    def step(self, number: int) -> StepRecord:
        """Optimiser step `number` (from 1): from a batch to new weights."""
        begin, sent_before = time.perf_counter(), self._attention_sent()
        self.watchdog.progress(number, "data")
        batch = next(self.prepared.batches)
        self.mesh.agree(batch.digest(), f"the data of step {number}")
        self.watchdog.progress(number, "training", long=number == self.done + 1)
        local = self._local_part(batch)
        tokens = int(global_token_count(local["shift_labels"], self.mesh))
        share = self.engine.forward_backward(split_rows(local, self.config.micro_batches), NextTokenLoss(tokens))

        sent = self._attention_sent() - sent_before
        total_loss, total_sent, stops = self._sum([share.item(), sent, float(self.stop.requested)])
        rate = learning_rate(number, self.config)
        norm = self.engine.step(rate, self.config.max_grad_norm) if math.isfinite(total_loss) else math.nan
        if not math.isfinite(norm):
            self._diverged(number, total_loss, norm)
        self.done, self.tokens, self.stopping = number, self.tokens + batch.ids.numel(), stops > 0

        seconds = time.perf_counter() - begin
        return StepRecord(
            step=number,
            loss=total_loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=batch.ids.numel(),
            seconds=seconds,
            tokens_per_second=batch.ids.numel() / seconds,
            mfu=self._mfu(batch, seconds),
            memory_bytes=peak_memory(self.device),
            attention_sent_bytes=round(total_sent / (self.mesh.size("loss") * self.mesh.size("pp"))),
            fsdp_sent_bytes=self.prepared.predicted_fsdp_bytes,
        )

    def _local_part(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """Of the global batch this rank's rows, and of those its part of the sequence."""
        first = self.mesh.rank("batch") * self.config.batch_size
        rows = batch.rows(first, first + self.config.batch_size)
        ids = rows.ids.to(self.device)
        whole = {"input_ids": ids, "labels": ids, "cu_seqlens": rows.cu_seqlens}
        return shard_batch(whole, self.mesh, layout=self.config.sp_layout)

    def _attention_sent(self) -> int:
        return sum(cast(UnifiedSPAttention, stage.model.unified_sp).sent_bytes for stage in self.engine.stages)

    def _sum(self, values: list[float]) -> list[float]:
        """The sums over all ranks; what tensor-parallel ranks hold alike counts once."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        for axis in ("pp", "loss", "tp"):
            dist.all_reduce(total, group=self.mesh.group(axis))
        return (total / self.mesh.size("tp")).tolist()

    def _keep(self, number: int) -> None:
        """After a step: a checkpoint where one is due, and the end where a signal asked for it."""
        every = self.config.checkpoint_every
        due = bool(every) and (number % every == 0 or number == self.config.steps)
        if due or self.stopping:
            self.watchdog.progress(number, "checkpoint", long=True)
            state = TrainingState(
                step=number,
                tokens=self.tokens,
                stream=self.prepared.batches.state_dict(),
                random=random_state(self.device),
                config=config_to_mapping(self.config),
                model=self.prepared.model_config.to_dict(),
            )
            self.checkpointer.save(number, self.engine.state(), state.to_extra())
        if self.stopping and number < self.config.steps:
            self.checkpointer.wait()
            raise Stopped(self.stop.signal_number or signal.SIGTERM, number, latest(self.folder / CHECKPOINTS))

    def _resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint; the data was set when the run was prepared."""
        saved = self.prepared.saved
        assert saved is not None
        try:
            state = self.engine.state()
            self.checkpointer.load(checkpoint, state)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self.engine.restore(state)
        restore_random_state(saved.random, self.device)
        self.done, self.tokens = saved.step, saved.tokens

    def _diverged(self, number: int, loss: float, grad_norm: float) -> NoReturn:
        """Keep the weights that the last step left, if they are finite, and raise TrainingDiverged on every rank."""
        weights = (weight for stage in self.engine.stages for weight in stage.parameters())
        broken = sum(int((~torch.isfinite(local_tensor(weight))).sum()) for weight in weights)
        if number == 1:
            kept = "No step came before, so nothing was saved: the weights it started from or the data are broken"
        elif self._sum([broken])[0]:
            kept = f"Step {number - 1} left weights that are not finite, so nothing was saved"
        else:
            self._export("last-good")
            dist.barrier()
            kept = f"The last good step is {number - 1}, and its weights are in {self.folder / 'last-good'}"
        raise TrainingDiverged(
            f"step {number} has loss = {loss} and gradient norm = {grad_norm}, and both must be finite; the weights "
            f"were not changed. {kept}. Lower --learning-rate (now {self.config.learning_rate:g}), raise "
            f"--warmup-steps (now {self.config.warmup_steps}), or use --dtype float32 (now {self.config.dtype})"
        )

    def _export(self, name: str) -> None:
        """Write weights and tokenizer to a folder of the run; it is whole when rank 0 returns."""
        state = self.engine.state()
        weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
        model = self.engine.stages[0].model
        save_weights(weights, self.folder / name, config=model.config, generation_config=model.generation_config)
        if self.is_writer:
            save_tokenizer(self.prepared.tokenizer, self.folder / name)

    def _mfu(self, batch: PackedBatch, seconds: float) -> float | None:
        """The part of the devices' bfloat16 peak that this step used; None for float32 and unknown devices."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        peak = peak_flops(name) if self.config.dtype == "bfloat16" else None
        if peak is None:
            return None
        flops = training_flops(
            self.prepared.facts,
            matmul_parameters=self.prepared.matmul_parameters,
            tokens=batch.ids.numel(),
            cu_seqlens=batch.cu_seqlens,
        )
        return flops / (seconds * peak * dist.get_world_size())

    def _begin_folder(self) -> None:
        """Make the run's folder with its configuration, and say what is about to run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config, dims = self.config, self.prepared.dims
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config_to_mapping(config), sort_keys=False))
        parameters = count(self.prepared.parameters)
        print(f"model: {config.model}, {parameters} parameters, {config.dtype} on {config.device}")
        print(f"ranks: {dist.get_world_size()} ({dims}), layout {config.sp_layout}")
        print(self.prepared.kernel_choice)
        rows = dims.batch * config.batch_size
        print(f"data: {config.data}, {rows} x {config.seq_len} tokens ({config.tokenizer}) a step")
        if self.prepared.saved is not None:
            for change in resume_changes(self.prepared.saved, config):
                print(f"changed: {change}")
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
