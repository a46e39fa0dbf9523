"""Seconds of a step, and of each of its passes on one rank: compute, and communication by axis.

The slowest pipeline stage sets the pace, and the schedule the bubble (`bubble_fraction`). What overlaps in the
implementation overlaps here:

    ring             a ring step's compute hides the transfer of the next step's keys and values, and in the backward
                     also of the previous step's gradients; the last gradients are exposed (`usp.attention.ring`)
    parameter axes   a layer's compute hides the gather of the next layer and the reduction of the previous one (FSDP2),
                     if collectives run on their own streams; the first gather and the last reduction are exposed, and
                     so are sums of scalars such as token counts
    host             a layer's compute hides the copy of what the previous layer saved, and in the backward the copy of
                     what the next layer needs; the devices of a host copy at once and share its memory, and a copy
                     waits while overlapped messages to other hosts occupy the device's link to its host
    ep               the experts of a chunk hide the rows of others, but the first to arrive and the last to return
    the rest         Ulysses, tp and pp are exposed"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

from usp.attention import AttentionSpec
from usp.model.facts import NO_ATTENTION, visible_pairs
from usp.parallel import Hardware, bubble_fraction, host_link_seconds, overlap_of, transfer_seconds

from .compute import (
    COLLECTIVE_LAUNCHES,
    STEP_LAUNCHES,
    Seconds,
    attention_kernel,
    dtype_name,
    head_seconds,
    kernel_rates,
    layer_seconds,
    model_flops,
    optimizer_seconds,
    ring_step_seconds,
    ring_work,
    sharing,
)
from .job import PASSES, Job, Pass, shared
from .memory import stage_bytes
from .traffic import (
    FLOAT32,
    ByPass,
    Sent,
    activation_parts,
    attention_plan,
    attention_spec,
    elements,
    fsdp_copies,
    gather_counts,
    pass_parts,
)

if TYPE_CHECKING:
    from .meter import Work

# Mean absolute, on rows of benchmarks/published that nothing was shaped by; of several kinds the first is a step's.
PUBLISHED_ERRORS: Mapping[str, float] = {
    "mixtures of experts": 0.07,
    "float8": 0.08,
    "long sequences": 0.04,
    "tensor parallelism": 0.11,
    "sequence parallelism": 0.08,
    "dense models": 0.07,
}
OVERLAPPED_WAITS = 0.5  # part of `wait_fraction` where messages within layers overlap: in traces of runs on two CPUs
SCALARS = 64  # bytes of a call up to which it sums scalars, rather than parameters or gradients of a layer
BEHIND_LAYERS = {"fsdp", "efsdp", "dp_replicate", "loss", "host"}  # axes whose transfers other layers' compute hides
OVERLAPPED = BEHIND_LAYERS | {"ring", "ep"}
_KINDS: Mapping[str, tuple[str, int]] = {  # kind of transfer, and its steps over n ranks as a multiple of n - 1
    **dict.fromkeys(("send", "broadcast_"), ("send", 0)),
    **dict.fromkeys(("alltoall_base_", "all_to_all_single"), ("exchange", 1)),
    **dict.fromkeys(("allgather_", "_allgather_base_", "all_gather_into_tensor"), ("gather", 1)),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_tensor"), ("reduce", 1)),
    **dict.fromkeys(("allreduce_", "all_reduce"), ("gather", 2)),
}
_COMMUNICATION = {
    "ring": "ring attention",
    "ulysses": "Ulysses all-to-alls",
    "tp": "tensor parallelism",
    "pp": "pipeline messages",
    "ep": "expert all-to-alls",
    "host": "copies to and from the host",
    "wait": "waiting for other ranks",
}


class TransferSeconds(NamedTuple):
    """The time of one axis' communication: exposed, and overlapped with compute."""

    exposed: float = 0.0
    overlapped: float = 0.0

    def __add__(self, other: TransferSeconds) -> TransferSeconds:  # type: ignore[override]
        return TransferSeconds(self.exposed + other.exposed, self.overlapped + other.overlapped)

    def times(self, number: float) -> TransferSeconds:
        return TransferSeconds(number * self.exposed, number * self.overlapped)

    def with_free_part(self, free: float) -> TransferSeconds:
        """Expose the part of the overlapped time that slows down the compute; the part `free` does not."""
        return TransferSeconds(self.exposed + (1 - free) * self.overlapped, free * self.overlapped)


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
    """Return the time of an axis' collectives of one kind, one after another, while all groups of the axis send; raise
    KeyError for a collective that `usp.parallel.wire` does not know either."""
    kind, rounds = _KINDS[sent.collective]
    per_byte, per_step, *_ = _links(job, hardware, sent.axis, rank, kind)
    steps = sent.calls * (rounds * (job.degree(sent.axis) - 1) if rounds else 1)
    return sent.nbytes * per_byte + steps * per_step


