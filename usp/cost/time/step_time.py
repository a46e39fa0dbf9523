"""How long a step takes on given hardware: compute, what communication is not hidden behind it, bubbles, the optimiser.

What overlaps is what overlaps in the code:

    ring       a step's compute hides the transfer of the next step's keys and values, and in the backward that of the
               gradients of the step before as well; the last gradients go home in the open (`attention.ring`)
    fsdp       the gather of the next layer and the reduction of the one before, by the layer between (FSDP2), where
               collectives have streams of their own; the first gather and the last reduction are in the open
    the rest   Ulysses, tp, ep, pp and sums of single numbers wait

A pipeline's slowest stage sets its pace, and its schedule the bubble (`parallel.bubble_fraction`). Where ranks share
processors, those that wait leave them to the others: what all compute together is the least that a step takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from attention import Message
from parallel import Hardware, bubble_fraction, overlap_of, transfer_seconds
from usp.cost.job import Job
from usp.cost.traffic.sent import Sent
from usp.cost.traffic.sharding import FLOAT32
from usp.cost.traffic.step_traffic import attention_plan, attention_traffic, step_traffic
from usp.model.facts import training_flops

from .compute import (
    Seconds,
    dtype_name,
    head_seconds,
    is_product,
    layer_seconds,
    optimizer_seconds,
    ring_step_seconds,
    sequence_borders,
)

PARAMETER_AXES = ("fsdp", "efsdp", "dp_replicate", "loss")
_KINDS: Mapping[str, tuple[str, int]] = {  # kind of transfer, and its steps over n ranks as a multiple of n - 1
    "send": ("send", 0),
    "alltoall_base_": ("exchange", 1),
    "all_to_all_single": ("exchange", 1),
    "_allgather_base_": ("gather", 1),
    "all_gather_into_tensor": ("gather", 1),
    "_reduce_scatter_base_": ("reduce", 1),
    "reduce_scatter_tensor": ("reduce", 1),
    "allreduce_": ("gather", 2),
    "all_reduce": ("gather", 2),
}


@dataclass(frozen=True)
class Overlap:
    """What is hidden behind compute. Ours is all of it; a system that waits for its parameters has fsdp=False."""

    ring: bool = True
    fsdp: bool = True


@dataclass(frozen=True)
class Traffic:
    """Seconds of one axis' communication."""

    exposed: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.exposed + other.exposed, self.hidden + other.hidden)

    def beside(self, overlap: float) -> Traffic:
        """The same where only a part of what is hidden takes nothing from the compute that hides it."""
        return Traffic(self.exposed + (1 - overlap) * self.hidden, overlap * self.hidden)


@dataclass(frozen=True)
class Pass:
    """Attention in one direction: seconds of its kernels, and of the ring's messages beside them."""

    kernels: float
    messages: Traffic


@dataclass(frozen=True)
class StepTime:
    """The seconds of one optimiser step of the slowest rank, and what they are made of.

    Attributes:
        compute: of kernels; communication: by axis.
        bubble: waiting for other stages of the pipeline.
        causal_flops, full_flops: of the whole model and batch, for each device, recomputation not counted; with the
            hidden half of attention left out or counted.
        peak: of a device, FLOP/s.
    """

    compute: Seconds
    communication: Mapping[str, Traffic] = field(hash=False)
    bubble: float
    optimizer: float
    causal_flops: float
    full_flops: float
    peak: float

    @property
    def exposed(self) -> float:
        """Communication that nothing hides."""
        return sum(traffic.exposed for traffic in self.communication.values())

    @property
    def total(self) -> float:
        return self.compute.total + self.exposed + self.bubble + self.optimizer

    @property
    def mfu(self) -> float:
        """Model FLOPs by the causal mask's visible half, as the USP paper's later version counts (2405.07719v5)."""
        return self.causal_flops / self.total / self.peak

    @property
    def mfu_full(self) -> float:
        """The same without halving attention's FLOPs, as its earlier version counted (2405.07719v3)."""
        return self.full_flops / self.total / self.peak

    @property
    def bound(self) -> str:
        """What takes most of the step."""
        parts = {
            "compute": self.compute.total + self.optimizer,
            "pipeline bubble": self.bubble,
            **{f"communication over {axis}": traffic.exposed for axis, traffic in self.communication.items()},
        }
        return max(parts, key=lambda part: parts[part])


