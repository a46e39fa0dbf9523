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
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import yaml
from torch.distributed.tensor import DTensor

from parallel import ParallelMesh
from usp.batch import shard_batch
from usp.build import build_engine
from usp.config import TrainConfig, config_to_mapping
from usp.costs import peak_flops, training_flops
from usp.data import PackedBatch
from usp.engines.base import MicroBatch
from usp.failures import ConfigurationError, RanksDisagree, TrainingDiverged, lost_peer
from usp.hf.export import save_weights
from usp.hf.models import hide_progress_bars
from usp.hf.tokenizers import save_tokenizer
from usp.launch import Launch, process_group
from usp.loss import global_token_count
from usp.metrics import RunLog, StepRecord, count, peak_memory
from usp.prepare import Prepared, prepare

FINAL_LEARNING_RATE = 0.1  # of the peak


def train(config: TrainConfig, launch: Launch) -> None:
    """Train as `config` asks and leave a checkpoint; every rank calls it.

    Raises ConfigurationError, before any communication, for a configuration that cannot run, and TrainingDiverged
    when loss or gradient are no longer finite.
    """
    hide_progress_bars()
    prepared = prepare(config, launch)
    with process_group(launch, prepared.device):
        Trainer(prepared).run()


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step 1, 2, ...: linear to the peak over warmup_steps, then a cosine to a tenth at the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


class Trainer:
    """A model on a mesh, with its optimiser and data. Every rank calls every method, in the same order."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.config = config = prepared.config
        self.device = prepared.device
        self.is_writer = dist.get_rank() == 0
        self.mesh = ParallelMesh.create(prepared.dims, device_type=self.device.type)
        self._agree((config, prepared.model_config.to_dict()), "the configuration")
        try:
            self.engine = build_engine(prepared, self.mesh)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self.folder = _run_folder(config, self.device)

    def run(self) -> None:
        """Every step, then the trained model."""
        if self.is_writer:
            self._begin_folder()
        with self._log() as log:
            for number in range(1, self.config.steps + 1):
                record = self.step(number)
                if log is not None:
                    log.record(record)
        self._save("model")
        if self.is_writer:
            print(f"model: {self.folder / 'model'}", flush=True)

    def step(self, number: int) -> StepRecord:
        """Optimiser step `number` (from 1): from a batch to new weights."""
        begin, sent_before = time.perf_counter(), self._attention_sent()
        batch = next(self.prepared.batches)
        self._agree(batch.digest(), f"the data of step {number}")
        local = self._local_part(batch)
        tokens = int(global_token_count(local["shift_labels"], self.mesh))
        share = self.engine.forward_backward(_split(local, self.config.micro_batches), tokens)

        sent = self._attention_sent() - sent_before
        total_loss, total_sent = self._sum([share.item(), sent])
        rate = learning_rate(number, self.config)
        norm = self.engine.step(rate, self.config.max_grad_norm) if math.isfinite(total_loss) else math.nan
        if not math.isfinite(norm):
            self._stop(number, total_loss, norm)

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
            fsdp_sent_bytes=self.engine.sent_bytes(self.config.micro_batches),
        )

    def _local_part(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """Of the global batch this rank's rows, and of those its part of the sequence."""
        first = self.mesh.rank("batch") * self.config.batch_size
        rows = batch.rows(first, first + self.config.batch_size)
        ids = rows.ids.to(self.device)
        whole = {"input_ids": ids, "labels": ids, "cu_seqlens": rows.cu_seqlens}
        return shard_batch(whole, self.mesh, layout=self.config.sp_layout)

    def _attention_sent(self) -> int:
        return sum(stage.model.unified_sp.sent_bytes for stage in self.engine.stages)

    def _agree(self, value: object, what: str) -> None:
        try:
            self.mesh.agree(value, what=what)
        except RuntimeError as error:
            if lost_peer(error):
                raise
            raise RanksDisagree(str(error)) from error

    def _sum(self, values: list[float]) -> list[float]:
        """The sums over all ranks that hold different tokens or layers."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        for axis in ("pp", "loss"):
            dist.all_reduce(total, group=self.mesh.group(axis))
        return total.tolist()

    def _stop(self, number: int, loss: float, grad_norm: float) -> NoReturn:
        """Keep the weights that the last step left, if they are finite, and raise TrainingDiverged on every rank."""
        weights = (weight for stage in self.engine.stages for weight in stage.parameters())
        local = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights)
        broken = sum(int((~torch.isfinite(part)).sum()) for part in local)
        if number == 1:
            kept = "No step came before, so nothing was saved: the weights it started from or the data are broken"
        elif self._sum([broken])[0]:
            kept = f"Step {number - 1} left weights that are not finite, so nothing was saved"
        else:
            self._save("last-good")
            dist.barrier()
            kept = f"The last good step is {number - 1}, and its weights are in {self.folder / 'last-good'}"
        raise TrainingDiverged(
            f"step {number} has loss = {loss} and gradient norm = {grad_norm}, and both must be finite; the weights "
            f"were not changed. {kept}. Lower --learning-rate (now {self.config.learning_rate:g}), raise "
            f"--warmup-steps (now {self.config.warmup_steps}), or use --dtype float32 (now {self.config.dtype})"
        )

    def _save(self, name: str) -> None:
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
        print(f"run: {self.folder}", flush=True)

    def _log(self) -> RunLog | nullcontext[None]:
        if not self.is_writer:
            return nullcontext()
        return RunLog(self.folder, steps=self.config.steps, log_every=self.config.log_every, out=sys.stdout)


def _split(batch: dict[str, torch.Tensor], parts: int) -> list[MicroBatch]:
    """Rows of the batch in `parts` equal micro-batches."""
    pieces = {key: value.chunk(parts) for key, value in batch.items()}
    return [{key: chunks[part] for key, chunks in pieces.items()} for part in range(parts)]


def _run_folder(config: TrainConfig, device: torch.device) -> Path:
    """Where the run is kept; a name made of the time is rank 0's, so that all ranks name the same folder."""
    if config.output:
        return Path(config.output).expanduser()
    now = torch.tensor(int(time.time()), device=device)
    dist.broadcast(now, src=0)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(int(now)))
    return Path("runs") / f"{stamp}-{Path(config.model).name}"