@shared(lambda job, hardware, axis, *of: (id(hardware), job.extents[axis], job.placed or job.world_size, axis, of))
def _links(job: Job, hardware: Hardware, axis: str, rank: int, kind: str) -> tuple[float, float, float, float]:
    """Return the seconds of a byte and of a message in the group of `rank` along an axis, the part of overlapped
    transfers that does not slow down compute, and the seconds of a byte on the link to the host."""
    ranks = job.linked(axis, rank)
    seconds, on_host = (partial(f, hardware, ranks, kind) for f in (transfer_seconds, host_link_seconds))
    per_byte, per_message = (seconds(*of, active=job.global_ranks) for of in ((1.0, 0.0), (0.0, 1.0)))
    return per_byte, per_message, overlap_of(hardware, ranks), on_host(1.0)


def _repeats(job: Job, part: Sent) -> bool:
    """Return whether every micro-batch sends a part: ZeRO-3 gathers in both passes of each, the other stages in the
    first forward; stages 2 and 3 reduce in every backward, the others in the last."""
    if "gather" in part.collective:
        return job.config.zero == 3
    return part.axis == "ring" or (job.config.zero >= 2 and part.axis in ("fsdp", "efsdp"))


def _hiding_copies(
    job: Job, hardware: Hardware, rank: int, compute: float, sent: Sequence[Sent]
) -> tuple[float, float]:
    """Return the time that hides the copies of (the micro-batch that sends all parts, each of the others): `compute`,
    or overlapped messages that take longer, without the time for which messages occupy the link to the host. `sent` is
    what a pass sends in all micro-batches."""
    number, most, others = job.config.micro_batches, [0.0, 0.0], [0.0, 0.0]
    for part in sent if sent and any(tier.on_host_link for tier in hardware.tiers) else ():
        if part.axis in OVERLAPPED and part.nbytes > SCALARS * part.calls:
            *_, on_host = _links(job, hardware, part.axis, rank, _KINDS[part.collective][0])
            took = sent_seconds(job, hardware, part, rank), part.nbytes * on_host
            times = number if _repeats(job, part) else 1
            for place, seconds in enumerate(took):
                most[place] += seconds / times
                others[place] += seconds / times if times > 1 else 0.0
    first, other = (min(compute, max(0.0, max(compute, busy) - link)) for busy, link in (most, others))
    return first, other


