"""One training run, from a configuration to a trained model.

    prepare -> process group -> claim the folder -> mesh -> engine with its stages -> steps, checkpoints -> model

RUN/                          the output of a run
    run.lock                  locked by the run that writes here
    config.yaml               the resolved configuration, except device and dtype; train.py --config takes it
    metrics.jsonl             every step
    tensorboard/              the same numbers
    checkpoints/step-N/       weights, optimizer, data position: --resume continues from the newest
    samples.jsonl             what the model responds to --sample-prompts
    tune.jsonl                which layouts --plan tune has tried, and what they took
    profile/                  traces of the steps that --profile names
    model/                    the trained weights, for transformers' from_pretrained; with LoRA only for --lora-merge
    adapter/                  the trained adapters, for peft's from_pretrained; best/ and last-good/ are adapters too
    tokenizer/                only for the byte tokenizer; others are in model/
    best/                         the weights with the lowest loss on --eval-data
    last-good/                only if loss or gradient norm became non-finite: the weights before that step
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from usp.data.batches import BatchReader, TokenBatch, parse_mixture, parse_named
from usp.data.cache import token_lines
from usp.data.chats import CLOSE, OPEN, excerpt
from usp.data.rows import PackedRows, WholeRows
from usp.hf.float8 import float8_line
from usp.hf.indexers import indexer_losses
from usp.hf.models import hide_progress_bars
from usp.hf.stage import CausalLMStage
from usp.model.facts import training_flops
from usp.parallel import ParallelMesh, ProcessGroups, local_tensor, peak_flops
from usp.parallel.groups import gather_objects
from usp.predict.traffic import fsdp_traffic
from usp.run.failures import ConfigurationError, TrainingDiverged
from usp.run.launch import Launch, StopRequest, all_ready, outlast, process_group
from usp.run.metrics import StepProfiler, StepRecord, count, parse_steps, peak_memory
from usp.run.output import LineFile, working
from usp.run.watchdog import Watchdog

from . import checkpoints
from .build import EngineRecipe, build_engine, first_weights, moved_engine, resumed_weights
from .loop import TrainingLoop
from .prepare import PreparedRun, PreparedStage, prepare
from .step import Evaluations, HeldOutLoss, LearningRate, backward, held_out_loss, part_of, perplexity, sum_over_ranks
from .summary import WIDTH, next_steps, predicted_job, predicted_lines
from .tuning import OPTIONS, TUNE_FILE, Tuner
from .validate import parallel_dims

MEMORY_TIMEOUT = timedelta(seconds=30)  # for all ranks to have run out of memory, if they do
MANY_EPOCHS = 4  # up to here, repeated data is worth about as much as new data (arXiv 2305.16264)
# Generates what the model responds to the run's prompts after a step, as lines of samples.jsonl; every rank calls it.
Sample: TypeAlias = Callable[[CausalLMStage, ParallelMesh, int], list[str]]


def train(
    prepared: PreparedRun,
    launch: Launch,
    stop: StopRequest | None = None,
    error_file: str | None = None,
    sample: Sample | None = None,
    tuner: Tuner | None = None,
) -> None:
    """Train what `prepare` returned, and leave a model; every rank calls it.

    stop: asks for a checkpoint and the end after the current step. error_file: where torchrun reads of failures.
    sample: from `usp.rlhf.sampling.prepare_sampler`. tuner: with the layouts of --plan tune; `prepared` has the first.

    Raises ConfigurationError for a model that cannot be divided as asked and a folder that cannot be claimed,
    TrainingDiverged when loss or gradient norm are no longer finite, CheckpointFailed, and Stopped.
    """
    hide_progress_bars()
    config, timeout = prepared.config, prepared.config.hang_timeout
    if config.sample_every and sample is None:
        raise ConfigurationError(f"--sample-every = {config.sample_every} needs `sample`: use prepare_sampler")
    all_ready(launch, timeout)

    with (
        Watchdog(launch, timeout, error_file) as watchdog,
        process_group(launch, prepared.device, timeout),
        checkpoints.run_folder(prepared.start.folder, Path(config.model).name) as folder,
    ):
        ready = checkpoints.settled(
            prepared,
            folder,
            find=lambda damaged: checkpoints.find_start(config, launch, damaged=damaged),
            prepare=lambda start: replace(prepare(config, launch, start), reusable=prepared.reusable),
        )
        with working("building the model, and reading its weights", shown=launch.rank == 0):
            trainer = Trainer(ready, stop, watchdog, sample, tuner)
        outlast(timeout)
        trainer.run()
        if trainer.is_writer:
            kind = "ImageTextToText" if ready.images else "CausalLM"
            lines = next_steps("train", ready.config, folder, launch, ready.tokenizer, trainer.done, kind)
            print("\n".join(lines), flush=True)


class Trainer(TrainingLoop):
    """A model on a mesh, with its optimizer and data. `prepared` names the folder, and a verified checkpoint."""

    def __init__(
        self,
        prepared: PreparedRun,
        stop: StopRequest | None = None,
        watchdog: Watchdog | None = None,
        sample: Sample | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        assert prepared.start.folder is not None
        self.prepared, self.device = prepared, prepared.device
        self.stage, self.images = prepared.begins_in, prepared.images
        self.config, model = self.stage.config, prepared.model_config
        config, self.groups, self.tuner = self.config, ProcessGroups(), tuner
        left = prepared.stages[prepared.stages.index(self.stage) :]
        self.meshes = {
            dims: ParallelMesh.create(dims, device_type=self.device.type, groups=self.groups)
            for dims in dict.fromkeys(stage.dims for stage in left)
        }
        self.mesh = self.meshes[self.stage.dims]
        held_out = _compared(self.stage)
        compared = {"config": prepared.config, "model": model.to_dict(), "start": prepared.start, "eval data": held_out}
        self.mesh.agree(compared, "the configuration")
        recipe = EngineRecipe.of(config, model)
        fill = partial(first_weights, source=config.model, seed=config.seed)
        if prepared.saved is not None and recipe.lora is None:  # with adapters, checkpoints hold nothing else
            fill = partial(resumed_weights, source=config.model)
        try:
            self.engine = build_engine(recipe, self.mesh, self.device, fill)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        folder, watchdog = prepared.start.folder, watchdog or Watchdog(Launch(), seconds=0)
        super().__init__(prepared.config, config.steps, folder, self.device.type, stop or StopRequest(), watchdog)
        self.lora, self.adapter_parameters = recipe.lora, 0
        if recipe.lora is not None:
            self.result = checkpoints.ADAPTER
            self.adapter_parameters = prepared.shape.adapter_parameters(recipe.lora.rank, recipe.lora.targets)
        self.schedule = LearningRate.of(config, config.steps, config.warmup_steps)
        self.profiler = StepProfiler(parse_steps(config.profile, config.steps), folder, dist.get_rank(), self.device)
        self.tokens, self.sent = 0, 0  # sent: by this rank so far
        self.sent_in_step = self.waited_in_step = self.flops_in_step = 0.0  # of all ranks
        self._began: object = None  # the engine whose first step, which allocates and compiles, is done
        self.indexer_loss: float | None = None
        self.balanced_rows: float | None = None
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.peak = peak_flops(name) if config.dtype == "bfloat16" else None  # of a device; None: MFU is not known
        self.batches = self._reader()
        self._evaluations = Evaluations(held_out)
        self._respond, self._samples = sample, LineFile(folder / "samples.jsonl")
        self._tuned = LineFile(folder / TUNE_FILE)
        self._predict()
        if prepared.saved is not None:
            self._resume(prepared.saved)

    def trace(self, number: int) -> AbstractContextManager[None]:
        return self.profiler.step(number)

    def step(self, number: int) -> StepRecord:
        """Run optimizer step `number` (from 1): from a batch to new weights."""
        if self.tuner is not None:
            self._tune(self.tuner, number)
        begin = time.perf_counter()
        if number > self.stage.last:
            self._enter(self.prepared.stage_of(number))
            if self.is_writer:
                print("\n".join(self._stage_summary()), flush=True)
        self.watchdog.progress(number, "data")
        batch = self._read_batch()
        read = {"rows": batch.numbers, "data": self.stage.batches.identity}
        self.mesh.agree(read, f"the data of step {number}")
        self.watchdog.progress(number, "training", long=self._began is not self.engine)
        rate = self.config.learning_rate * self.schedule.at(number)
        inputs = batch.to(self.device)
        self._attention_waited()  # what came before this step does not count
        failed = ""
        try:
            share = backward(self.engine, self.mesh, inputs, self.config, batch.images)
        except torch.OutOfMemoryError as error:  # which holds what the step has allocated
            failed = str(error)
            if self.tuner is None:
                raise
        if failed:
            self._leave_out(batch, failed)
            return self.step(number)
        loss = self._exchange(batch, share)
        norm = self.engine.step(rate, self.config.max_grad_norm) if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            self._diverged(number, loss, norm)
        tokens = len(batch.numbers) * self.config.seq_len
        self.done, self.tokens = number, self.tokens + tokens

        seconds = time.perf_counter() - begin
        if self.config.compile and self.is_writer and self._began is not self.engine:
            print(f"compiled: step {number} took {seconds:.1f} s, with torch.compile of the layers", flush=True)
        self._began = self.engine
        if self.tuner is not None:
            self.tuner.ran(seconds - self.batches.waited, counts=number not in self.profiler.steps)
        evaluated = self._evaluate(number)
        held_out = next(iter(evaluated.values()), None)
        self._write_samples(number)
        stage, ranks = self.prepared.stages.index(self.stage), self.mesh.size("loss") * self.mesh.size("pp")
        lengths = batch.cu_seqlens.diff(dim=-1).double()
        kernels = set[str]().union(*(cast(Any, each.model).unified_sp.kernels for each in self.engine.stages))
        peak = None if self.peak is None else self.peak * dist.get_world_size()
        return StepRecord(
            step=number,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            epoch=self.stage.batches.epoch,
            epochs=self._epochs(self.stage.batches.next_row),
            tokens=tokens,
            seconds=seconds,
            data_seconds=self.batches.waited,
            tokens_per_second=tokens / seconds,
            mfu=None if peak is None else self.flops_in_step / (seconds * peak),
            memory_bytes=peak_memory(self.device),
            attention_sent_bytes=round(self.sent_in_step / ranks),
            fsdp_sent_bytes=self.fsdp_bytes,
            attention_wait_seconds=self.waited_in_step / ranks,
            eval_loss=held_out.loss if held_out else None,
            eval_perplexity=perplexity(held_out.loss) if held_out else None,
            eval_loss_by_position=held_out.by_position if held_out else {},
            eval_sets={name: (found.loss, found.by_position) for name, found in evaluated.items() if name},
            indexer_loss=self.indexer_loss,
            balanced_rows=self.balanced_rows,
            document_tokens=(lengths.square().sum() / lengths.sum()).item(),
            attention_kernels=tuple(sorted(kernels)),
            stage=stage + 1,
            seq_len=self.config.seq_len,
        )

    def _reader(self) -> BatchReader:
        config = self.config
        windows = self.prepared.shape.facts.windows
        return BatchReader(self.stage.batches, part_of(self.mesh, config, config.balance_rows, self.images, windows))

    def _read_batch(self) -> TokenBatch:
        """Return this rank's part of the next batch. Raises ConfigurationError on all ranks if one cannot read it."""
        if self.images is None:
            return next(self.batches)
        batch, failure = None, ""
        try:
            batch = next(self.batches)
        except ValueError as error:
            failure = str(error)
        failures = gather_objects(failure)
        if batch is None or any(failures):
            raise ConfigurationError(f"{next(filter(None, failures))}; {self.keep_done()}")
        return batch

    def state(self) -> dict[str, Tensor]:
        return self.engine.state()

    def extra(self) -> dict[str, Any]:
        return checkpoints.TrainingState(
            step=self.done,
            tokens=self.tokens,
            stream=self.stage.batches.state_dict(),
            random=checkpoints.random_state(self.device),
            config=asdict(self.prepared.config),
            model=self.prepared.model_config.to_dict(),
            evaluations=self._evaluations.to_extra(),
        ).to_extra()

    def export(self) -> None:
        if self.is_writer and self.ends_early():
            since = self._evaluations.since_best()
            print(f"early stopping: no lower loss on --eval-data in {since} evaluations, after step {self.done}")
        for name in self._export(self.result, checkpoints.MODEL):
            if self.is_writer:
                print(f"{name}: {self.folder / name}", flush=True)

    def write_best(self) -> None:
        self._export(checkpoints.BEST, f"{checkpoints.BEST}-{checkpoints.MODEL}")

    def evaluations(self) -> Evaluations | None:
        return self._evaluations if self.prepared.config.checkpoint_every else None

    def ends_early(self) -> bool:
        patience, since = self.prepared.config.early_stopping_patience, self._evaluations.since_best()
        return bool(patience) and since >= patience

    def logs(self) -> Iterable[LineFile]:
        return [self._samples, self._tuned]

    def restore(self, checkpoint: Path) -> None:
        self.load(checkpoint)
        self.engine.restore()

    def files(self) -> Mapping[str, Mapping[str, Any]]:
        return {"config.yaml": asdict(self.prepared.reusable)}

    def summary(self) -> Iterator[str]:
        config = self.prepared.config
        parameters = count(self.prepared.shape.numel)
        yield f"model: {config.model}, {parameters} parameters, {config.dtype} on {config.device}"
        if self.lora is not None:
            lora, adapters = self.lora, f"{count(self.adapter_parameters)} trained parameters"
            whole = f", and {', '.join(lora.saved.modules)} in full" if lora.saved else ""
            kind = f"LoRA: rank {lora.rank}, alpha {lora.alpha}"
            yield f"{kind}, on {', '.join(lora.targets)}: {adapters}{whole}"
        yield self.prepared.kernel_choice
        if config.fp8 != "none":
            yield float8_line(self.prepared.shape, config.fp8, config.tp, config.emulates_float8)
        yield from self._stage_summary()
        yield f"learning rate: {config.learning_rate:g}, {self.schedule}"
        if self.prepared.saved is not None:
            yield from (f"changed: {change}" for change in checkpoints.resume_changes(self.prepared.saved, config))
            yield f"resumed from: {self.prepared.start.checkpoint}"

    def _stage_summary(self) -> Iterator[str]:
        """Say on which ranks the stage runs, what was found in its data and left out of it, and what a step reads."""
        stages, config, packed = self.prepared.stages, self.config, self.stage.batches.packed
        if len(stages) > 1:
            number, steps = stages.index(self.stage) + 1, f"steps {self.stage.first} to {self.stage.last}"
            yield f"stage {number} of {len(stages)}: {steps}"
        if dist.get_world_size() > 1:
            yield f"ranks: {dist.get_world_size()} ({self.stage.dims}), layout {config.sp_layout}"
        left = self.stage.last - max(self.stage.first - 1, self.stage.batches.begun[0])
        begins, ends = self._epochs(0), self._epochs(left * self.stage.sequences)
        epochs = {path: end - begins[path] for path, end in ends.items()}
        parts = zip(parse_mixture(config.data), self.stage.left_out, packed.sources, packed.weights, strict=True)
        for (path, _), left_out, source, weight in parts:
            held = source.store.manifest
            share = f", {weight:.1%} of the rows, read {epochs[path]:.2f} times" if epochs else ""
            yield (
                f"data: {path}: {held.files} files, {held.documents} documents, {count(held.characters)} "
                f"characters, {count(held.tokens)} tokens ({config.tokenizer}){share}"
            )
            yield from filter(None, [left_out])
            if held.masked:
                yield from self._sample(path, source)
            if held.dropped:
                yield f"{held.dropped} rows were left out; the first: {held.why_dropped}"
            lines = token_lines(source.store, self.prepared.tokenizer)
            yield from (f"data: {path}: {line}" for line in lines)
            if held.replaced:
                yield f"{held.replaced} characters of the data are U+FFFD: bytes that are not UTF-8"
        sources = {path: source for (path, _), source in zip(parse_mixture(config.data), packed.sources, strict=True)}
        for (name, path), held_out in zip(parse_named(config.eval_data), self.stage.held_out, strict=True):
            found, name = held_out.packed.store.manifest, f"eval data{name and f' {name}'}: {path}"
            yield (
                f"{name}: {found.files} files, {found.documents} documents, {count(found.tokens)} tokens, "
                f"{held_out.packed.per_epoch} sequences"
            )
            yield from filter(None, [held_out.left_out])
            sources[name] = held_out.packed
        for path, source in sources.items():
            if isinstance(source, WholeRows):
                padding = 1 - source.tokens / (source.per_epoch * config.seq_len)
                yield f"packing: {path}: {source.per_epoch} sequences of whole documents, {padding:.1%} padding"
                yield from _long_documents(path, source)
        for path in (path for path, times in epochs.items() if times > MANY_EPOCHS):
            yield f"warning: {path} is read {epochs[path]:.1f} times in these steps: lower its weight, or add data"
        epoch = f"{packed.per_epoch / self.stage.sequences:,.1f}".removesuffix(".0")
        yield f"step: {self.stage.sequences} x {config.seq_len} tokens, an epoch is {epoch} steps"
        if self.job is not None:
            yield from predicted_lines(self.job, self.prepared)

    def _epochs(self, rows: int) -> dict[str, float]:
        """Return how often each part of a mixture has been read after so many rows of the stage; empty for one part."""
        paths = [path for path, _ in parse_mixture(self.config.data)]
        return dict(zip(paths, self.stage.batches.packed.epochs(rows), strict=True)) if len(paths) > 1 else {}

    def _sample(self, path: str, source: PackedRows) -> Iterator[str]:
        row, color = source.row(0), sys.stdout.isatty()
        begin, end = int(row.begins[0]), int(row.begins[0] + row.boundaries[1])
        marked = "in green" if color else f"between {OPEN} and {CLOSE}"
        yield f"sample: {path}: a document, what is trained on {marked}:"
        yield excerpt(
            source.store.read(begin, end), source.store.read_mask(begin, end), self.prepared.tokenizer.show, color
        )

    def _evaluate(self, number: int) -> dict[str, HeldOutLoss]:
        """Return the losses on each set of held-out data by its name, if they are evaluated after this step."""
        every = self.config.eval_every or self.config.checkpoint_every
        if not self.stage.held_out or (number != self.config.steps and (not every or number % every)):
            return {}
        progress = partial(self.watchdog.progress, number, "evaluation", long=True)
        evaluate = partial(held_out_loss, part=self.batches.part, progress=progress)
        found = {
            held_out.name: evaluate(self.engine, self.mesh, held_out, self.config, self.device)
            for held_out in self.stage.held_out
        }
        self._evaluations.values[number] = next(iter(found.values())).loss
        self.sent = self._attention_sent()  # the next step does not count what the evaluation sent
        return found

    def _write_samples(self, number: int) -> None:
        every = self.config.sample_every
        if self._respond is None or (number % every and number != self.config.steps):
            return
        self.watchdog.progress(number, "generating samples", long=True)
        (stage,) = self.engine.stages
        lines = self._respond(stage, self.mesh, number)
        if self.is_writer:
            self._samples.append(number, lines)
        self.sent = self._attention_sent()

    def _attention_sent(self) -> int:
        models: list[Any] = [stage.model for stage in self.engine.stages]
        recurrent = (model.unified_sp_order.channel for model in models if hasattr(model, "unified_sp_order"))
        return sum(part.sent_bytes for part in (*(model.unified_sp for model in models), *recurrent))

    def _attention_waited(self) -> float:
        """Return the seconds in which attention has waited for messages on this rank since the last call."""
        return sum(cast(Any, stage.model).unified_sp.time_exposed().take() for stage in self.engine.stages)

    def _exchange(self, batch: TokenBatch, share: Tensor) -> float:
        """Sum over ranks losses, bytes and waits of attention, FLOPs, stop requests, balanced rows; return the loss."""
        sent, own = self._attention_sent(), [share.item()]
        own += [sent - self.sent, self._attention_waited(), self._flops(batch), float(self.stop.signal_number > 0)]
        models = [stage.model for stage in self.engine.stages]
        own += [batch.balanced or 0.0]
        own += indexer_losses(models) if self.config.indexer_loss_coef else (0.0, 0.0)
        loss, *sums, stops, balanced, of_indexers, indexers = sum_over_ranks(own, self.mesh, self.device)
        self.sent_in_step, self.waited_in_step, self.flops_in_step = sums
        self.indexer_loss = of_indexers / indexers if indexers else None
        ranks = self.mesh.size("loss") * self.mesh.size("pp")
        self.balanced_rows = None if batch.balanced is None else balanced / ranks
        self.sent, self.stopping = sent, stops > 0
        return loss

    def _enter(self, stage: PreparedStage) -> None:
        """Go on with another stage or layout: its data, and the same weights on its degrees. Collective. Raises
        OutOfMemoryError on every rank, and goes on as before."""
        if _built(stage) != _built(self.stage):
            self.watchdog.progress(self.done + 1, "moving to another layout", long=True)
            if stage.dims not in self.meshes:
                self.meshes[stage.dims] = ParallelMesh.create(stage.dims, self.device.type, groups=self.groups)
            mesh, config, model = self.meshes[stage.dims], stage.config, self.prepared.model_config
            fill = partial(resumed_weights, source=config.model)
            if self.lora is not None:
                fill = partial(first_weights, source=config.model, seed=config.seed)
            hosts = self.prepared.launch.local_world_size
            recipe = EngineRecipe.of(config, model)
            self.engine = moved_engine(self.engine, recipe, mesh, self.device, fill, self.groups, hosts)
            gc.collect()  # modules and their hooks refer to each other
            self.mesh, self.sent = mesh, 0
        self.stage, self.config = stage, stage.config
        self.batches.close()
        self.batches = self._reader()
        identity = _compared(stage)
        if identity != self._evaluations.identity:
            self._evaluations = Evaluations(identity)
        self._predict()

    def _tune(self, tuner: Tuner, number: int) -> None:
        """Go on with the layout that runs step `number`, and at the end of the race say which one stays. Collective."""
        done, remaining = self.done, self.config.steps - self.done
        trial = tuner.next(done, remaining)
        while (config := replace(self.config, **trial.options)) != self.config:
            begin, failed, world = time.perf_counter(), "", self.prepared.launch.world_size
            stage = replace(self.stage, config=config, dims=parallel_dims(config).resolve(world))
            try:
                self._enter(stage)
                chosen = replace(self.prepared.config, **trial.options)
                self.prepared = replace(self.prepared, stages=(stage,), config=chosen)
            except (torch.OutOfMemoryError, ValueError) as error:
                failed = str(error)
            tuner.moved(trial, time.perf_counter() - begin, failed)
            trial = tuner.next(done, remaining) if failed else trial
        if tuner.decision is None:
            return
        self.tuner, reusable = None, replace(self.prepared.reusable, **trial.options)
        self.prepared = replace(self.prepared, reusable=reusable)
        if self.is_writer:
            self.write_files()
            self._tuned.append(number, [tuner.line(self.prepared.launch.world_size)])
            Console(width=max(WIDTH, Console().width)).print(tuner.table().table())

    def _leave_out(self, batch: TokenBatch, failed: str) -> None:
        """Leave the layout of this step out of the race, so that another runs it: no weight has changed. Raises
        OutOfMemoryError where some ranks had memory: they wait in a collective of the step."""
        assert self.tuner is not None
        for stage in self.engine.stages:
            stage.zero_grad()
        self._finish_saving()  # which uses the same group
        try:
            dist.monitored_barrier(self.checkpointer.group, MEMORY_TIMEOUT)
        except RuntimeError as error:
            raise torch.OutOfMemoryError(failed) from error
        self.stage.batches.next_row = batch.numbers.start
        self.tuner.moved(self.tuner.trials[self.tuner.current], 0.0, failed)

    def _predict(self) -> None:
        """Predict a step of the stage, and what this rank sends in it to keep weights and gradients sharded."""
        self.job = predicted_job(self.config, self.prepared)
        parts = fsdp_traffic(self.job, dist.get_rank()).values() if self.job else ()
        self.fsdp_bytes = sum(each.nbytes for sent in parts for each in sent) if self.job else None

    def _resume(self, saved: checkpoints.TrainingState) -> None:
        assert self.prepared.start.checkpoint is not None
        self.restore(self.prepared.start.checkpoint)
        checkpoints.restore_random_state(saved.random, self.device)
        self.done, self.tokens = saved.step, saved.tokens
        self._evaluations.restore(saved.evaluations)

    def _diverged(self, number: int, loss: float, grad_norm: float) -> NoReturn:
        """Export the weights that the last step left, if they are finite, and raise TrainingDiverged on every rank."""
        weights = (weight for stage in self.engine.stages for weight in stage.parameters())
        broken = sum(int((~torch.isfinite(local_tensor(weight))).sum()) for weight in weights)
        if number == 1:
            kept = "No step came before, so nothing was saved: the initial weights or the data are broken"
        elif sum_over_ranks([broken], self.mesh, self.device)[0]:
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

    def _export(self, result: str, merged: str = "") -> list[str]:
        state, config = self.engine.state(), self.config
        return self.write_model(
            {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")},
            [stage.model for stage in self.engine.stages],
            self.prepared.tokenizer,
            getattr(torch, config.dtype),
            result=result,
            merged=merged if config.lora_merge else "",
            lora=self.lora,
            base=config.model,
            base_config=self.prepared.model_config if config.rope_scaling != "none" or config.add_tokens else None,
        )

    def _flops(self, batch: TokenBatch) -> float:
        """Return this rank's share of the FLOPs of its rows; 0 if nothing is known to compare them with."""
        if self.peak is None:
            return 0.0
        rows = len(batch.cu_seqlens)
        flops = training_flops(
            self.prepared.shape.facts,
            matmul_parameters=self.prepared.shape.matmul_parameters,
            tokens=rows * self.config.seq_len,
            cu_seqlens=batch.cu_seqlens,
            adapter_parameters=self.adapter_parameters,
        )
        return flops / (self.mesh.size("sp") * self.mesh.size("pp"))


def _built(stage: PreparedStage) -> tuple[object, ...]:
    """Return what an engine is built by, of that in which stages and layouts differ."""
    return stage.dims, *(getattr(stage.config, name) for name in OPTIONS if name != "batch_size")


def _compared(stage: PreparedStage) -> str:
    """Return what losses of which the lowest is best have in common."""
    return stage.held_out[0].identity if stage.held_out else ""


def _long_documents(path: str, source: WholeRows) -> Iterator[str]:
    """Say what becomes of documents that are longer than a row, if there are any."""
    if not source.long:
        return
    held = source.store.manifest
    of_all = f"{source.long} of {held.documents} documents are longer than --seq-len = {source.seq_len}"
    if not held.masked:
        yield f"packing: {path}: {of_all}: they are cut into several"
        return
    gone = held.tokens - source.tokens
    empty = f"; {source.left_out} of them are left out, because no target is left" if source.left_out else ""
    yield f"packing: {path}: {of_all}: their ends are left out, {count(gone)} tokens{empty}"
