"""The time of a step on given hardware: compute, exposed communication, pipeline bubble and optimizer.

What overlaps in the implementation overlaps here; `OVERLAPS_WITH` names it per axis, and the rest is exposed:

    ring             a ring step's compute hides the transfer of the next step's keys and values, and in the backward
                     also of the previous step's gradients; the last gradients are exposed (`attention.ring`)
    parameter axes   a layer's compute hides the gather of the next layer and the reduction of the previous one (FSDP2),
                     if collectives run on their own streams; the first gather and the last reduction are exposed, and
                     so are sums of scalars such as token counts
    the rest         Ulysses, tp, ep and pp are exposed

The slowest pipeline stage sets the pace, and the schedule the bubble (`parallel.bubble_fraction`). Where ranks share
processors, ranks that wait leave them to the others, so a step takes at least the compute of all ranks together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial

import torch

from attention import Message
from parallel import (
    Hardware,
    bubble_fraction,
    overlap_of,
    rank_stages,
    stage_layers,
    stages_per_rank,
    transfer_seconds,
)
from usp.cost.job import Job
from usp.cost.traffic.sent import Sent
from usp.cost.traffic.sharding import FLOAT32, gather_counts
from usp.cost.traffic.step_traffic import attention_plan, attention_traffic, step_traffic
from usp.model.facts import NO_ATTENTION, ModelFacts, training_flops

from .compute import (
    OPTIMIZER_BYTES,
    Seconds,
    attention_kernel,
    dtype_name,
    head_seconds,
    is_matrix,
    layer_seconds,
    optimizer_seconds,
    ring_step_seconds,
)

_LAYERS = "the compute of the neighbouring layers"
OVERLAPS_WITH: Mapping[str, str] = {  # axes that are not listed are exposed
    "ring": "the attention of the previous ring step",
    **dict.fromkeys(("fsdp", "efsdp", "dp_replicate", "loss"), _LAYERS),
}
_KINDS: Mapping[str, tuple[str, int]] = {  # kind of transfer, and its steps over n ranks as a multiple of n - 1
    "send": ("send", 0),
    **dict.fromkeys(("alltoall_base_", "all_to_all_single"), ("exchange", 1)),
    **dict.fromkeys(("_allgather_base_", "all_gather_into_tensor"), ("gather", 1)),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), ("reduce", 1)),
    **dict.fromkeys(("allreduce_", "all_reduce"), ("gather", 2)),
}


def exposure(axis: str) -> str:
    """Return `exposed`, or what the communication of an axis overlaps with."""
    return f"overlaps with {OVERLAPS_WITH[axis]}" if axis in OVERLAPS_WITH else "exposed"


@dataclass(frozen=True)
class Overlap:
    """Which communication overlaps with compute. False models a system that waits for it."""

    ring: bool = True
    fsdp: bool = True


@dataclass(frozen=True)
class TransferSeconds:
    """The time of one axis' communication: exposed, and overlapped with compute."""

    exposed: float = 0.0
    overlapped: float = 0.0

    def __add__(self, other: TransferSeconds) -> TransferSeconds:
        return TransferSeconds(self.exposed + other.exposed, self.overlapped + other.overlapped)

    def times(self, number: float) -> TransferSeconds:
        return TransferSeconds(number * self.exposed, number * self.overlapped)

    def with_free_part(self, free: float) -> TransferSeconds:
        """Expose the part of the overlapped time that slows down the compute; the part `free` does not."""
        return TransferSeconds(self.exposed + (1 - free) * self.overlapped, free * self.overlapped)


@dataclass(frozen=True)
class Pass:
    """Attention in one direction: seconds of its kernels, and of the ring's messages."""

    kernels: float
    messages: TransferSeconds