def host_copies(
    job: Job,
    hardware: Hardware,
    rank: int,
    forward: float,
    backward: float,
    *,
    saved: int | None = None,
    sent: tuple[Sequence[Sent], Sequence[Sent]] = ((), ()),
) -> dict[str, TransferSeconds]:
    """Return the copies of a step between a device and its host, as the axis "host"; empty if nothing is offloaded.

    ZeRO-3 copies the weights of each gather, the other stages once; stages 2 and 3 copy the gradients of each backward,
    and those that are added to earlier ones are exposed, because the host adds them. Of a micro-batch's seconds of
    compute in `forward` and `backward`, recomputation included, those of layers hide copies where the messages that are
    `sent` in the same passes leave the link to the host free. `saved` are the bytes that --ac-offload copies in a
    forward, and back in a backward; None: by formula.
    """
    if saved is None:
        saved = sum(stage_bytes(job, stage).layers for stage in job.stages(rank)) if job.config.ac_offload else 0
    number, zero = job.config.micro_batches, job.config.zero
    shard = FLOAT32 * elements(job, rank, "trained_shard") if job.config.optim_offload else 0
    if not saved + shard:
        return {}
    if job.last_stage in job.stages(rank):
        of_head = head_seconds(job, hardware)
        forward, backward = (max(0.0, c - head.total) for c, head in zip((forward, backward), of_head, strict=True))
    layers = sum(len(job.stage_layers[stage]) for stage in job.stages(rank))
    devices = sharing(job, hardware)

    def copies(times: int, compute: float, out: float, back: float) -> TransferSeconds:
        seconds = hardware.host_copy_seconds(out, back, devices)
        return overlapped_in_pieces(seconds, compute if hardware.streams else 0.0, layers).times(times)

    again = shard if zero == 3 else 0
    first, others = _hiding_copies(job, hardware, rank, forward, sent[0])
    found = copies(1, first, saved, shard) + copies(number - 1, others, saved, again)
    last, others = _hiding_copies(job, hardware, rank, backward, sent[1])
    found += copies(1, last, shard, saved + again) + copies(number - 1, others, 0, saved + again)
    if zero >= 2:
        added = hardware.host_copy_seconds(shard, 0, devices) + hardware.host_memory_seconds(3 * shard, devices)
        found += TransferSeconds(exposed=(number - 1) * added)
    return {"host": found}


Attention = tuple[float, TransferSeconds]  # (seconds of the kernels, the ring's messages)


class AttentionKernels(NamedTuple):
    """A layer's attention for one micro-batch: seconds of each ring step, and elements that arrive for and leave it."""

    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    arriving: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()


def _attending(job: Job, hardware: Hardware, rank: int) -> Hashable:
    """Return what determines the attention of a micro-batch on `rank`, besides the layer's mask."""
    places = job.place("ring", rank), job.place("ulysses", rank)
    return job.micro_batch, kernel_rates(hardware), places


def _mask(job: Job, index: int) -> tuple[int, int, int]:
    facts = job.model.facts
    return facts.windows[index], facts.reaches[index], facts.index_size


@shared(lambda job, hardware, rank, index: (_attending(job, hardware, rank), _mask(job, index)))
def attention_kernels(job: Job, hardware: Hardware, rank: int, index: int) -> AttentionKernels:
    """Return the kernels of the attention of layer `index` on `rank`; none for a layer without."""
    (window, reach, index_size), shares = _mask(job, index), (1.0, 1.0)
    if window == NO_ATTENTION:
        return AttentionKernels()
    plan, facts = attention_plan(job, rank, window), job.model.facts
    per_token = job.rows * plan.heads.kv_width(plan.ulysses_rank) * (facts.head_dim + facts.value_dim)
    heads, kernel = plan.heads.q_width(plan.ulysses_rank), attention_kernel(job, hardware, plan.spec)
    different, (_, *steps) = ring_work(plan.ring)
    if reach != window:  # an indexer scores all pairs in the forward, and attention has those that it chooses
        cut, scored = torch.tensor([job.boundaries]), index_size / sum(map(bool, facts.chosen))
        share = visible_pairs(cut, reach) / visible_pairs(cut, window)
        shares = share + scored / (facts.num_heads * (facts.head_dim + facts.value_dim)), share
    forward, backward = (
        tuple(share * each for each in ring_step_seconds(job, hardware, plan.ring, heads, kernel, backward=late))
        for share, late in zip(shares, (False, True), strict=True)
    )
    return AttentionKernels(
        forward=forward,
        backward=backward,
        arriving=tuple(per_token * different[step].arriving for step in steps),
        leaving=tuple(per_token * different[step].leaving for step in steps),
    )


