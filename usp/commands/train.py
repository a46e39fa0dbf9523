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
    from usp.train.prepare import Predicted, PreparedRun


def prepare_run(config: TrainConfig, launch: Launch) -> PreparedRun:
    """Prepare a run: choose its layout under --plan auto, and predict its steps as far as there are formulas."""
    from usp.cost.planner.choice import planned
    from usp.train.prepare import prepare

    prepared = prepare(planned(config, launch), launch)
    config = prepared.config
    if config.engine == "deepspeed" or config.lora_rank or config.optimizer != "adamw":  # their messages: not modeled
        return prepared
    return replace(prepared, predicted=tuple(_predicted(stage.config, prepared, launch) for stage in prepared.stages))


def _predicted(config: TrainConfig, prepared: PreparedRun, launch: Launch) -> Predicted:
    """Predict the steps of a stage; rank 0 says what it found."""
    import torch

    from usp.cost.job import job_of
    from usp.cost.planner.choice import hardware_here
    from usp.cost.run_summary import run_summary
    from usp.cost.traffic.sharding import fsdp_sent_bytes
    from usp.hf.models import formula_violation
    from usp.train.prepare import Predicted

    device = prepared.device
    job = job_of(config, prepared.model_config, launch.world_size, prepared.shape)
    sent = fsdp_sent_bytes(job, launch.rank)
    if launch.rank or formula_violation(config.model, prepared.model_config):
        return Predicted(sent)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    try:
        hardware = hardware_here("auto", device, launch)
    except ValueError:  # not known: `usp calibrate` measures it
        hardware = None
    return Predicted(sent, tuple(run_summary(job, memory, hardware)))


def _load() -> Callable[[TrainConfig, Launch, StopRequest, str | None], None]:
    from usp.train.trainer import train

    return lambda config, launch, stop, error_file: train(prepare_run(config, launch), launch, stop, error_file)


program = Command("train.py", TrainConfig, _load)
main = program.main
