"""The seconds of each pass on one rank: compute, and communication by axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from parallel import Hardware, overlap_of
from usp.cost.job import PASSES, Job, Pass
from usp.cost.traffic.pass_traffic import pass_traffic
from usp.cost.traffic.sent import Sent

from .attention_time import attention_passes
from .compute import LayerSeconds, Seconds, head_seconds, layer_seconds, optimizer_seconds
from .transfers import OVERLAP, Overlap, TransferSeconds, of_parameters, overlapped_in_pieces, sent_seconds

Layers = Mapping[int, LayerSeconds]  # of a micro-batch, by the index of each different layer
ByAxis = Mapping[str, TransferSeconds]


@dataclass(frozen=True)
class PassSeconds:
    """What one pass of all micro-batches takes on a rank."""

    compute: Seconds = field(default_factory=Seconds)
    communication: ByAxis = field(default_factory=dict, hash=False)

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(transfers.exposed for transfers in self.communication.values())

    @property
    def total(self) -> float:
        return self.compute.total + self.exposed

    def __add__(self, other: PassSeconds) -> PassSeconds:
        communication: defaultdict[str, TransferSeconds] = defaultdict(TransferSeconds)
        for axis, transfers in (*self.communication.items(), *other.communication.items()):
            communication[axis] += transfers
        return PassSeconds(self.compute + other.compute, dict(communication))


def different_layers(job: Job, hardware: Hardware) -> Layers:
    """Return the passes of every different layer for one micro-batch, without attention's kernels."""
    return {index: layer_seconds(job, hardware, job.model.layers[index]) for index in set(job.model.alike)}


def pass_seconds(
    job: Job, hardware: Hardware, rank: int, overlap: Overlap = OVERLAP, layers: Layers | None = None
) -> dict[Pass, PassSeconds]:
    """Return the time of each pass on a rank, the waiting for other pipeline stages not included.

    layers: from `different_layers`, of a job with the same micro-batches, ring, ulysses, tp, ep and recomputation.
    """
    compute, ring = _micro_batch(job, hardware, rank, overlap, layers or different_layers(job, hardware))
    backward = compute["recompute"] + compute["backward"]
    hides: dict[Pass, float] = {"count": compute["forward"].total, "forward": compute["forward"].total}
    hides["backward"] = backward.total
    if not (overlap.fsdp and hardware.streams):
        hides = dict.fromkeys(hides, 0.0)
    free = cache(lambda axis: overlap_of(hardware, job.linked(job.ranks(axis, rank))))
    found, number = {}, job.config.micro_batches
    for kind, sent in pass_traffic(job, rank).items():
        communication = {"ring": ring[kind].times(number), **_exposed(job, hardware, sent, rank)}
        communication |= parameter_seconds(job, hardware, sent, rank, hides.get(kind, 0.0))
        found[kind] = PassSeconds(
            compute[kind].times(number) if kind != "update" else compute[kind],
            {
                axis: transfers.with_free_part(free(axis))
                for axis, transfers in communication.items()
                if transfers != TransferSeconds()
            },
        )
    return found


def _micro_batch(
    job: Job, hardware: Hardware, rank: int, overlap: Overlap, layers: Layers
) -> tuple[dict[Pass, Seconds], dict[Pass, TransferSeconds]]:
    """Return (compute, messages of the ring) of one micro-batch in each pass, and the compute of the update."""
    compute, ring = dict.fromkeys(PASSES, Seconds()), dict.fromkeys(PASSES, TransferSeconds())
    attention = cache(partial(attention_passes, job, hardware, overlap, rank))
    for stage in job.stages(rank):
        for index, number in job.kinds(stage).items():
            layer, (forward, backward) = layers[index], attention(job.model.facts.windows[index])
            kernels = Seconds(attention=forward.kernels)
            compute["forward"] += (layer.forward + kernels).times(number)
            ring["forward"] += forward.messages.times(number)
            if not job.trained:
                continue
            compute["recompute"] += layer.recompute.times(number)
            if job.config.ac == "full":
                compute["recompute"] += kernels.times(number)
                ring["recompute"] += forward.messages.times(number)
            compute["backward"] += (layer.backward + Seconds(attention=backward.kernels)).times(number)
            ring["backward"] += backward.messages.times(number)
        if job.counts_choices:
            compute["count"], ring["count"] = compute["forward"], ring["forward"]
        if stage == len(job.stage_layers) - 1:
            forward_head, backward_head = head_seconds(job, hardware)
            compute["forward"] += forward_head
            compute["backward"] += backward_head if job.trained else Seconds()
    if job.trained:
        compute["update"] = Seconds(memory=optimizer_seconds(job, hardware, rank))
    return compute, ring


def _exposed(job: Job, hardware: Hardware, sent: Sequence[Sent], rank: int) -> ByAxis:
    """Return the communication that never overlaps, by axis."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for part in sent:
        if part.axis != "ring" and not of_parameters(part):
            seconds[part.axis] += sent_seconds(job, hardware, part, rank)
    return {axis: TransferSeconds(exposed=found) for axis, found in seconds.items()}


def parameter_seconds(job: Job, hardware: Hardware, sent: Sequence[Sent], rank: int, compute: float) -> ByAxis:
    """Return a pass's gathers of parameters or reductions of gradients, by axis.

    compute: seconds of the pass for one micro-batch, which hide them.
    """
    layers = sum(len(job.stage_layers[stage]) for stage in job.stages(rank))
    found: defaultdict[str, TransferSeconds] = defaultdict(TransferSeconds)
    for times, by_axis in parameter_transfers(job, hardware, sent, rank).items():
        together = sum(by_axis.values())
        once = overlapped_in_pieces(together / times, compute, layers + 1)
        for axis, seconds in by_axis.items():
            found[axis] += once.times(times * seconds / together)
    return found


def parameter_transfers(
    job: Job, hardware: Hardware, sent: Sequence[Sent], rank: int
) -> Mapping[int, Mapping[str, float]]:
    """Return the seconds of a pass's gathers or reductions by how often they happen, and axis.

    ZeRO-3 gathers in both passes of every micro-batch, the other stages in the first forward; stages 2 and 3 reduce in
    every backward, the others in the last.
    """
    zero, number = job.config.zero, job.config.micro_batches
    transfers: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for part in filter(of_parameters, sent):
        every = zero == 3 if "gather" in part.collective else zero >= 2 and part.axis in ("fsdp", "efsdp")
        by_axis = transfers[number if every else 1]
        by_axis[part.axis] = by_axis.get(part.axis, 0.0) + sent_seconds(job, hardware, part, rank)
    return transfers
