"""One training run, from a configuration to a checkpoint.

    prepare -> process group -> mesh -> model -> apply_unified_sp -> apply_fsdp -> AdamW -> steps -> checkpoint

RUN/                      what rank 0 writes
    config.yaml           the resolved configuration; train.py --config takes it
    metrics.jsonl         every step
    tensorboard/          the same
    checkpoint/           the trained weights, for transformers' from_pretrained
    tokenizer/            where the tokenizer is bytes; another one is in the checkpoint
    last-good/            only when loss or gradient were not finite: a checkpoint from before that step
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn, cast

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.tensor import DTensor

from parallel import ParallelMesh, apply_fsdp
from usp.batch import shard_batch
from usp.config import TrainConfig, config_to_mapping
from usp.costs import fsdp_sent_bytes, peak_flops, training_flops
from usp.data import PackedBatch
from usp.failures import ConfigurationError, RanksDisagree, TrainingDiverged, lost_peer
from usp.hf.integrate import apply_unified_sp, decoder_layers
from usp.hf.models import build_model, gather_weights, hide_progress_bars, matmul_parameters, save_checkpoint
from usp.hf.tokenizers import save_tokenizer
from usp.launch import Launch, process_group
from usp.loss import causal_lm_loss, global_token_count
from usp.metrics import RunLog, StepRecord, count, peak_memory
from usp.prepare import Prepared, prepare
from usp.sp_attention import UnifiedSPAttention

BETAS = (0.9, 0.95)
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
        self.model = build_model(config.model, prepared.model_config, seed=config.seed, device=self.device)
        self.matmul_parameters = matmul_parameters(self.model)
        self.fsdp_bytes = self._fsdp_bytes()
        try:
            apply_unified_sp(self.model, self.mesh, layout=config.sp_layout, kernel=config.attention_kernel)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self.attention = cast(UnifiedSPAttention, self.model.unified_sp)
        apply_fsdp(self.model, self.mesh, decoder_layers(self.model), param_dtype=getattr(torch, config.dtype))
        self.parameters = list(self.model.parameters())
        self.optimizer = _adamw(self.parameters, config)
        self.folder = _run_folder(config, self.device)

    def run(self) -> None:
        """Every step, then the checkpoint."""
        if self.is_writer:
            self._begin_folder()
        with self._log() as log:
            for number in range(1, self.config.steps + 1):
                record = self.step(number)
                if log is not None:
                    log.record(record)
        self._save("checkpoint")
        if self.is_writer:
            print(f"checkpoint: {self.folder / 'checkpoint'}", flush=True)

    def step(self, number: int) -> StepRecord:
        """Optimiser step `number` (from 1): from a batch to new weights."""
        begin, sent_before = time.perf_counter(), self.attention.sent_bytes
        batch = next(self.prepared.batches)
        self._agree(batch.digest(), f"the data of step {number}")
        local = self._local_part(batch)

        tokens = global_token_count(local["shift_labels"], self.mesh)
        logits = self.model(
            input_ids=local["input_ids"],
            position_ids=local["position_ids"],
            cu_seqlens=local["cu_seqlens"],
            use_cache=False,
        ).logits
        loss = causal_lm_loss(logits, local["shift_labels"], tokens)
        loss.backward()

        sent = self.attention.sent_bytes - sent_before
        total_loss, total_sent = self._sum(_float64([loss.item(), sent], self.device)).tolist()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not (math.isfinite(total_loss) and math.isfinite(grad_norm)):
            self._stop(number, total_loss, grad_norm)
        rate = learning_rate(number, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()

        seconds = time.perf_counter() - begin
        return StepRecord(
            step=number,
            loss=total_loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            tokens=batch.ids.numel(),
            seconds=seconds,
            tokens_per_second=batch.ids.numel() / seconds,
            mfu=self._mfu(batch, seconds),
            memory_bytes=peak_memory(self.device),
            attention_sent_bytes=round(total_sent / self.mesh.size("loss")),
            fsdp_sent_bytes=self.fsdp_bytes,
        )

    def _local_part(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """Of the global batch this rank's rows, and of those its part of the sequence."""
        first = self.mesh.rank("batch") * self.config.batch_size
        rows = batch.rows(first, first + self.config.batch_size)
        ids = rows.ids.to(self.device)
        whole = {"input_ids": ids, "labels": ids, "cu_seqlens": rows.cu_seqlens}
        return shard_batch(whole, self.mesh, layout=self.config.sp_layout)

    def _agree(self, value: object, what: str) -> None:
        try:
            self.mesh.agree(value, what=what)
        except RuntimeError as error:
            if lost_peer(error):
                raise
            raise RanksDisagree(str(error)) from error

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks that hold different tokens."""
        dist.all_reduce(value, group=self.mesh.group("loss"))
        return value

    def _stop(self, number: int, loss: float, grad_norm: float) -> NoReturn:
        """Keep the weights that the last step left, if they are finite, and raise TrainingDiverged on every rank."""
        local = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters)
        broken = sum(int((~torch.isfinite(part)).sum()) for part in local)
        if number == 1:
            kept = "No step came before, so nothing was saved: the weights it started from or the data are broken"
        elif self._sum(_float64([broken], self.device)).item():
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
        weights = gather_weights(self.model)
        if self.is_writer:
            save_checkpoint(self.model, weights, self.folder / name)
            save_tokenizer(self.prepared.tokenizer, self.folder / name)

    def _fsdp_bytes(self) -> int:
        total = sum(parameter.numel() for parameter in self.model.parameters())
        block = sum(parameter.numel() for parameter in decoder_layers(self.model).parameters())
        return fsdp_sent_bytes(
            block=block,
            root=total - block,
            itemsize=getattr(torch, self.config.dtype).itemsize,
            ranks=self.mesh.size("fsdp"),
            replicas=self.mesh.size("dp_replicate"),
        )

    def _mfu(self, batch: PackedBatch, seconds: float) -> float | None:
        """The part of the devices' bfloat16 peak that this step used; None for float32 and unknown devices."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        peak = peak_flops(name) if self.config.dtype == "bfloat16" else None
        if peak is None:
            return None
        flops = training_flops(
            self.prepared.facts,
            matmul_parameters=self.matmul_parameters,
            tokens=batch.ids.numel(),
            cu_seqlens=batch.cu_seqlens,
        )
        return flops / (seconds * peak * self.mesh.size("loss"))

    def _begin_folder(self) -> None:
        """Make the run's folder with its configuration, and say what is about to run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config, dims = self.config, self.prepared.dims
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config_to_mapping(config), sort_keys=False))
        parameters = count(sum(parameter.numel() for parameter in self.parameters))
        print(f"model: {config.model}, {parameters} parameters, {config.dtype} on {config.device}")
        print(f"ranks: {self.mesh.size('loss')} ({dims}), layout {config.sp_layout}")
        print(self.prepared.kernel_choice)
        rows = dims.batch * config.batch_size
        print(f"data: {config.data}, {rows} x {config.seq_len} tokens ({config.tokenizer}) a step")
        print(f"run: {self.folder}", flush=True)

    def _log(self) -> RunLog | nullcontext[None]:
        if not self.is_writer:
            return nullcontext()
        return RunLog(self.folder, steps=self.config.steps, log_every=self.config.log_every, out=sys.stdout)


def _float64(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def _adamw(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS)


def _run_folder(config: TrainConfig, device: torch.device) -> Path:
    """Where the run is kept; a name made of the time is rank 0's, so that all ranks name the same folder."""
    if config.output:
        return Path(config.output).expanduser()
    now = torch.tensor(int(time.time()), device=device)
    dist.broadcast(now, src=0)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(int(now)))
    return Path("runs") / f"{stamp}-{Path(config.model).name}"
