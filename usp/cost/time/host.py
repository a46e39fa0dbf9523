"""The time that a device spends on its host: copies of what is offloaded, an update there, and kernel launches.

Copies run on streams of their own, with one layer of look-ahead: a layer's compute hides the copy of what the previous
layer saved, and in the backward the copy of what the next layer to run needs. The devices of a host copy at once and
share its memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from parallel import Hardware
from usp.cost.job import Job, LayerShape
from usp.cost.memory.activations import LayerActivations, different_activations
from usp.cost.traffic.sharding import FLOAT32

from .compute import OPTIMIZER_BYTES, Seconds, head_seconds, held_elements, layer_products
from .transfers import TransferSeconds, overlapped_in_pieces

# Operators of an eager layer's forward besides products; a backward has twice as many.
LAYER_LAUNCHES = 2 * 8 + 2 * 5 + 2 + 1 + 2  # two norms, two rotations, an MLP's activation, attention, two additions
EXPERT_LAUNCHES = 20  # choosing experts, sorting rows by expert and back
RING_LAUNCHES = 8  # per step after the first: two messages, attention, merging its output and lse


def sharing(job: Job, hardware: Hardware) -> int:
    """Return the number of ranks on a host."""
    return min(hardware.host_devices, job.world_size)


def saved_bytes(job: Job, rank: int, layers: Mapping[int, LayerActivations] | None = None) -> int:
    """Return what --ac-offload copies to the host in a micro-batch's forward, and back in its backward.

    layers: `different_activations`, if the caller has them.
    """
    if not job.config.ac_offload:
        return 0
    layers = layers or different_activations(job)
    return sum(number * layers[kind].kept for stage in job.stages(rank) for kind, number in job.kinds(stage).items())


def host_copies(
    job: Job,
    hardware: Hardware,
    rank: int,
    forward: float,
    backward: float,
    *,
    saved: int | None = None,
) -> dict[str, TransferSeconds]:
    """Return the copies of a step between a device and its host, as the axis "host"; empty if nothing is offloaded.

    ZeRO-3 copies the weights of each gather, the other stages once; stages 2 and 3 copy the gradients of each backward,
    and those that are added to earlier ones are exposed, because the host adds them.

    Args:
        forward, backward: seconds of compute of a micro-batch, recomputation included, of which that of layers hides
            copies.
        saved: `saved_bytes`, if the caller has them.
    """
    saved = saved_bytes(job, rank) if saved is None else saved
    number, zero = job.config.micro_batches, job.config.zero
    shard = FLOAT32 * held_elements(job, rank) if job.config.optim_offload else 0
    if not saved + shard:
        return {}
    if len(job.stage_layers) - 1 in job.stages(rank):
        of_head = head_seconds(job, hardware)
        forward, backward = (max(0.0, c - head.total) for c, head in zip((forward, backward), of_head, strict=True))
    layers = sum(len(job.stage_layers[stage]) for stage in job.stages(rank))
    devices = sharing(job, hardware)

    def copies(times: int, compute: float, out: float, back: float) -> TransferSeconds:
        seconds = hardware.host_copy_seconds(out, back, devices)
        return overlapped_in_pieces(seconds, compute if hardware.streams else 0.0, layers).times(times)

    again = shard if zero == 3 else 0
    found = copies(1, forward, saved, shard) + copies(number - 1, forward, saved, again)
    found += copies(1, backward, shard, saved + again) + copies(number - 1, backward, 0, saved + again)
    if zero >= 2:
        added = hardware.host_copy_seconds(shard, 0, devices) + hardware.host_memory_seconds(3 * shard, devices)
        found += TransferSeconds(exposed=(number - 1) * added)
    return {"host": found}


def host_update_seconds(job: Job, hardware: Hardware, rank: int) -> float:
    """Return the time of gradient norm, clipping and AdamW of a rank's shards on the host."""
    return hardware.host_memory_seconds(OPTIMIZER_BYTES * held_elements(job, rank), sharing(job, hardware))


def launch_wait(job: Job, hardware: Hardware, rank: int, busy: float) -> Seconds:
    """Return how much longer than `busy` seconds the host needs to launch a step's eager operators; 0 if compiled."""
    if job.config.compile or not hardware.launch_seconds:
        return Seconds()
    return Seconds(launch=max(0.0, rank_launches(job, rank) * hardware.launch_seconds - busy))


def rank_launches(job: Job, rank: int) -> int:
    """Return the operators of a rank's layers in all micro-batches."""
    operators = sum(
        number * layer_launches(job, job.model.layers[kind])
        for stage in job.stages(rank)
        for kind, number in job.kinds(stage).items()
    )
    return job.config.micro_batches * operators


def layer_launches(job: Job, layer: LayerShape) -> int:
    """Return the operators of a layer's forward and backward, recomputation included."""
    products, again = layer_products(job, layer)
    others = LAYER_LAUNCHES + (EXPERT_LAUNCHES if layer.experts else 0) + RING_LAUNCHES * (job.dims.ring - 1)
    passes = 3 if job.trained else 1
    return passes * (len(products) + others) + len(again) + (others if job.config.ac != "none" else 0)
