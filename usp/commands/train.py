"""train.py: train a causal language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from usp.config import TrainConfig
from usp.run.launch import Launch
from usp.run.signals import StopRequest

from .command import Command

if TYPE_CHECKING:
    from usp.train.prepare import PreparedRun


def prepare_run(config: TrainConfig, launch: Launch) -> PreparedRun:
    """Prepare a run: choose its layout under --plan auto, and predict the bytes that FSDP2 sends on this rank."""
    from usp.cost.job import job_of
    from usp.cost.planner.choice import planned
    from usp.cost.traffic.sharding import fsdp_sent_bytes
    from usp.train.prepare import prepare

    prepared = prepare(planned(config, launch), launch)
    config = prepared.config
    if config.engine == "deepspeed" or config.lora_rank or config.optimizer != "adamw":  # their messages: not modeled
        return prepared
    job = job_of(config, prepared.model_config, launch.world_size, prepared.shape)
    return replace(prepared, predicted_fsdp_bytes=fsdp_sent_bytes(job, launch.rank))


def _load() -> Callable[[TrainConfig, Launch, StopRequest, str | None], None]:
    from usp.train.trainer import train

    return lambda config, launch, stop, error_file: train(prepare_run(config, launch), launch, stop, error_file)


program = Command("train.py", TrainConfig, _load)
main = program.main