@dataclass(frozen=True)
class StepTime:
    """The seconds of one optimizer step of the slowest rank, by component.

    Attributes:
        compute: of kernels; communication: by axis.
        bubble: waiting for other pipeline stages.
        causal_flops: model FLOPs per device, without recomputation and without the masked half of attention.
        peak: FLOP/s of a device.
        kernels: the attention kernels that run; "X as Y" if the hardware states no rates of X, and those of Y stand in.
    """

    compute: Seconds
    communication: Mapping[str, TransferSeconds] = field(hash=False)
    bubble: float
    optimizer: float
    causal_flops: float
    peak: float
    kernels: tuple[str, ...] = ()

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(transfers.exposed for transfers in self.communication.values())

    @property
    def total(self) -> float:
        return self.compute.total + self.exposed + self.bubble + self.optimizer

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, counting the visible half of a causal mask as arXiv 2405.07719v5 does."""
        return self.causal_flops / self.total / self.peak

    @property
    def bound(self) -> str:
        """The component that takes most of the step."""
        parts = {
            "compute": self.compute.total + self.optimizer,
            "pipeline bubble": self.bubble,
            **{f"communication over {axis}": transfers.exposed for axis, transfers in self.communication.items()},
        }
        return max(parts, key=lambda part: parts[part])


def step_seconds(
    job: Job, hardware: Hardware, overlap: Overlap = Overlap(), known: LayerCompute | None = None
) -> StepTime:
    """Predict the time of a step.

    known: `LayerCompute.of` a job with the same micro-batches, ring, ulysses, tp, ep and recomputation.

    Raises:
        ValueError: if the hardware has no peak for the job's dtype, or connects too few devices.
    """
    layers = known.passes if known else _layers(job, hardware)
    ranks = _different_ranks(job, hardware)
    busy, compute, communication = max(
        (_rank_seconds(job, hardware, overlap, rank, layers) for rank in ranks), key=lambda found: found[0]
    )
    fraction = bubble_fraction(job.config.pp_schedule, job.dims.pp, job.config.micro_batches)
    bubble = busy * fraction / (1 - fraction)
    if hardware.crowding > 1:
        slowest, compute = compute.total, _mean_compute(job, hardware, overlap, layers)
        bubble = max(0.0, (slowest + bubble) / hardware.crowding - compute.total)
    return StepTime(
        compute=compute,
        communication=communication,
        bubble=bubble,
        optimizer=max(optimizer_seconds(job, hardware, rank) for rank in ranks),
        causal_flops=model_flops(job) / job.world_size,
        peak=hardware.peak(dtype_name(job.dtype)),
        kernels=_kernels(job, hardware),
    )


def _kernels(job: Job, hardware: Hardware) -> tuple[str, ...]:
    windows = sorted(set(job.model.facts.windows))
    names = {attention_kernel(job, hardware, attention_plan(job, 0, window).spec) for window in windows}
    return tuple(f"{x} as {y}" if x != (y := hardware.rated_as(x)) else x for x in sorted(names))


@dataclass(frozen=True)
class LayerCompute:
    """The compute of a micro-batch on the slowest rank.

    Attributes:
        passes: (forward, backward) of each different layer, without attention's kernels.
        layers: seconds of each different layer, attention's kernels included.
        loss: seconds of the loss.
    """

    passes: Mapping[int, tuple[Seconds, Seconds]]
    layers: Mapping[int, float]
    loss: float

    @staticmethod
    def of(job: Job, hardware: Hardware) -> LayerCompute:
        attends = cache(partial(_attention, job, hardware, Overlap(), _slowest_ranks(job)[0]))
        # Where ranks share processors, those with less attention help the slowest.
        counts = 1.0 if hardware.crowding == 1 else 0.0
        layers, found = {}, _layers(job, hardware)
        for index, passes in found.items():
            kernels, _ = attends(job.model.facts.windows[index])
            layers[index] = sum(one.total for one in passes) + counts * sum(one.total for one in kernels)
        return LayerCompute(found, layers, head_seconds(job, hardware).total)


def least_seconds(job: Job, hardware: Hardware, compute: LayerCompute) -> float:
    """Return a lower bound of `step_seconds`: its compute, bubble and optimizer, without any communication.

    compute: as `known` of `step_seconds`.
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


