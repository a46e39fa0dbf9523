"""Lower bounds of a step's time, for searches: without and with the traffic of parameters and gradients.

Neither has pipeline messages and sums of scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from parallel import Hardware, bubble_fraction, overlap_of, rank_stages, stage_layers, stages_per_rank
from usp.cost.job import Job
from usp.cost.traffic.attention_traffic import attention_traffic
from usp.cost.traffic.pass_traffic import layer_traffic
from usp.cost.traffic.sharding import fsdp_traffic

from .attention_time import AttentionSeconds, attention_passes
from .compute import OPTIMIZER_BYTES, head_seconds
from .host import host_copies, sharing
from .pass_seconds import Layers, different_layers, parameter_transfers
from .transfers import OVERLAP, overlapped_in_pieces, sent_seconds

Attends = Mapping[int, tuple[AttentionSeconds, AttentionSeconds]]  # by window: of a micro-batch's (forward, backward)


@dataclass(frozen=True)
class LayerCompute:
    """The compute of a micro-batch on the slowest rank, in seconds.

    Attributes:
        passes: of each different layer, without attention's kernels, for `step_seconds`.
        forward, backward: of each different layer, attention's kernels included; the backward with recomputation.
        loss: of the loss.
    """

    passes: Layers
    forward: Mapping[int, float]
    backward: Mapping[int, float]
    loss: float

    @staticmethod
    def of(job: Job, hardware: Hardware, attends: Attends) -> LayerCompute:
        """Compute it; links between devices have no part in it."""
        forward, backward, passes = {}, {}, different_layers(job, hardware)
        windows, again = job.model.facts.windows, job.config.ac == "full"
        for index, layer in passes.items():
            ahead, back = (one.kernels for one in attends[windows[index]]) if attends else (0.0, 0.0)
            forward[index] = layer.forward.total + ahead
            backward[index] = layer.recompute.total + layer.backward.total + back + (ahead if again else 0.0)
        return LayerCompute(passes, forward, backward, sum(part.total for part in head_seconds(job, hardware)))


def attends_of(job: Job, hardware: Hardware) -> Attends:
    """Return a layer's attention on the slowest rank by window, the same for all recomputation.

    Empty where ranks share processors: those with less attention help the slowest.
    """
    windows = set(job.model.facts.windows) if hardware.crowding == 1 else ()
    return {window: attention_passes(job, hardware, OVERLAP, job.slowest_ranks[0], window) for window in windows}


def least_exposed(job: Job, hardware: Hardware, attends: Attends) -> dict[int, float]:
    """Return the seconds of a micro-batch in which each different layer waits for its activations' traffic."""
    if hardware.crowding > 1:
        return dict.fromkeys(set(job.model.alike), 0.0)
    rank, found = job.slowest_ranks[0], {}
    for index in set(job.model.alike):
        window = job.model.facts.windows[index]
        sent = layer_traffic(job, index, attention_traffic(job, rank, window))
        found[index] = sum(
            sent_seconds(job, hardware, part, rank)
            for parts in sent.values()
            for part in parts
            if part.axis != "ring" and job.degree(part.axis) > 1
        )
        if job.dims.ring > 1:
            forward, backward = attends[window]
            times = 2 if job.config.ac == "full" else 1
            found[index] += times * forward.messages.exposed + backward.messages.exposed
    return found


def least_seconds(job: Job, hardware: Hardware, compute: LayerCompute, exposed: Mapping[int, float]) -> float:
    """Return a lower bound of `step_seconds` without the traffic of parameters and gradients.

    compute, exposed: of a job with the same micro-batches, ring, ulysses, tp, ep and recomputation.
    """
    optimizer = _optimizer(job, hardware)
    layers = {index: compute.forward[index] + compute.backward[index] + exposed[index] for index in exposed}
    if hardware.crowding > 1:
        every = compute.loss + sum(layers[index] for index in job.model.alike)
        return job.config.micro_batches * every / job.dims.pp + optimizer
    slowest = max(
        sum(number * layers[index] for index, number in kinds) + (compute.loss if loss else 0.0)
        for kinds, loss in _shares(job.model.alike, job.config.pp_schedule, job.dims.pp)
    )
    return job.config.micro_batches * slowest / (1 - _bubble(job)) + optimizer


Transfers = tuple[tuple[str, int, float, float], ...]  # (pass, how often, seconds of all, `overlap` of their links)


def least_transfers(job: Job, hardware: Hardware) -> Transfers:
    """Return the gathers of parameters and reductions of gradients of the first stage."""
    rank = job.slowest_ranks[0]
    sent = [(kind, part) for kind, part in fsdp_traffic(job, rank) if job.degree(part.axis) > 1 and part.axis != "tp"]
    free = {axis: overlap_of(hardware, job.linked(job.ranks(axis, rank))) for axis in {part.axis for _, part in sent}}
    found = []
    for kind in ("forward", "backward"):
        for times, by_axis in parameter_transfers(job, hardware, [p for k, p in sent if k == kind], rank).items():
            seconds = sum(by_axis.values())
            mean = sum(each * free[axis] for axis, each in by_axis.items()) / seconds if seconds else 1.0
            found.append((kind, times, seconds, mean))
    return tuple(found)


def least_sharded_seconds(
    job: Job,
    hardware: Hardware,
    compute: LayerCompute,
    exposed: Mapping[int, float],
    transfers: Transfers,
    saved: int | None = None,
) -> float:
    """Return a lower bound of `step_seconds` with the traffic of the first stage's parameters and gradients, and with
    its copies to the host and back.

    compute, exposed: as for `least_seconds`. transfers: of a job with the same degrees, ZeRO stage and schedule. saved:
    `saved_bytes` of the first stage, if the caller has them.
    """
    least = least_seconds(job, hardware, compute, exposed)
    if hardware.crowding > 1:
        return least
    stages, number = job.stages(job.slowest_ranks[0]), job.config.micro_batches
    kinds = sum((job.kinds(stage) for stage in stages), Counter[int]())
    loss = compute.loss if len(job.stage_layers) - 1 in stages else 0.0
    hiding = {
        "forward": loss + sum(each * compute.forward[index] for index, each in kinds.items()),
        "backward": sum(each * compute.backward[index] for index, each in kinds.items()),
    }
    busy = number * (sum(hiding.values()) + sum(each * exposed[index] for index, each in kinds.items()))
    for kind, times, seconds, free in transfers:
        compute_time = hiding[kind] if hardware.streams else 0.0
        once = overlapped_in_pieces(seconds / times, compute_time, kinds.total() + 1)
        busy += times * once.with_free_part(free).exposed
    copies = host_copies(job, hardware, job.slowest_ranks[0], hiding["forward"], hiding["backward"], saved=saved)
    busy += sum(transfers.exposed for transfers in copies.values())
    return max(least, busy / (1 - _bubble(job)) + _optimizer(job, hardware))


def _optimizer(job: Job, hardware: Hardware) -> float:
    nbytes = OPTIMIZER_BYTES * job.model.numel / (job.dims.pp * job.degree("fsdp") * job.dims.tp)
    if job.config.optim_offload:
        return hardware.host_memory_seconds(nbytes, sharing(job, hardware))
    return hardware.memory_seconds(nbytes)


def _bubble(job: Job) -> float:
    return bubble_fraction(job.config.pp_schedule, job.dims.pp, job.config.micro_batches)


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
