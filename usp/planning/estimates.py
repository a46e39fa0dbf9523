"""Seconds and bytes of everything in a simulated plan: formulas, times what was measured over what they say.

Measurements of a machine (`rlhf-profile`) and of the steps of a run (`--replan`) are factors alike, by call and layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from parallel import Hardware
from usp.model.facts import ModelShape
from usp.predict.traffic import FLOAT32
from usp.rlhf.graph import DataflowGraph, Inference, ModelCall
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

from .call_cost import CallOptions, call_cost, weight_elements
from .workload import Workload

_FASTER = 1e6  # links by which communication takes no time worth counting
_PLACE = ("ranks", "dims", "zero", "micro_batch_tokens")


class CallSeconds(NamedTuple):
    """The seconds of a call, or factors of them: of its computation, and of communication that it waits for."""

    computation: float = 1.0
    communication: float = 1.0

    @property
    def total(self) -> float:
        return self.computation + self.communication

    def times(self, factors: CallSeconds) -> CallSeconds:
        """Return both parts, each times its factor."""
        return CallSeconds(self.computation * factors.computation, self.communication * factors.communication)


Factors = Mapping[str, Mapping[str, CallSeconds]]  # measured over predicted seconds, by call and `layout_key`


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


def factor_of(factors: Factors, call: str, layout: CallLayout) -> CallSeconds | None:
    """Return the factor of a call in the most similar layout in which it was measured; None if it never was."""
    known, words = factors.get(call), set(layout_key(layout).split())
    return known[min(known, key=lambda key: len(words.symmetric_difference(key.split())))] if known else None


class Estimates:
    """Seconds and bytes of a graph's calls and of the movement of weights. Bytes are those of the rank that has most.

    A call takes the same wherever its ranks are within a host, or on whole hosts; and so do calls of one kind to roles
    that share a model. A layout without a factor has that of the most similar layout of the call.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        models: Mapping[str, ModelShape],
        workload: Workload,
        hardware: Hardware,
        options: CallOptions,
        factors: Factors = MappingProxyType({}),
    ) -> None:
        self.graph, self.models, self.workload, self.hardware, self.options = graph, models, workload, hardware, options
        self.factors = factors
        self._like = {call.name: self._first_like(call) for call in graph.calls if call.role}
        self._placed = cache(self._somewhere)
        setting = workload, hardware, options
        self._cost = cache(lambda call, at: call_cost(graph[call], at, models[graph[call].role], *setting))
        self._elements = cache(lambda role, at: weight_elements(at, models[role], options))
        # Searches ask for the same very often.
        self.call_seconds, self.fill_seconds = cache(self._call_seconds), cache(self._fill_seconds)
        self.weight_bytes = cache(self._weight_bytes)

    def with_factors(self, factors: Factors) -> Estimates:
        """Return the same estimates with other factors."""
        other = Estimates(self.graph, self.models, self.workload, self.hardware, self.options, factors)
        other._cost, other._elements = self._cost, self._elements
        return other

    def predicted(self, call: str, layout: CallLayout) -> CallSeconds:
        """Return the seconds of a call by formula; a function takes one second, and its factor is its time."""
        total, without_links = self.formula(call, layout), self._over_fast_links.formula(call, layout)
        return CallSeconds(min(without_links, total), max(0.0, total - without_links))

    def _call_seconds(self, call: str, layout: CallLayout) -> float:
        """Return the time of a call on all its ranks, from the first that begins to the last that ends."""
        unknown = CallSeconds() if call in self._like else CallSeconds(0.0, 0.0)  # of functions nothing is predicted
        factor = factor_of(self.factors, call, layout) or unknown
        if factor.computation == factor.communication:
            return factor.computation * self.formula(call, layout)
        return self.predicted(call, layout).times(factor).total

    def call_bytes(self, call: str, layout: CallLayout) -> float:
        """Return the memory that a call takes beside weights and optimizer: activations, gradients, KV cache."""
        return self._cost(self._like[call], self._placed(layout)).work_bytes if call in self._like else 0.0

    def _weight_bytes(self, copy: WeightCopy) -> float:
        """Return the memory of a copy's weights in the dtype of untrained ones."""
        return self._elements(copy.role, self._placed(copy.layout)) * self.options.dtype.itemsize

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

    @cached_property
    def _over_fast_links(self) -> Estimates:
        tiers = tuple(tier.faster(_FASTER, latency=_FASTER) for tier in self.hardware.tiers)
        hardware = replace(self.hardware, tiers=tiers)
        return Estimates(self.graph, self.models, self.workload, hardware, self.options)

    def _somewhere(self, layout: CallLayout) -> CallLayout:
        """Return the layout on the first ranks, if it is within a host, or on whole hosts."""
        first, number, host = layout.ranks[0], len(layout.ranks), self.hardware.host_devices
        consecutive = layout.ranks[-1] - first == number - 1
        if consecutive and (first % host + number <= host or first % host == number % host == 0):
            return replace(layout, ranks=tuple(range(number)))
        return layout

    def _first_like(self, call: ModelCall) -> str:
        """Return the first call that takes as long as `call` in the same layout: the same work with the same model."""

        def work(other: ModelCall) -> object:
            return other.work.head if isinstance(other.work, Inference) else other.name

        model = self.models[call.role]
        return next(c.name for c in self.graph.calls if work(c) == work(call) and self.models.get(c.role) is model)


@lru_cache(1 << 14)
def _parts_by_host(layout: CallLayout, host_devices: int) -> dict[int, float]:
    """Return by host the part of a model that its ranks hold together in a layout."""
    dims = layout.dims
    parts = dims.tp * (dims.dp_shard * dims.sp if layout.zero else 1)  # of a pipeline stage
    ranks = Counter(rank // host_devices for rank in layout.ranks)
    per_stage = len(layout.ranks) // dims.pp
    return {host: min(number, parts * -(-number // per_stage)) / (parts * dims.pp) for host, number in ranks.items()}
