"""The time and memory models as cached functions of a configuration, for the planner."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from parallel import Hardware
from usp.config import TrainConfig
from usp.cost.job import Job
from usp.cost.memory.footprint import footprint
from usp.cost.time.step_time import step_seconds
from usp.cost.traffic.order import first_ranks
from usp.train.validate import parallel_dims

from .search import Predictor

_FIELDS = ("micro_batches", "zero", "ac", "ac_offload", "mlp_tile", "tp_sequence_parallel", "pp_schedule")


def predictor_for(job: Job, hardware: Hardware) -> Predictor:
    """Return a predictor for configurations that differ from `job` in what the planner chooses, on as many ranks."""

    @cache
    def job_like(config: TrainConfig) -> Job:
        dims = parallel_dims(config, config.ep).resolve(job.world_size)
        return replace(job, dims=dims, rows=config.batch_size, **{name: getattr(config, name) for name in _FIELDS})

    @cache
    def peak_bytes(config: TrainConfig) -> int:
        # The first pipeline stage has most activations in flight, the last has the vocabulary loss.
        ranks = first_ranks(job_like(config))
        return max(footprint(job_like(config), rank).peak.total for rank in {ranks[0], ranks[-1]})

    return Predictor(cache(lambda config: step_seconds(job_like(config), hardware)), peak_bytes)