@shared(
    lambda job, hardware, r, i: (_attending(job, hardware, r), _mask(job, i), _links(job, hardware, "ring", r, "send"))
)
def attention_passes(job: Job, hardware: Hardware, rank: int, index: int) -> tuple[Attention, Attention]:
    """Return (forward, backward) of the attention of layer `index` for one micro-batch, without recomputation."""
    kernels = attention_kernels(job, hardware, rank, index)
    forward, backward = kernels.forward, kernels.backward if job.trained else ()
    per_byte, per_message, *_ = _links(job, hardware, "ring", rank, "send")

    def seconds(elements: int, itemsize: int) -> float:
        return elements * itemsize * per_byte + per_message if elements else 0.0

    arriving = [seconds(elements, job.dtype.itemsize) for elements in kernels.arriving]
    leaving = [seconds(elements, FLOAT32) for elements in kernels.leaving]
    # While step k computes, the keys of step k + 1 arrive and the gradients of step k - 1 leave; the last are exposed.
    both = [a + b for a, b in zip([*arriving, 0.0, 0.0], [0.0, 0.0, *leaving], strict=True)]
    return (sum(forward), overlapped(arriving, forward)), (sum(backward), overlapped(both, backward))


@shared(lambda job, hardware: (job.micro_batch, kernel_rates(hardware)))
def kernel_names(job: Job, hardware: Hardware) -> tuple[str, ...]:
    """Return the attention kernels that run; "X as Y" if the hardware states no rates of X, and those of Y stand in."""
    windows = sorted(set(job.model.facts.windows) - {NO_ATTENTION})
    names = {attention_kernel(job, hardware, attention_spec(job, window)) for window in windows}
    return tuple(f"{x} as {y}" if x != (y := hardware.rated_as(x)) else x for x in sorted(names))


@dataclass(frozen=True)
class PassSeconds:
    """What one pass takes on a rank: compute, and communication by axis."""

    compute: Seconds = field(default_factory=Seconds)
    communication: Mapping[str, TransferSeconds] = field(default_factory=dict, hash=False)

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(transfers.exposed for transfers in self.communication.values())

    @property
    def total(self) -> float:
        return self.compute.total + self.exposed

    def __add__(self, other: PassSeconds) -> PassSeconds:
        communication = dict(self.communication)
        for axis, transfers in other.communication.items():
            communication[axis] = communication.get(axis, TransferSeconds()) + transfers
        return PassSeconds(self.compute + other.compute, communication)


def pass_seconds(
    job: Job, hardware: Hardware, rank: int, prefetches: bool = True, parts: ByPass | None = None
) -> dict[Pass, PassSeconds]:
    """Return the time of each pass of all micro-batches on a rank, the waiting for other pipeline stages not included;
    if it `prefetches`, as in the implementation, compute hides the traffic of parameters. `parts`: `pass_parts`."""
    compute, messages, number = _compute(job, hardware, rank), _messages(job, hardware, rank), job.config.micro_batches
    hides, passes, copied = _hides(compute, float(prefetches)), dict[Pass, PassSeconds](), fsdp_copies(job, rank)
    experts = _experts(job, hardware, rank)
    for kind, sent in (parts or pass_parts(job, rank)).items():
        within = messages[kind].times(number), number * experts.get(kind, 0.0)
        communication = sent_by_axis(job, hardware, sent, rank, hides[kind], *within)
        busy = compute[kind].times(number) + Seconds(memory=hardware.memory_seconds(copied.get(kind, 0)))
        passes[kind] = PassSeconds(busy, communication)
    if job.trained:
        passes["update"] += PassSeconds(Seconds(memory=optimizer_seconds(job, hardware, rank)))
        if number > 1 and job.config.zero < 2 and not job.stack.sums_gradients:
            # The sum of the first ones is read as well, and copied by the reduction.
            summed = FLOAT32 * (number + 1) * elements(job, rank, "trained_numel")
            passes["backward"] += PassSeconds(Seconds(memory=hardware.memory_seconds(summed)))
    return passes


