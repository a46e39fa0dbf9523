"""The steps of a run, with its log, its checkpoints and its end: the same for supervised training and RLHF."""

from __future__ import annotations

import math
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from torch import Tensor

from parallel import Checkpointer, latest
from usp.config import RunConfig
from usp.run.failures import ConfigurationError, Stopped
from usp.run.metrics import Record, RunLog, open_wandb
from usp.run.signals import StopRequest
from usp.run.watchdog import Watchdog

from .resume import CHECKPOINTS

FINAL_RATE = 0.1  # of the peak


def learning_rate(step: int, peak: float, warmup_steps: int, steps: int) -> float:
    """Return the rate of step 1, 2, ...: linear to `peak` over `warmup_steps`, then a cosine to a tenth of it."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / (steps - warmup_steps)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


class TrainingLoop(ABC):
    """A run in its folder. Every rank calls every method, in the same order.

    Attributes:
        done: steps that are done.
        stopping: whether a signal on any rank asked to stop; every rank sets it alike in `step`.
    """

    def __init__(
        self, config: RunConfig, steps: int, folder: Path, device_type: str, stop: StopRequest, watchdog: Watchdog
    ) -> None:
        self.folder, self.stop, self.watchdog = folder, stop, watchdog
        self.is_writer = dist.get_rank() == 0
        self.done, self.stopping = 0, False
        self.checkpointer = Checkpointer(folder / CHECKPOINTS, config.keep_checkpoints, device_type)
        self._run_config, self._steps = config, steps

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
    def export(self) -> None:
        """Write the trained model."""

    @abstractmethod
    def summary(self) -> Iterator[str]:
        """Yield the lines that say what is about to run."""

    def trace(self, number: int) -> AbstractContextManager[None]:
        """Return the context in which step `number` runs, for profiling."""
        return nullcontext()

    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the YAML files of the run's folder."""
        return {"config.yaml": asdict(self._run_config)}

    def run(self) -> None:
        """Run the remaining steps with their checkpoints, then write the trained model."""
        if self.is_writer:
            self._begin_folder()
        with self._log() as log:
            for number in range(self.done + 1, self._steps + 1):
                with self.trace(number):
                    record = self.step(number)
                if log is not None:
                    log.record(record)
                self._keep(number)
        self.watchdog.progress(self.done, "writing the model", long=True)
        self.checkpointer.wait()
        self.export()

    def load(self, checkpoint: Path) -> dict[str, Tensor]:
        """Fill `state` from a checkpoint and return it.

        Raises:
            ConfigurationError: for a checkpoint that does not match.
        """
        state = self.state()
        try:
            self.checkpointer.load(checkpoint, state)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        return state

    def _keep(self, number: int) -> None:
        """Write a checkpoint where one is due, and end the run where a signal asked for it."""
        every = self._run_config.checkpoint_every
        due = bool(every) and (number % every == 0 or number == self._steps)
        if due or self.stopping:
            self.watchdog.progress(number, "checkpoint", long=True)
            self.checkpointer.save(number, self.state(), self.extra())
        if self.stopping and number < self._steps:
            self.checkpointer.wait()
            raise Stopped(self.stop.signal_number or signal.SIGTERM, number, latest(self.folder / CHECKPOINTS))

    def _begin_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (self.folder / name).write_text(yaml.safe_dump(dict(content), sort_keys=False))
        print("\n".join((*self.summary(), f"run: {self.folder}")), flush=True)

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
            wandb=open_wandb(config.wandb_project, self.folder, asdict(config)),
        )
