"""The time and memory models as cached functions of a configuration, for the planner."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from parallel import Hardware
from usp.config import TrainConfig
from usp.cost.job import Job
from usp.cost.memory.footprint import footprint
from usp.cost.time.step_time import step_seconds
from usp.train.validate import parallel_dims

from .search import Predictor


def predictor_for(job: Job, hardware: Hardware) -> Predictor:
    """Return a predictor for configurations that differ from `job` in what the planner chooses, on as many ranks."""

    @cache
    def job_like(config: TrainConfig) -> Job:
        return replace(job, config=config, dims=parallel_dims(config, config.ep).resolve(job.world_size))

    @cache
    def peak_bytes(config: TrainConfig) -> int:
        # The first pipeline stage has most activations in flight, the last has the vocabulary loss.
        ranks = job_like(config).ranks("pp", 0)
        return max(footprint(job_like(config), rank).peak.total for rank in {ranks[0], ranks[-1]})

    return Predictor(cache(lambda config: step_seconds(job_like(config), hardware)), peak_bytes)
