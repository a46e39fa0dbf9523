"""Jobs of predictions from flags."""

from __future__ import annotations

from typing import Any

from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.predict.job import ONE_DOCUMENT, Data, Job
from usp.train.resolve import job_of


def job(world_size: int, data: Data = ONE_DOCUMENT, **flags: Any) -> Job:
    config = TrainConfig(**flags)
    return job_of(config, load_model_config(config.model), world_size, data=data)


def llama(world_size: int = 16, data: Data = ONE_DOCUMENT, **flags: Any) -> Job:
    return job(world_size, data, **{"model": "llama3-8b", "seq_len": 65536, "zero": 1, **flags})
