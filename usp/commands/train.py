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

    compiles = config.compile is None and config.device != "cpu" and torch.cuda.is_available()
    config, tuner = replace(config, compile=bool(config.compile)), None
    if config.plan != "none":
        from usp.planning.tune import tuner_for

        tuner = tuner_for(config, launch, compiles)
        config = tuner.trials[0].config
    elif compiles:
        config = compiled_if_possible(config, launch.world_size)
    prepared, sample = prepare(config, launch), None
    if config.sample_every:
        from usp.rlhf.sampling import prepare_sampler

        sample = prepare_sampler(prepared)
    train(prepared, launch, stop, error_file, sample, tuner if tuner and len(tuner.trials) > 1 else None)


program = Command("train.py", TrainConfig, _run, unset=("compile",))
main = program.main