def _experts(job: Job, hardware: Hardware, rank: int) -> dict[Pass, float]:
    """Return the seconds of experts' products in the passes of a micro-batch; with `selective` they are saved."""
    layers = job.kinds(*job.stages(rank)) if job.ep_chunks > 1 else ()
    forward = sum(number * layer_seconds(job, hardware, index).experts for index, number in layers)
    back = forward * job.trained
    again = back if job.config.ac not in ("none", "selective") else 0.0
    return {"count": forward * job.counts_choices, "forward": forward, "recompute": again, "backward": 2 * back}


def _hides(compute: Mapping[Pass, Seconds], share: float = 1.0) -> dict[Pass, float]:
    """Return the seconds that hide the traffic of parameters in each pass of a micro-batch."""
    hides: dict[Pass, float] = {kind: share * each.total for kind, each in compute.items()}
    hides["backward"] += hides["recompute"]
    return hides


@shared(lambda job, hardware, rank, index: (job.work, _attending(job, hardware, rank), index))
def _layer_passes(job: Job, hardware: Hardware, rank: int, index: int) -> Mapping[Pass, Seconds]:
    """Return the compute of a layer for one micro-batch in each pass of training."""
    kernels, layer = attention_kernels(job, hardware, rank, index), layer_seconds(job, hardware, index)
    forward, backward = (Seconds(attention=job.visible * sum(each)) for each in (kernels.forward, kernels.backward))
    again = layer.recompute + forward if job.config.ac == "full" else layer.recompute
    return {"forward": layer.forward + forward, "recompute": again, "backward": layer.backward + backward}


def _working(job: Job, hardware: Hardware, rank: int) -> Hashable:
    """Return what determines the compute of a micro-batch on `rank`."""
    return job.work, job.dims.pp, job.pipeline, job.place("pp", rank), _attending(job, hardware, rank)


@shared(_working)
def _compute(job: Job, hardware: Hardware, rank: int) -> Mapping[Pass, Seconds]:
    """Return the compute of one micro-batch in each pass but the update."""
    passes, stages = dict.fromkeys(PASSES, Seconds()), job.stages(rank)
    for index, number in job.kinds(*stages):
        for kind, each in _layer_passes(job, hardware, rank, index).items():
            passes[kind] += each.times(number if job.trained or kind == "forward" else 0)
    if job.counts_choices:
        passes["count"] = passes["forward"]
    if job.last_stage in stages:
        forward, backward = head_seconds(job, hardware)
        passes["forward"] += forward
        passes["backward"] += backward if job.trained else Seconds()
    # FSDP2 copies the gradients of each micro-batch in float32, for the reduction or to sum them.
    copied = job.trained and not job.stack.sums_gradients
    moved = (job.dtype.itemsize + FLOAT32) * elements(job, rank, "trained_numel") * copied
    if 0 in stages and job.trained and not job.frozen:  # the embedding's has zeros, to which a tied head's is added
        number = 4 if job.model.facts.tied and job.last_stage in stages else 1
        moved += number * job.dtype.itemsize * math.prod(job.model.embedding[0].local(job.dims.tp))
    passes["backward"] += Seconds(memory=hardware.memory_seconds(moved))
    return passes


def _messages(job: Job, hardware: Hardware, rank: int) -> Mapping[Pass, TransferSeconds]:
    """Return the messages of the ring in one micro-batch by pass."""
    passes = dict.fromkeys(PASSES, TransferSeconds())
    for index, number in job.kinds(*job.stages(rank)) if job.dims.ring > 1 else ():
        (_, forward), (_, backward) = attention_passes(job, hardware, rank, index)
        passes["forward"] += forward.times(number)
        if job.trained:
            passes["recompute"] += forward.times(number if job.config.ac == "full" else 0)
            passes["backward"] += backward.times(number)
    if job.counts_choices:
        passes["count"] = passes["forward"]
    return passes


