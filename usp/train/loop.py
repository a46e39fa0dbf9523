"""The steps of a run, with its log, its checkpoints and its end: the same for supervised training and RLHF."""

from __future__ import annotations

import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from usp.config import CommonConfig
from usp.data.tokenizer import Tokenizer
from usp.hf.export import save_weights
from usp.hf.lora import Lora, MergedWeights, save_adapter
from usp.hf.models import ModelConfig
from usp.hf.tokenizers import save_tokenizer
from usp.parallel import Checkpointer, DamagedCheckpoint, complete_checkpoints, latest, verify
from usp.presets import PRESETS
from usp.run.failures import CheckpointFailed, ConfigurationError, Stopped, TrainingDiverged, UserCodeFailed
from usp.run.launch import StopRequest
from usp.run.metrics import Record, RunLog, open_trackers, seconds
from usp.run.output import LineFile, warn, working
from usp.run.watchdog import Watchdog

from .build import export_dtype
from .checkpoints import BEST, CHECKPOINTS, MODEL, from_first_rank
from .step import Evaluations


class TrainingLoop(ABC):
    """A run in its folder. Every rank calls every method, in the same order.

    A checkpoint that cannot be saved costs no step and not the model: a warning says so after the next step, and
    later steps try again, at first after one step and then after twice as many each time.

    result: the folder of the run to which the trained weights are written. done: steps that are done. stopping: whether
    a signal on any rank asked to stop; every rank sets it alike in `step`.
    """

    def __init__(
        self, config: CommonConfig, steps: int, folder: Path, device_type: str, stop: StopRequest, watchdog: Watchdog
    ) -> None:
        self.folder, self.stop, self.watchdog = folder, stop, watchdog
        self.is_writer = dist.get_rank() == 0
        self.result, self.done, self.stopping = MODEL, 0, False
        self.checkpointer = Checkpointer(folder / CHECKPOINTS, config.keep_checkpoints, device_type)
        self._run_config, self._steps = config, steps
        self._saved = 0  # the last step of which a checkpoint was begun
        self._failures, self._retry = 0, 0  # saves that failed since the last that did not; the step of the next try

    @abstractmethod
    def step(self, number: int) -> Record:
        """Run step `number` (from 1)."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint holds."""

    @abstractmethod
    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides tensors. Collective."""

    @abstractmethod
    def restore(self, checkpoint: Path) -> None:
        """Load weights and optimizer states from a checkpoint that has been verified."""

    @abstractmethod
    def export(self) -> None:
        """Write the trained model."""

    @abstractmethod
    def write_best(self) -> None:
        """Write the weights of this moment as the best ones."""

    @abstractmethod
    def summary(self) -> Iterator[str]:
        """Yield the lines that say what is about to run."""

    @abstractmethod
    def evaluations(self) -> Evaluations | None:
        """Return the evaluations of which the best is kept."""

    def ends_early(self) -> bool:
        """Return whether no step is to follow, though some are left; alike on every rank."""
        return False

    def best_first(self) -> Sequence[int]:
        """Return the steps that were evaluated, from the best on; the checkpoint of the best is kept."""
        evaluations = self.evaluations()
        return evaluations.best_first() if evaluations else ()

    def export_best(self) -> None:
        """Write the weights of the best evaluation, from its checkpoint if it is not the last step."""
        kept = from_first_rank(lambda: complete_checkpoints(self.folder / CHECKPOINTS)) if self.best_first() else {}
        best = next((step for step in self.best_first() if step in kept or step == self.done), None)
        if best is None:
            return
        if best != self.done:
            try:
                verify(kept[best])
            except (DamagedCheckpoint, OSError) as error:
                self._warn(f"{error}; {self.folder / BEST} is not written")
                return
            self.restore(kept[best])
        self.write_best()
        if self.is_writer:
            evaluations = self.evaluations()
            assert evaluations is not None
            print(f"best: {self.folder / BEST}, of step {best}, {evaluations.text(best)}", flush=True)

    def write_model(
        self,
        weights: Mapping[str, Tensor],
        models: Sequence[Any],
        tokenizer: Tokenizer,
        dtype: torch.dtype,
        *,
        result: str,
        merged: str = "",
        lora: Lora | None = None,
        base: str,
        base_config: ModelConfig | None = None,
        generates: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> list[str]:
        """Write trained weights and the tokenizer to folders of the run, and return their names.

        models: transformers models, with the adapters if there are any; dtype: in which they compute.
        result: the folder of the weights or, with LoRA, of the adapters.
        merged: with adapters, the folder of the merged model; empty: none.
        base: the model that training began with; base_config: its configuration, if the run changed that.
        generates: whether the model generates: it has a generation configuration, and maybe layers that draft tokens.
        group: the ranks that hold the weights; folders are complete when its first rank returns.
        """
        config, beside = self._run_config, partial(save_tokenizer, tokenizer)

        def write(whole: Mapping[str, Tensor], name: str) -> None:
            carried = save_weights(
                whole,
                self.folder / name,
                config=models[0].config,
                generation_config=models[0].generation_config if generates else None,
                dtype=export_dtype(config, dtype),
                group=group,
                beside=beside,
                source=source if generates and base not in PRESETS else None,
            )
            if carried and dist.get_rank(group) == 0:
                print(f"{name}: with {carried}", flush=True)

        source = Path(base).expanduser().resolve()
        written = [result]
        if lora is None:
            write(weights, result)
        else:
            of_adapters = export_dtype(config, torch.float32)
            save_adapter(
                weights,
                self.folder / result,
                lora=lora,
                base=source,
                config=base_config,
                dtype=of_adapters,
                group=group,
                beside=beside,
            )
            if merged:
                write(MergedWeights(models, lora), merged)
                written.append(merged)
        return written

    def trace(self, number: int) -> AbstractContextManager[None]:
        """Return the context in which step `number` runs, for profiling."""
        return nullcontext()

    def logs(self) -> Iterable[LineFile]:
        """Return the files that steps append to, besides the metrics."""
        return ()

    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the YAML files of the run's folder."""
        return {"config.yaml": asdict(self._run_config)}

    def run(self) -> None:
        """Run the remaining steps with their checkpoints, write the trained model, and see the last save through.
        Raises CheckpointFailed, with the model written, and Stopped."""
        self._saved = self.done
        if self.is_writer:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write_files()
            print("\n".join((*self.summary(), f"run: {self.folder}")), flush=True)
        try:
            with self._log() as log:
                self._train(log)
        finally:
            for file in self.logs():
                file.close()
        self.watchdog.progress(self.done, "writing the model", long=True)
        with working("writing the model", shown=self.is_writer):
            try:
                self.export()
            except Exception:
                self._finish_saving()
                raise
            failure = self._see_through()
            self.export_best()
        if failure:
            raise CheckpointFailed(f"{failure}; the trained model is written: {self.folder / self.result}")

    def _train(self, log: RunLog | None) -> None:
        self.stop.saves = True
        try:
            for number in range(self.done + 1, self._steps + 1):
                if self.ends_early():
                    break
                with self.trace(number):
                    record = self.step(number)
                if log is not None:
                    log.record(record)
                self._keep(number)
        except (TrainingDiverged, UserCodeFailed):
            self._finish_saving()
            raise
        finally:
            self.stop.saves = False

    def load(self, checkpoint: Path, more: Mapping[str, Tensor] | None = None) -> None:
        """Fill `state`, and `more` tensors, from a checkpoint that has been verified. Raises ConfigurationError for one
        that does not match."""
        try:
            self.checkpointer.load(checkpoint, {**self.state(), **(more or {})}, verified=True)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error

    def _keep(self, number: int) -> None:
        """Write a checkpoint where one is due, say where one failed, and end the run where a signal asked for it."""
        every = self._run_config.checkpoint_every
        if self.checkpointer.finished() and (failure := self._settle()):
            self._retry = min(number + min(2 ** (self._failures - 1), every), self._steps)
            self._warn(f"{failure}; the run goes on, and tries again after step {max(self._retry, number)}")
        last = number == self._steps or self.ends_early()
        due = bool(every) and (number % every == 0 or last or number in self.best_first()[:1])
        if due or self.stopping or number == self._retry:
            self._save()
        if self.stopping and number < self._steps:
            failure = self._see_through()
            newest = latest(self.folder / CHECKPOINTS)
            raise Stopped(self.stop.signal_number or signal.SIGTERM, number, newest, failure)

    def _save(self) -> None:
        self.watchdog.progress(self.done, "checkpoint", long=True)
        if failure := self._settle():
            self._warn(f"{failure}; that of step {self.done} follows")
        begin = time.perf_counter()
        self.checkpointer.save(self.done, self.state(), self.extra(), self.best_first())
        if self.is_writer and self.done == 2 * self._run_config.checkpoint_every:  # the first one sets up more
            print(f"checkpoint: steps wait {seconds(time.perf_counter() - begin)} for its copy", flush=True)
        self._saved = self.done

    def keep_done(self) -> str:
        """Write a checkpoint of the last step that is done, unless there is one, and return what is kept. Collective.
        For a step that fails on every rank before it changes anything."""
        failure = self._see_through()
        if self._saved != self.done:
            self._save()
            failure = self._see_through()
        newest = latest(self.folder / CHECKPOINTS)
        kept = (
            f"checkpoint {newest}: continue with --resume {self.folder}" if newest else "no checkpoint: no step is done"
        )
        return f"{failure}; {kept}" if failure else kept

    def _settle(self) -> str:
        """Wait for the save in progress, if there is one, and return why it failed, or nothing; alike on every rank."""
        try:
            if self.checkpointer.wait():
                self._failures = 0
        except RuntimeError as error:
            self._failures += 1
            return str(error)
        return ""

    def _finish_saving(self) -> None:
        """Wait for the save in progress, which would end with the process, and say if it failed."""
        if failure := self._settle():
            self._warn(failure)

    def _see_through(self) -> str:
        """Wait for the save in progress, and try once more if it failed; return why that failed, too, or nothing."""
        self.watchdog.progress(self.done, "checkpoint", long=True)
        if failure := self._settle():
            self._warn(f"{failure}; trying again")
            self._save()
            return self._settle()
        return ""

    def _warn(self, message: str) -> None:
        if self.is_writer:
            warn(message)

    def write_files(self) -> None:
        """Write `files`, on the rank that writes the run's folder."""
        for name, content in self.files().items():
            new = self.folder / f"{name}.new"
            try:
                new.write_text(yaml.safe_dump(dict(content), sort_keys=False))
                new.replace(self.folder / name)
            except OSError as error:
                warn(f"{self.folder / name} cannot be written: {error}; the run goes on")

    def _log(self) -> RunLog | nullcontext[None]:
        if not self.is_writer:
            return nullcontext()
        config = self._run_config
        return RunLog(
            self.folder,
            steps=self._steps,
            log_every=config.log_every,
            out=sys.stdout,
            after=self.done,
            ranks=dist.get_world_size(),
            trackers=open_trackers(config, self.folder),
            phase=lambda: self.watchdog.phase,
        )
