"""Seconds and bytes of everything in a simulated plan: formulas, times what was measured over what they say.

Calls that were measured on a machine (`examples.rlhf_profile`) and in a run's steps (`--replan`) correct them alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache

from usp.model.facts import ModelShape
from usp.parallel import Hardware
from usp.predict.traffic import FLOAT32
from usp.rlhf.graph import DataflowGraph, Inference
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

from .call_cost import CallOptions, Calls, weight_elements
from .corrections import Corrections
from .workload import Workload

_PLACE = ("ranks", "dims", "zero", "micro_batch_tokens")


@lru_cache(1 << 16)
def layout_key(layout: CallLayout) -> str:
    """Return the degrees and options of a layout; equal for layouts that run alike on different ranks of one host.
    Replicas without ZeRO are data-parallel ranks like all others, and micro-batches are counted by the estimates."""
    dims, default = layout.dims, CallLayout((0,), layout.dims)
    sharded = layout.zero > 0 and dims.dp_shard * dims.sp > 1
    degrees = {"dp": dims.batch, **({"replicas": dims.dp_replicate} if sharded else {})}
    degrees |= {axis: getattr(dims, axis) for axis in ("pp", "ring", "ulysses", "tp", "ep")}
    words = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    words += [f"zero={layout.zero}"] if sharded else []
    words += [dims.sp_order] if dims.ring > 1 and dims.ulysses > 1 and dims.sp_order != "ring-outer" else []
    options = (field.name for field in fields(layout) if field.name not in _PLACE)
    words += [f"{name}={getattr(layout, name)}" for name in options if getattr(layout, name) != getattr(default, name)]
    return " ".join(words) or "one rank"


@dataclass(eq=False)
class Estimates:
    """Seconds and bytes of a graph's calls and of the movement of weights. Bytes are those of the rank that has most. A
    call takes the same wherever its ranks are within a host, or on whole hosts, and so do calls of one kind to roles
    that share a model. A layout without a factor has that of the most similar layout of the call."""

    graph: DataflowGraph
    models: Mapping[str, ModelShape]
    workload: Workload
    hardware: Hardware
    options: CallOptions
    corrections: Corrections = field(default_factory=Corrections)

    def __post_init__(self) -> None:
        graph, models, setting = self.graph, self.models, (self.workload, self.hardware, self.options)
        # of each call with a model the first that does the same with the same model
        self._like, first = dict[str, str](), dict[object, str]()
        for call in (call for call in graph.calls if call.role):
            work = call.work.head if isinstance(call.work, Inference) else call.name
            self._like[call.name] = first.setdefault((work, id(models[call.role])), call.name)
        self._placed = cache(self._somewhere)
        self._cost = cache(lambda call, at: Calls(at, models[graph[call].role], *setting).cost(graph[call]))
        self._elements = cache(lambda role, at: weight_elements(at, models[role], self.options))
        # Searches ask for the same very often.
        self.call_seconds, self.fill_seconds = cache(self._call_seconds), cache(self._fill_seconds)
        # Of a copy's weights in the dtype of untrained ones.
        self.weight_bytes = cache(
            lambda copy: self._elements(copy.role, self._placed(copy.layout)) * self.options.dtype.itemsize
        )

    def _call_seconds(self, call: str, layout: CallLayout) -> float:
        """Return the time of a call on all its ranks, from the first that begins to the last that ends."""
        unknown = 1.0 if call in self._like else 0.0  # of functions nothing is predicted
        return (self.corrections.of(call, layout_key(layout)) or unknown) * self.formula(call, layout)

    def call_bytes(self, call: str, layout: CallLayout) -> float:
        """Return the memory that a call takes beside weights and optimizer: activations, gradients, KV cache."""
        return self._cost(self._like[call], self._placed(layout)).work_bytes if call in self._like else 0.0

    def state_bytes(self, copy: WeightCopy) -> float:
        """Return the memory of a trained copy's moments, and what its float32 weights take beyond `weight_bytes`."""
        return self._elements(copy.role, self._placed(copy.layout)) * (3 * FLOAT32 - self.options.dtype.itemsize)

    def load_seconds(self, copy: WeightCopy) -> float:
        """Return the time to move a copy's weights from the host to the device, or back."""
        return self.weight_bytes(copy) / self.hardware.host_link_bytes_per_second

    def state_load_seconds(self, copy: WeightCopy) -> float:
        """Return the time to move a trained copy's moments from the host to the device, or back."""
        moments = 2 * FLOAT32 * self._elements(copy.role, self._placed(copy.layout))
        return moments / self.hardware.host_link_bytes_per_second

    def _fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        """Return the time to fill a copy from another one by what hosts and ranks lack; cf. `realloc_seconds`."""
        if source.layout.of_weights == copy.layout.of_weights:
            return 0.0
        total = self.models[copy.role].numel * self.options.dtype.itemsize
        inside, outside = self.hardware.tiers[0], self.hardware.tiers[-1]
        has, wants = (_parts_by_host(each.layout, self.hardware.host_devices) for each in (source, copy))
        missing = {host: total * parts * (1 - has.get(host, 0.0)) for host, parts in wants.items()}

        def rate(layout: CallLayout, host: int) -> float:
            ranks = sum(rank // self.hardware.host_devices == host for rank in layout.ranks)
            return min(outside.shared_bytes_per_second, ranks * outside.send.bytes_per_second)

        arriving = max(nbytes / rate(copy.layout, host) for host, nbytes in missing.items())
        sending = sum(missing.values()) / sum(rate(source.layout, host) for host in has)
        kept = self.weight_bytes(source) / total if set(copy.layout.ranks) <= set(source.layout.ranks) else 0.0
        stays = self.weight_bytes(copy) * min(1.0, kept)
        within = (self.weight_bytes(copy) - stays) / inside.send.bytes_per_second
        received = (max(arriving, sending) + within) / self.hardware.link_efficiency
        return max(received, self.hardware.memory_seconds(2 * stays))

    def formula(self, call: str, layout: CallLayout) -> float:
        """Return the seconds of a call by formula; those of functions are not predicted, and count as one."""
        return self._cost(self._like[call], self._placed(layout)).total if call in self._like else 1.0

    def _somewhere(self, layout: CallLayout) -> CallLayout:
        """Return the layout on the first ranks, if it is within a host, or on whole hosts."""
        first, number, host = layout.ranks[0], len(layout.ranks), self.hardware.host_devices
        consecutive = layout.ranks[-1] - first == number - 1
        if consecutive and (first % host + number <= host or first % host == number % host == 0):
            return replace(layout, ranks=tuple(range(number)))
        return layout


@lru_cache(1 << 14)
def _parts_by_host(layout: CallLayout, host_devices: int) -> dict[int, float]:
    """Return by host the part of a model that its ranks hold together in a layout."""
    dims = layout.dims
    parts = dims.tp * (dims.dp_shard * dims.sp if layout.zero else 1)  # of a pipeline stage
    ranks = Counter(rank // host_devices for rank in layout.ranks)
    per_stage = len(layout.ranks) // dims.pp
    return {host: min(number, parts * -(-number // per_stage)) / (parts * dims.pp) for host, number in ranks.items()}