def _transfers(
    job: Job, hardware: Hardware, sent: Iterable[Sent], rank: int
) -> tuple[Mapping[str, float], Mapping[int, Mapping[str, float]]]:
    """Return the seconds of what is `sent` in a pass by axis, the ring's left out: (exposed, overlapped by the number
    of micro-batches whose compute overlaps with them)."""
    exposed, overlapping = defaultdict[str, float](float), dict[int, defaultdict[str, float]]()
    for part in (each for each in sent if each.axis != "ring"):
        seconds = sent_seconds(job, hardware, part, rank)
        if part.axis in BEHIND_LAYERS and part.nbytes > SCALARS * part.calls:
            times = job.config.micro_batches if _repeats(job, part) else 1
            overlapping.setdefault(times, defaultdict(float))[part.axis] += seconds
        else:
            exposed[part.axis] += seconds
    return exposed, overlapping


def sent_by_axis(
    job: Job, hardware: Hardware, sent: Iterable[Sent], rank: int, compute: float, ring: TransferSeconds, experts: float
) -> dict[str, TransferSeconds]:
    """Return the communication of a pass. The seconds of `compute` of one micro-batch hide gathers and reductions, if
    collectives have streams; the `ring`'s overlaps with attention, and ep's with the seconds of all `experts`."""
    hiding = compute if hardware.streams else 0.0
    exposed, overlapping = _transfers(job, hardware, sent, rank)
    by_axis = {axis: TransferSeconds(exposed=seconds) for axis, seconds in exposed.items() if seconds}
    pieces = 1 + sum(len(job.stage_layers[stage]) for stage in job.stages(rank))
    for times, axes in overlapping.items():
        together = sum(axes.values())
        once = overlapped_in_pieces(together / times, hiding, pieces)
        for axis, seconds in axes.items():
            free = _links(job, hardware, axis, rank, "send")[2]
            found = once.times(times * seconds / together).with_free_part(free)
            by_axis[axis] = by_axis[axis] + found if axis in by_axis else found
    if "ep" in by_axis and job.ep_chunks > 1:
        by_axis["ep"] = overlapped_in_pieces(by_axis["ep"].exposed, experts, job.ep_chunks)
    if any(ring):
        by_axis["ring"] = ring
    for axis, share in (("tp", job.stack.exposed_tensor), ("ep", job.stack.exposed_experts), ("ring", 1.0)):
        if whole := by_axis.get(axis):
            hidden = whole.overlapped + max(0.0, 1 - share) * whole.exposed
            free = _links(job, hardware, axis, rank, "send")[2]
            by_axis[axis] = TransferSeconds(share * whole.exposed, hidden).with_free_part(free)
    return by_axis


@dataclass(frozen=True)
class StepTime(PassSeconds):
    """The seconds of one optimizer step of the slowest rank, by component."""

    bubble: float = 0.0  # waiting for other pipeline stages
    optimizer: float = 0.0
    causal_flops: float = 0.0  # of the model per device, without recomputation and the masked half of attention
    peak: float = 1.0  # FLOP/s of a device
    kernels: tuple[str, ...] = ()  # from `kernel_names`

    @property
    def total(self) -> float:
        return super().total + self.bubble + self.optimizer

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, counting the visible half of a causal mask as arXiv 2405.07719v5 does."""
        return self.causal_flops / self.total / self.peak

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each component; they add up to the step."""
        exposed = {axis: transfers.exposed for axis, transfers in self.communication.items() if transfers.exposed}
        return {
            "matrix products": self.compute.matmul,
            "attention": self.compute.attention,
            "memory-bound operators": self.compute.memory,
            "kernel launches": self.compute.launch,
            "optimizer": self.optimizer,
            "pipeline bubble": self.bubble,
            **{f"exposed {_COMMUNICATION.get(axis, f'{axis} traffic')}": took for axis, took in exposed.items()},
        }

    @property
    def bound(self) -> str:
        """The component that takes most of the step."""
        return max(self.parts.items(), key=itemgetter(1))[0]


