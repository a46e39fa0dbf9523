"""train.py: train a causal language model."""

from __future__ import annotations

from dataclasses import replace

import torch

from usp.config import TrainConfig
from usp.run.launch import Launch, StopRequest

from .flags import Command


def _run(config: TrainConfig, launch: Launch, stop: StopRequest, error_file: str | None) -> None:
    from usp.train.prepare import prepare
    from usp.train.resolve import compiled_if_possible
    from usp.train.trainer import train

    given, config = config.compile is not None, replace(config, compile=bool(config.compile))
    if config.plan == "auto":
        from usp.planning.choice import planned

        config = planned(config, launch)
    if not given and config.device != "cpu" and torch.cuda.is_available():
        config = compiled_if_possible(config, launch.world_size)
    prepared, sample = prepare(config, launch), None
    if config.sample_every:
        from usp.rlhf.sampling import prepare_sampler

        sample = prepare_sampler(prepared)
    train(prepared, launch, stop, error_file, sample)


program = Command("train.py", TrainConfig, _run, unset=("compile",))
main = program.main
