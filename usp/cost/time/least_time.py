"""A lower bound of a step's time, for searches: its compute, bubble and optimizer, without any communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from parallel import Hardware, bubble_fraction, rank_stages, stage_layers, stages_per_rank
from usp.cost.job import Job

from .attention_time import attention_passes
from .compute import OPTIMIZER_BYTES, head_seconds
from .pass_seconds import Layers, different_layers
from .transfers import Overlap


@dataclass(frozen=True)
class LayerCompute:
    """The compute of a micro-batch on the slowest rank.

    Attributes:
        passes: of each different layer, without attention's kernels, for `step_seconds`.
        layers: seconds of each different layer, attention's kernels included.
        loss: seconds of the loss.
    """

    passes: Layers
    layers: Mapping[int, float]
    loss: float

    @staticmethod
    def of(job: Job, hardware: Hardware) -> LayerCompute:
        # Where ranks share processors, those with less attention help the slowest.
        counts = 1.0 if hardware.crowding == 1 else 0.0
        windows = job.model.facts.windows
        kernels = {window: counts * _kernels(job, hardware, window) for window in set(windows)} if counts else {}
        passes = different_layers(job, hardware)
        layers = {
            index: sum(one.total for one in layer) + kernels.get(windows[index], 0.0) for index, layer in passes.items()
        }
        return LayerCompute(passes, layers, sum(part.total for part in head_seconds(job, hardware)))


def least_seconds(job: Job, hardware: Hardware, compute: LayerCompute) -> float:
    """Return a lower bound of `step_seconds`.

    compute: of a job with the same micro-batches, ring, ulysses, tp, ep and recomputation.
    """
    shards = job.dims.pp * job.degree("fsdp") * job.dims.tp
    optimizer = hardware.memory_seconds(OPTIMIZER_BYTES * job.model.numel / shards)
    if hardware.crowding > 1:
        every = compute.loss + sum(compute.layers[index] for index in job.model.alike)
        return job.config.micro_batches * every / job.dims.pp + optimizer
    slowest = max(
        sum(number * compute.layers[index] for index, number in layers) + (compute.loss if loss else 0.0)
        for layers, loss in _shares(job.model.alike, job.config.pp_schedule, job.dims.pp)
    )
    fraction = bubble_fraction(job.config.pp_schedule, job.dims.pp, job.config.micro_batches)
    return job.config.micro_batches * slowest / (1 - fraction) + optimizer


def _kernels(job: Job, hardware: Hardware, window: int) -> float:
    forward, backward = attention_passes(job, hardware, Overlap(), job.slowest_ranks[0], window)
    return forward.kernels * (2 if job.config.ac == "full" else 1) + backward.kernels


@lru_cache(maxsize=256)
def _shares(alike: tuple[int, ...], schedule: str, pp: int) -> set[tuple[tuple[tuple[int, int], ...], bool]]:
    """Return the different shares of pipeline ranks: (layers with their numbers, whether the loss is among them)."""
    cuts = stage_layers(len(alike), pp * stages_per_rank(schedule))
    found = set()
    for place in range(pp):
        stages = rank_stages(schedule, pp, place)
        layers = Counter(alike[index] for stage in stages for index in cuts[stage])
        found.add((tuple(layers.items()), len(cuts) - 1 in stages))
    return found