def step_seconds(job: Job, hardware: Hardware, prefetches: bool = True, collective: float | None = None) -> StepTime:
    """Predict the time of a step, with options as those of `rank_seconds`; raise ValueError if the hardware has no peak
    for the job's dtype, or connects too few devices."""
    ranks = [rank_seconds(job, hardware, rank, prefetches, collective) for rank in _unlike(job, hardware)]
    slowest, _ = max(ranks, key=lambda pair: pair[0].total)
    return whole_step(job, hardware, slowest, max(optimizer for _, optimizer in ranks), kernel_names(job, hardware))


def published_kind(job: Job) -> str:
    """Return a job's kind in PUBLISHED_ERRORS."""
    experts, long = job.model.facts.num_experts > 0, job.config.seq_len >= 65536
    held = experts, job.config.fp8 != "none", long, job.dims.tp > 1, job.degree("sp") > 1, True
    return next(compress(PUBLISHED_ERRORS, held))


def _unlike(job: Job, hardware: Hardware) -> Iterable[int]:
    """Return one of `slowest_ranks` for each that has other layers, messages or links."""
    links, found = max(tier.devices for tier in hardware.tiers) or 1, dict[Hashable, int]()
    for rank in job.slowest_ranks:
        stages = job.stages(rank)
        gathers = tuple(gather_counts(job, rank, stage) for stage in stages)
        ends = 0 in stages, job.last_stage in stages
        place = rank % links if job.placed is None else rank
        found.setdefault((job.kinds(*stages), ends, gathers, place), rank)
    return found.values()


def whole_step(
    job: Job, hardware: Hardware, slowest: PassSeconds, optimizer: float, kernels: tuple[str, ...]
) -> StepTime:
    """Return the time of a step by that of the slowest rank, without waiting for other pipeline stages."""
    fraction = bubble_fraction(job.pipeline, job.dims.pp, job.config.micro_batches)
    bubble, flops = slowest.total * fraction / (1 - fraction), model_flops(job) / job.world_size
    peak = hardware.peak(dtype_name(job.dtype))
    return StepTime(slowest.compute, slowest.communication, bubble, optimizer, flops, peak, kernels)