def step_seconds(job: Job, hardware: Hardware, overlap: Overlap = Overlap()) -> StepTime:
    """Predict a step.

    Raises:
        ValueError: where the hardware does not state a peak for the job's dtype, or joins too few devices.
    """
    busy, compute, communication = max(
        (_rank_seconds(job, hardware, overlap, rank) for rank in _slowest_ranks(job)), key=lambda found: found[0]
    )
    fraction = bubble_fraction(job.pp_schedule, job.dims.pp, job.micro_batches)
    bubble = busy * fraction / (1 - fraction)
    if hardware.crowding > 1:
        slowest, compute = compute.total, _mean_compute(job, hardware, overlap)
        bubble = max(0.0, (slowest + bubble) / hardware.crowding - compute.total)
    causal, full = model_flops(job)
    return StepTime(
        compute=compute,
        communication=communication,
        bubble=bubble,
        optimizer=max(optimizer_seconds(job, hardware, rank) for rank in _slowest_ranks(job)),
        causal_flops=causal / job.world_size,
        full_flops=full / job.world_size,
        peak=hardware.peak(dtype_name(job)),
    )


def model_flops(job: Job) -> tuple[int, int]:
    """FLOPs of forward and backward of the whole batch, counted once: (causal half alone, the whole square)."""
    facts, tokens = job.model.facts, job.seq_len * job.rows * job.dims.batch
    weights = sum(p.numel for p in job.model.head or job.model.embedding if is_product(p))
    for layer in job.model.layers:
        weights += sum(p.numel for p in layer.parameters if is_product(p))
        weights += sum(p.numel // p.shape[0] * job.model.experts_per_token for p in layer.experts)
    borders = sequence_borders(job)
    causal = training_flops(facts, matmul_parameters=weights, tokens=tokens, cu_seqlens=borders)
    square = 12 * facts.num_heads * facts.head_dim * job.seq_len * tokens * len(facts.windows)
    return causal, 6 * weights * tokens + square


def _slowest_ranks(job: Job) -> list[int]:
    """One rank of each pipeline stage: of those that share a sequence the first or the last has most to attend to."""
    per_stage = job.world_size // job.dims.pp
    last_of_ring = max(job.ranks("ring", 0))
    inside = last_of_ring if job.sp_layout == "contiguous" else 0
    return [stage * per_stage + inside for stage in range(job.dims.pp)]


def _mean_compute(job: Job, hardware: Hardware, overlap: Overlap) -> Seconds:
    """Of a rank, over all stages and places in a ring; the other axes share evenly."""
    per_stage = job.world_size // job.dims.pp
    ranks = [stage * per_stage + rank for stage in range(job.dims.pp) for rank in job.ranks("ring", 0)]
    total = Seconds()
    for rank in ranks:
        total += _rank_seconds(job, hardware, overlap, rank)[1]
    return total.times(1 / len(ranks))


def _rank_seconds(
    job: Job, hardware: Hardware, overlap: Overlap, rank: int
) -> tuple[float, Seconds, dict[str, Traffic]]:
    """(seconds without bubble and optimiser, compute, communication by axis) of a rank's stages."""
    forward, backward, ring = Seconds(), Seconds(), Traffic()
    layers = 0
    attention = {
        window: _attention(job, hardware, overlap, rank, window) for window in dict.fromkeys(job.model.facts.windows)
    }
    for stage in job.stages(rank):
        for index in job.stage_layers[stage]:
            layers += 1
            passes = layer_seconds(job, hardware, job.model.layers[index])
            kernels, traffic = attention[job.model.facts.windows[index]]
            forward, backward, ring = (
                forward + passes[0] + kernels[0],
                backward + passes[1] + kernels[1],
                ring + traffic,
            )
        if stage == len(job.stage_layers) - 1:
            forward += head_seconds(job, hardware)
    sent = step_traffic(job, rank)
    number = job.micro_batches
    beside = (forward.total, backward.total) if overlap.fsdp and hardware.streams else (0.0, 0.0)
    communication = {
        "ring": Traffic(number * ring.exposed, number * ring.hidden),
        **_waited_for(job, hardware, sent, rank),
        **_parameters(job, hardware, sent, rank, layers, beside),
    }
    compute = (forward + backward).times(number)
    communication = {
        axis: traffic.beside(overlap_of(hardware, job.ranks(axis, rank)))
        for axis, traffic in communication.items()
        if traffic != Traffic()
    }
    return compute.total + sum(t.exposed for t in communication.values()), compute, communication


def attention_passes(job: Job, hardware: Hardware, overlap: Overlap, rank: int, window: int) -> tuple[Pass, Pass]:
    """(forward, backward) of one layer's kernels and ring messages for one micro-batch, recomputation left out."""
    plan = attention_plan(job, rank, window)
    heads, per_token = plan.heads.q_width(plan.ulysses_rank), 2 * plan.heads.kv_width(plan.ulysses_rank)
    ranks = job.ranks("ring", rank)
    a_byte, a_message = (  # once: what they cross takes long to work out
        transfer_seconds(hardware, ranks, "send", *one, job.world_size) for one in ((1.0, 0.0), (0.0, 1.0))
    )

    def seconds(messages: Sequence[Message], itemsize: int) -> float:
        nbytes = sum(message.tokens for message in messages) * per_token * job.model.facts.head_dim * itemsize
        return nbytes * a_byte + a_message if messages else 0.0

    steps = plan.ring.steps[1:]
    arriving = [seconds(step.receive, job.dtype.itemsize) for step in steps]
    leaving = [seconds(step.grad_send, FLOAT32) for step in steps]
    forward = ring_step_seconds(job, hardware, plan.ring, heads, backward=False)
    backward = ring_step_seconds(job, hardware, plan.ring, heads, backward=True)
    # While step k computes, keys of step k + 1 arrive and gradients of step k - 1 leave; the last go in the open.
    beside = [a + b for a, b in zip([*arriving, 0.0, 0.0], [0.0, 0.0, *leaving], strict=True)]
    if not steps:
        beside = []
    return (
        Pass(sum(forward), hidden_behind(arriving, forward if overlap.ring else ())),
        Pass(sum(backward), hidden_behind(beside, backward if overlap.ring else ())),
    )


def attention_seconds(job: Job, hardware: Hardware, *, backward: bool) -> float:
    """The first layer's attention by itself on the slowest rank, Ulysses' exchanges included: a forward, or both."""
    rank, window = _slowest_ranks(job)[0], job.model.facts.windows[0]
    passes = attention_passes(job, hardware, Overlap(), rank, window)
    exchanges = [sent for sent in attention_traffic(job, rank, window) if sent.axis == "ulysses"]
    pairs = list(zip(passes, exchanges, strict=True))
    seconds = 0.0
    for part, exchanged in pairs if backward else pairs[:1]:
        seconds += part.kernels + part.messages.exposed + sent_seconds(job, hardware, exchanged, rank)
    return seconds


def _attention(
    job: Job, hardware: Hardware, overlap: Overlap, rank: int, window: int
) -> tuple[tuple[Seconds, Seconds], Traffic]:
    """((forward, backward), the ring's messages) of one layer and micro-batch; recomputed forwards in the backward."""
    forward, backward = attention_passes(job, hardware, overlap, rank, window)
    once, traffic = Seconds(attention=forward.kernels), forward.messages + backward.messages
    if job.ac == "full":
        return (once, once + Seconds(attention=backward.kernels)), traffic + forward.messages
    return (once, Seconds(attention=backward.kernels)), traffic


def hidden_behind(transfers: Sequence[float], compute: Sequence[float]) -> Traffic:
    """Each transfer beside the compute of the same place, which hides as much of it as it lasts; none hides nothing."""
    beside = [*compute, *([0.0] * len(transfers))]
    exposed = sum(max(0.0, transfer - hiding) for transfer, hiding in zip(transfers, beside, strict=False))
    return Traffic(exposed, sum(transfers) - exposed)


def in_pieces(transfer: float, compute: float, pieces: int) -> Traffic:
    """A transfer in equal pieces, each hidden by the piece of compute before it; the first is in the open."""
    first = transfer / pieces
    exposed = first + (pieces - 1) * max(0.0, first - compute / pieces)
    return Traffic(exposed, transfer - exposed)


def sent_seconds(job: Job, hardware: Hardware, sent: Sent, rank: int) -> float:
    """One axis' collectives of one kind, one after another.

    Raises:
        KeyError: for a collective that `parallel.wire` does not know either.
    """
    kind, rounds = _KINDS[sent.collective]
    ranks = job.ranks(sent.axis, rank)
    steps = sent.calls * (rounds * (len(ranks) - 1) if rounds else 1)
    return transfer_seconds(hardware, ranks, kind, sent.nbytes, steps, job.world_size)


def _waited_for(job: Job, hardware: Hardware, sent: Sequence[Sent], rank: int) -> dict[str, Traffic]:
    """What nothing hides, by axis."""
    waits: defaultdict[str, float] = defaultdict(float)
    for part in sent:
        if part.axis != "ring" and not _of_parameters(part):
            waits[part.axis] += sent_seconds(job, hardware, part, rank)
    return {axis: Traffic(exposed=seconds) for axis, seconds in waits.items()}


def _of_parameters(part: Sent) -> bool:
    """Whether a layer's parameters or gradients travel, not single numbers."""
    return part.axis in PARAMETER_AXES and part.nbytes > 64 * part.calls


def _parameters(
    job: Job, hardware: Hardware, sent: Sequence[Sent], rank: int, layers: int, micro_batch: tuple[float, float]
) -> dict[str, Traffic]:
    """Gathers of parameters and reductions of gradients, by axis; `micro_batch` is what its passes compute.

    Stage 3 gathers in both passes of every micro-batch, the others in the step's first forward; stages 2 and 3 reduce
    in every backward, the others in the last.
    """
    forward, backward = micro_batch
    number = job.micro_batches
    travels: dict[tuple[float, int], dict[str, float]] = {}  # by what hides it, and how often: seconds by axis

    def add(compute: float, times: int, axis: str, seconds: float) -> None:
        group = travels.setdefault((compute, times), {})
        group[axis] = group.get(axis, 0.0) + seconds / times

    for axis, gathered, seconds in _parameter_seconds(job, hardware, sent, rank):
        if not gathered:
            add(backward, number if job.zero >= 2 and axis in ("fsdp", "efsdp") else 1, axis, seconds)
        elif job.zero == 3:
            add(forward, number, axis, seconds / 2)
            add(backward, number, axis, seconds / 2)
        else:
            add(forward, 1, axis, seconds)
    found: dict[str, Traffic] = {}
    for (compute, times), by_axis in travels.items():
        together = sum(by_axis.values())
        once = in_pieces(together, compute, layers + 1)
        for axis, seconds in by_axis.items():
            part = times * seconds / together
            found[axis] = found.get(axis, Traffic()) + Traffic(part * once.exposed, part * once.hidden)
    return found


def _parameter_seconds(
    job: Job, hardware: Hardware, sent: Sequence[Sent], rank: int
) -> Iterator[tuple[str, bool, float]]:
    for part in sent:
        if _of_parameters(part):
            yield part.axis, "gather" in part.collective, sent_seconds(job, hardware, part, rank)
