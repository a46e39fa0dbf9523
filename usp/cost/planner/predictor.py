"""The time and memory models as the planner asks them: of configurations, each worked out once."""

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

_AS_IN_CONFIG = ("micro_batches", "zero", "ac", "ac_offload", "mlp_tile", "tp_sequence_parallel", "pp_schedule")


def predictor_for(job: Job, hardware: Hardware) -> Predictor:
    """Of configurations that differ from `job` in what a planner chooses, on as many ranks."""

    @cache
    def job_like(config: TrainConfig) -> Job:
        dims = parallel_dims(config, config.ep).resolve(job.world_size)
        values = {name: getattr(config, name) for name in _AS_IN_CONFIG}
        return replace(job, dims=dims, rows=config.batch_size, **values)

    @cache
    def peak_bytes(config: TrainConfig) -> int:
        # Of the pipeline's stages the first has most activations in flight, the last the vocabulary's loss.
        per_stage = job.world_size // config.pp
        ranks = {0, (config.pp - 1) * per_stage}
        return max(footprint(job_like(config), rank).peak.total for rank in ranks)

    return Predictor(cache(lambda config: step_seconds(job_like(config), hardware)), peak_bytes)