def counted_seconds(
    job: Job, hardware: Hardware, rank: int, sent: Sequence[Sent], work: Work, update: Work, offloaded: int
) -> StepTime:
    """Return the time of a step whose operators, messages and bytes offloaded by --ac-offload a dry run of a rank has
    counted, overlapped as usual."""
    dtype, kernel = dtype_name(job.dtype), attention_kernel(job, hardware, AttentionSpec())
    busy, micro_batches = work.seconds(hardware, dtype, kernel), job.config.micro_batches
    messages = sum(sent_seconds(job, hardware, each, rank) for each in sent if each.axis == "ring")
    ring = overlapped([messages], [busy.attention])
    experts = micro_batches * sum(_experts(job, hardware, rank).values())
    communication = sent_by_axis(job, hardware, sent, rank, busy.total / micro_batches, ring, experts)
    share = 4 if job.config.ac != "none" else 3  # of the forward
    forward = busy.total / share
    passes = forward / micro_batches, (busy.total - forward) / micro_batches
    ahead = [part._replace(nbytes=part.nbytes // share) for part in sent]
    rest = [part._replace(nbytes=part.nbytes - part.nbytes // share) for part in sent]
    communication |= host_copies(job, hardware, rank, *passes, saved=offloaded // micro_batches, sent=(ahead, rest))
    optimizer = update.seconds(hardware, dtype, kernel).total
    if job.config.optim_offload:
        optimizer = hardware.host_memory_seconds(update.nbytes, sharing(job, hardware))
    found = PassSeconds(busy, communication)
    return whole_step(job, hardware, found + delays(job, hardware, work.launches, found), optimizer, (kernel,))


def delays(job: Job, hardware: Hardware, operators: float, busy: PassSeconds) -> PassSeconds:
    """Return how much longer a step takes than it is `busy`, as the host issues operators one by one (meanwhile a GPU
    computes, and a CPU does not), and as ranks wait for the slowest one."""
    meanwhile = busy.total if hardware.streams else 0.0
    launch = 0.0 if job.config.compile else max(0.0, operators * hardware.launch_seconds - meanwhile)
    exposed = any(job.degree(axis) > 1 for axis in ("ulysses", "tp", "ep"))
    part = 1.0 if exposed else OVERLAPPED_WAITS if job.world_size > 1 else 0.0
    wait = part * hardware.wait_fraction * busy.compute.total
    return PassSeconds(Seconds(launch=launch), {"wait": TransferSeconds(wait)} if wait else {})


def rank_launches(job: Job, hardware: Hardware, rank: int, sent: Iterable[Sent], collective: float | None) -> float:
    """Return the operators of a rank in all micro-batches, with what its collectives take the host, in operators:
    `collective` each, or if None what FSDP2 and DTensor need for theirs."""
    layers = job.kinds(*job.stages(rank))
    operators = sum(number * layer_seconds(job, hardware, index).launches for index, number in layers)
    of_axis = COLLECTIVE_LAUNCHES if collective is None else dict.fromkeys(job.extents, collective) | {"pp": 0.0}
    # A loss calls its all-reduces by itself.
    found = (each for each in sent if collective is not None or each.collective != "allreduce_")
    calls = sum(of_axis.get(each.axis, 0.0) * each.calls for each in found)
    return job.config.micro_batches * operators + calls + STEP_LAUNCHES * job.trained


def rank_seconds(
    job: Job, hardware: Hardware, rank: int, prefetches: bool = True, collective: float | None = None
) -> tuple[PassSeconds, float]:
    """Return (the sum of a rank's passes but the optimizer, the optimizer). collective: as in `rank_launches`."""
    parts = pass_parts(job, rank)
    passes = pass_seconds(job, hardware, rank, prefetches, parts)
    update, number = passes.pop("update"), job.config.micro_batches
    backward = sum(passes[kind].compute.total for kind in ("recompute", "backward") if kind in passes)
    offloads = job.config.ac_offload or job.config.optim_offload
    sent = (parts["forward"], [*parts["recompute"], *parts["backward"]]) if offloads else ((), ())
    each = passes["forward"].compute.total / number, backward / number
    copies = host_copies(job, hardware, rank, *each, sent=sent)
    found = sum(passes.values(), PassSeconds(communication=update.communication)) + PassSeconds(communication=copies)
    operators = rank_launches(job, hardware, rank, chain(*parts.values()), collective)
    return found + delays(job, hardware, operators, found), update.compute.total


def least_seconds(job: Job, hardware: Hardware) -> float:
    """Return a lower bound of `step_seconds` for any ZeRO stage and number of replicas: the compute of the pipeline
    rank that has the head, its exposed messages and copies of activations, and the bubble."""
    rank, number = job.slowest_ranks[-1], job.config.micro_batches
    compute = _compute(job, hardware, rank)
    sent = [each for of in activation_parts(job, rank).values() for each in of]
    seconds = [(each.axis, sent_seconds(job, hardware, each, rank)) for each in sent if each.axis != "ring"]
    busy = number * sum(map(sum, compute.values())) + sum(took for axis, took in seconds if axis not in OVERLAPPED)
    rows = sum(took for axis, took in seconds if axis == "ep")
    experts = number * sum(_experts(job, hardware, rank).values())
    busy += overlapped_in_pieces(rows, experts, job.ep_chunks).exposed
    if job.dims.ring > 1:
        messages = sum(_messages(job, hardware, rank).values(), TransferSeconds()).times(number)
        busy += messages.with_free_part(_links(job, hardware, "ring", rank, "send")[2]).exposed
    if job.config.ac_offload or job.config.optim_offload:
        hides = _hides(compute)
        busy += sum(c.exposed for c in host_copies(job, hardware, rank, hides["forward"], hides["backward"]).values())
    return busy / (1 - bubble_fraction(job.pipeline, job.dims.pp, number))