def model_flops(job: Job, *, masked: bool = False) -> int:
    """Return the model FLOPs of forward and backward of the global batch, recomputation not counted.

    masked: count what the causal mask and windows hide as work, too.
    """
    weights = sum(p.numel for p in job.model.head or job.model.embedding if is_matrix(p))
    for index, number in Counter(job.model.alike).items():
        layer = job.model.layers[index]
        weights += number * sum(p.numel for p in layer.parameters if is_matrix(p))
        weights += number * sum(p.numel // p.shape[0] * job.model.experts_per_token for p in layer.experts)
    facts, tokens = job.model.facts, job.config.seq_len
    flops = _sequence_flops(facts, weights, tokens)
    if masked:
        layers = sum(window != NO_ATTENTION for window in facts.windows)
        flops = 6 * weights * tokens + 6 * facts.num_heads * (facts.head_dim + facts.value_dim) * layers * tokens**2
    return job.config.batch_size * job.dims.batch * flops


@lru_cache(maxsize=64)
def _sequence_flops(facts: ModelFacts, weights: int, tokens: int) -> int:
    """Return the model FLOPs of a sequence, which is one document."""
    return training_flops(facts, matmul_parameters=weights, tokens=tokens, cu_seqlens=torch.tensor([[0, tokens]]))


def _slowest_ranks(job: Job) -> list[int]:
    """Return one rank per pipeline stage: the one with the most attention of those that share a sequence."""
    inside = max(job.ranks("ring", 0)) if job.config.sp_layout == "contiguous" else 0
    return [first + inside for first in job.ranks("pp", 0)]


def _different_ranks(job: Job, hardware: Hardware) -> list[int]:
    """Return `_slowest_ranks`, and of those that compute and send the same over the same links only the first."""
    last, devices = len(job.stage_layers) - 1, [tier.devices for tier in hardware.tiers if tier.devices]

    def does(rank: int) -> tuple[object, ...]:
        stages = job.stages(rank)
        return tuple(rank % number for number in devices), tuple(
            (
                tuple(job.kinds(stage).items()),
                gather_counts(job, rank, stage),
                (stage == 0, stage == last, stage - 1 in stages, stage + 1 in stages),
            )
            for stage in stages
        )

    different: dict[tuple[object, ...], int] = {}
    for rank in _slowest_ranks(job):
        different.setdefault(does(rank), rank)
    return list(different.values())


def _layers(job: Job, hardware: Hardware) -> dict[int, tuple[Seconds, Seconds]]:
    """Return the (forward, backward) of every different layer for one micro-batch, without attention's kernels."""
    return {index: layer_seconds(job, hardware, job.model.layers[index]) for index in set(job.model.alike)}


def _mean_compute(
    job: Job, hardware: Hardware, overlap: Overlap, layers: Mapping[int, tuple[Seconds, Seconds]]
) -> Seconds:
    """Return the mean over all stages and ring ranks; along the other axes compute is even."""
    ranks = [first + rank for first in job.ranks("pp", 0) for rank in job.ranks("ring", 0)]
    each = (_rank_seconds(job, hardware, overlap, rank, layers)[1] for rank in ranks)
    return sum(each, Seconds()).times(1 / len(ranks))


def _rank_seconds(
    job: Job, hardware: Hardware, overlap: Overlap, rank: int, layers: Mapping[int, tuple[Seconds, Seconds]]
) -> tuple[float, Seconds, dict[str, TransferSeconds]]:
    """Return (seconds without bubble and optimizer, compute, communication by axis) of a rank's stages.

    layers: from `_layers`.
    """
    forward, backward, ring, counting = Seconds(), Seconds(), TransferSeconds(), Seconds()
    held = 0
    attention = cache(partial(_attention, job, hardware, overlap, rank))
    attention_once = cache(partial(attention_passes, job, hardware, overlap, rank))
    for stage in job.stages(rank):
        for index, number in job.kinds(stage).items():
            held += number
            passes, window = layers[index], job.model.facts.windows[index]
            kernels, messages = attention(window)
            forward += (passes[0] + kernels[0]).times(number)
            backward += (passes[1] + kernels[1]).times(number)
            ring += messages.times(number)
            if job.counts_choices:
                counting += (passes[0] + kernels[0]).times(number)
                ring += attention_once(window)[0].messages.times(number)
        if stage == len(job.stage_layers) - 1:
            forward += head_seconds(job, hardware)
    sent = step_traffic(job, rank)
    hiding = (forward.total, backward.total) if overlap.fsdp and hardware.streams else (0.0, 0.0)
    communication = {
        "ring": ring.times(job.config.micro_batches),
        **_exposed(job, hardware, sent, rank),
        **_parameters(job, hardware, sent, rank, held, hiding),
    }
    compute = (forward + backward + counting).times(job.config.micro_batches)
    communication = {
        axis: transfers.with_free_part(overlap_of(hardware, job.ranks(axis, rank)))
        for axis, transfers in communication.items()
        if transfers != TransferSeconds()
    }
    return compute.total + sum(t.exposed for t in communication.values()), compute, communication


def attention_passes(job: Job, hardware: Hardware, overlap: Overlap, rank: int, window: int) -> tuple[Pass, Pass]:
    """Return (forward, backward) of one layer's attention for one micro-batch, without recomputation."""
    plan = attention_plan(job, rank, window)
    heads, facts = plan.heads.q_width(plan.ulysses_rank), job.model.facts
    per_token = plan.heads.kv_width(plan.ulysses_rank) * (facts.head_dim + facts.value_dim)
    ranks = job.ranks("ring", rank)
    per_byte, per_message = (  # once, because working out the tiers that a group crosses is slow
        transfer_seconds(hardware, ranks, "send", *one, job.world_size) for one in ((1.0, 0.0), (0.0, 1.0))
    )

    def seconds(messages: Sequence[Message], itemsize: int) -> float:
        nbytes = job.rows * sum(message.tokens for message in messages) * per_token * itemsize
        return nbytes * per_byte + per_message if messages else 0.0

    steps = plan.ring.steps[1:]
    arriving = [seconds(step.receive, job.dtype.itemsize) for step in steps]
    leaving = [seconds(step.grad_send, FLOAT32) for step in steps]
    kernel = attention_kernel(job, hardware, plan.spec)
    forward = ring_step_seconds(job, hardware, plan.ring, heads, kernel, backward=False)
    backward = ring_step_seconds(job, hardware, plan.ring, heads, kernel, backward=True)
    # While step k computes, the keys of step k + 1 arrive and the gradients of step k - 1 leave; the last are exposed.
    both = [a + b for a, b in zip([*arriving, 0.0, 0.0], [0.0, 0.0, *leaving], strict=True)] if steps else []
    return (
        Pass(sum(forward), overlapped(arriving, forward if overlap.ring else ())),
        Pass(sum(backward), overlapped(both, backward if overlap.ring else ())),
    )


def attention_seconds(job: Job, hardware: Hardware, *, backward: bool) -> float:
    """Return the time of the first layer's forward (or both passes) of attention and Ulysses on the slowest rank."""
    rank, window = _slowest_ranks(job)[0], job.model.facts.windows[0]
    passes = attention_passes(job, hardware, Overlap(), rank, window)
    exchanges = [sent for sent in attention_traffic(job, rank, window) if sent.axis == "ulysses"]
    free = overlap_of(hardware, job.ranks("ring", rank))
    seconds = [
        part.kernels + part.messages.with_free_part(free).exposed + sent_seconds(job, hardware, exchange, rank)
        for part, exchange in zip(passes, exchanges, strict=True)
    ]
    return sum(seconds) if backward else seconds[0]


def _attention(
    job: Job, hardware: Hardware, overlap: Overlap, rank: int, window: int
) -> tuple[tuple[Seconds, Seconds], TransferSeconds]:
    """Return ((forward, backward), ring messages) of one layer and micro-batch; the backward includes recomputation."""
    forward, backward = attention_passes(job, hardware, overlap, rank, window)
    messages, once, again = forward.messages + backward.messages, Seconds(attention=forward.kernels), Seconds()
    if job.config.ac == "full":
        messages, again = messages + forward.messages, once
    return (once, again + Seconds(attention=backward.kernels)), messages


def overlapped(transfers: Sequence[float], compute: Sequence[float]) -> TransferSeconds:
    """Overlap each transfer with the compute at the same position; what takes longer than its compute is exposed."""
    hiding = [*compute, *([0.0] * len(transfers))]
    exposed = sum(max(0.0, transfer - seconds) for transfer, seconds in zip(transfers, hiding, strict=False))
    return TransferSeconds(exposed, sum(transfers) - exposed)


def overlapped_in_pieces(transfer: float, compute: float, pieces: int) -> TransferSeconds:
    """Overlap each of the equal pieces of a transfer with the previous piece of compute; the first is exposed."""
    first = transfer / pieces
    exposed = first + (pieces - 1) * max(0.0, first - compute / pieces)
    return TransferSeconds(exposed, transfer - exposed)


def sent_seconds(job: Job, hardware: Hardware, sent: Sent, rank: int) -> float:
    """Return the time of an axis' collectives of one kind, one after another.

    Raises:
        KeyError: for a collective that `parallel.wire` does not know either.
    """
    kind, rounds = _KINDS[sent.collective]
    ranks = job.ranks(sent.axis, rank)
    steps = sent.calls * (rounds * (len(ranks) - 1) if rounds else 1)
    return transfer_seconds(hardware, ranks, kind, sent.nbytes, steps, job.world_size)


def _exposed(job: Job, hardware: Hardware, sent: Sequence[Sent], rank: int) -> dict[str, TransferSeconds]:
    """Return the communication that never overlaps, by axis."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for part in sent:
        if part.axis != "ring" and not _of_parameters(part):
            seconds[part.axis] += sent_seconds(job, hardware, part, rank)
    return {axis: TransferSeconds(exposed=found) for axis, found in seconds.items()}


def _of_parameters(part: Sent) -> bool:
    """Check whether a layer's parameters or gradients are sent rather than scalars."""
    return OVERLAPS_WITH.get(part.axis) == _LAYERS and part.nbytes > 64 * part.calls


def _parameters(
    job: Job, hardware: Hardware, sent: Sequence[Sent], rank: int, layers: int, micro_batch: tuple[float, float]
) -> dict[str, TransferSeconds]:
    """Return the gathers of parameters and reductions of gradients, by axis.

    ZeRO-3 gathers in both passes of every micro-batch, the other stages in the step's first forward; stages 2 and 3
    reduce in every backward, the others in the last. Forwards that count the routers' choices gather as the others do.

    micro_batch: seconds of compute of one micro-batch's forward and backward, which hide them.
    """
    forward, backward = micro_batch
    number, passes = job.config.micro_batches, 2 if job.counts_choices else 1
    # (compute, times): seconds by axis
    transfers: defaultdict[tuple[float, int], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(compute: float, times: int, axis: str, seconds: float) -> None:
        transfers[compute, times][axis] += seconds / times

    for part in filter(_of_parameters, sent):
        axis, seconds = part.axis, sent_seconds(job, hardware, part, rank)
        if "gather" not in part.collective:
            add(backward, number if job.config.zero >= 2 and axis in ("fsdp", "efsdp") else 1, axis, seconds)
        elif job.config.zero == 3:
            add(forward, passes * number, axis, seconds * passes / (passes + 1))
            add(backward, number, axis, seconds / (passes + 1))
        else:
            add(forward, passes, axis, seconds)
    found: defaultdict[str, TransferSeconds] = defaultdict(TransferSeconds)
    for (compute, times), by_axis in transfers.items():
        together = sum(by_axis.values())
        once = overlapped_in_pieces(together, compute, layers + 1)
        for axis, seconds in by_axis.items():
            found[axis] += once.times(times * seconds / together)
    return found
