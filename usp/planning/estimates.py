"""Seconds and bytes of everything in a simulated plan: formulas, times what was measured over what they say.

Measurements of a machine (`examples.rlhf_profile`) and of a run's steps (`--replan`) are factors alike, by call and
layout. Measured seconds of the parts of a call are linear in layers, sequences and tokens between neighbouring
measurements, and continue the last two beyond them; where there is one measurement, they are proportional (layers must
then be as measured). This is ReaL's profile (arXiv 2406.14088, section 5.1), with the toolkit's calls for blocks."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean as mean
from statistics import median
from typing import Any, NamedTuple

import torch

from usp.model.facts import ModelShape
from usp.parallel import Hardware
from usp.predict.job import Job
from usp.predict.traffic import FLOAT32
from usp.rlhf.graph import DataflowGraph, Inference
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

from .call_cost import CallOptions, Calls, weight_elements
from .workload import Batching, Workload

PREFILL, DECODE, UPDATE = "prefill", "decode", "update of "
VERSION = 2
Points = Mapping[tuple[int, int, int], float]  # seconds by (layers, sequences of a data-parallel rank, tokens of each)
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


class CallTime(NamedTuple):
    """The seconds of a call in a layout, and those by formula for the same samples."""

    call: str
    layout: CallLayout
    seconds: float
    predicted: float


@dataclass(frozen=True)
class Corrections:
    """Measured over predicted seconds, by call and `layout_key`: what measurements change in predictions."""

    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, call: str, layout: CallLayout) -> float | None:
        """Return the factor of a call in the most similar layout in which it was measured; None if it never was."""
        known, words = self.factors.get(call), set(layout_key(layout).split())
        return known[min(known, key=lambda key: len(words.symmetric_difference(key.split())))] if known else None

    def after(self, measured: Iterable[CallTime]) -> Corrections:
        """Return the corrections after further measurements. The median of those of a call in a layout counts half, the
        factor before half (geometrically): one slow step changes nothing for long."""
        ratios, factors = defaultdict[tuple[str, CallLayout], list[float]](list), {**self.factors}
        for each in measured:
            ratios[each[:2]].append(each.seconds / each.predicted)
        for (call, layout), of_all in ratios.items():
            before, now = self.of(call, layout), median(of_all)
            factor = now if before is None else math.sqrt(before * now)
            factors[call] = {**factors.get(call, {}), layout_key(layout): factor}
        return Corrections(factors)


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
        return (self.corrections.of(call, layout) or unknown) * self.formula(call, layout)

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


@dataclass(frozen=True, order=True)
class TimedPart:
    """What is timed: a part of calls, by a model, in a layout. Work is PREFILL: a forward over prompts, to the first
    token; DECODE: one step; "logprobs", "values": a forward; "train logprobs", "train values": an optimizer step on one
    mini-batch of as few micro-batches as the layout allows; UPDATE and one of these: what happens once in a step."""

    model: str  # `model_key`
    work: str
    layout: str  # `layout_key`


def model_key(model: ModelShape, dtype: torch.dtype) -> str:
    """Return a key that identifies a model up to its depth; raise ValueError for layers of several kinds."""
    if len(set(model.alike)) > 1:
        raise ValueError(
            f"model={model.facts.name} has layers of several kinds, and measurements scale one with the depth"
        )
    facts = replace(model.facts, name="", windows=model.facts.windows[:1])
    parts = (facts, model.embedding, model.layers[0], model.norm, model.head, facts.experts_per_token, str(dtype))
    head = "scalar" if model.head and model.head[0].shape[0] == 1 else f"vocabulary {facts.vocab_size}"
    return f"hidden {model.hidden_size}, {head}, {sha256(repr(parts).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Measurements:
    """What was measured on a machine."""

    device: str
    dtype: str
    ranks: int  # in the launch
    sizes: Mapping[str, Any] = field(hash=False)  # of every part
    points: Mapping[TimedPart, Points] = field(hash=False)

    def at(self, part: TimedPart, layers: int, sequences: float, tokens: float) -> float:
        """Return the seconds of a part; nan if it was not measured, or only at another depth."""
        points = self.points.get(part, {})
        depths = {depth for depth, *_ in points}
        return _along(points, layers, sequences, tokens) if len(depths) > 1 or layers in depths else math.nan

    def times(self, estimates: Estimates, layouts: Mapping[str, Iterable[CallLayout]]) -> Iterator[CallTime]:
        """Yield the seconds of calls in those of their layouts that were measured, once for each `layout_key`."""
        setting = estimates.workload, estimates.hardware, estimates.options
        for call in (each for each in estimates.graph.calls if each.role):
            shape = estimates.models[call.role]
            key = model_key(shape, estimates.options.dtype) if len(set(shape.alike)) == 1 else ""
            left = {part.layout for part in self.points if part.model == key}
            for layout in layouts[call.name] if left else ():
                if (name := layout_key(layout)) in left:
                    left.remove(name)
                    seconds = _MeasuredCalls(layout, shape, *setting, measured=self, key=key).cost(call).total
                    if not math.isnan(seconds):
                        yield CallTime(call.name, layout, seconds, estimates.formula(call.name, layout))

    @staticmethod
    def load(path: Path) -> Measurements:
        """Read measurements. Raises ValueError for a file that has none."""
        try:
            values = json.loads(path.read_text())
            if values["version"] != VERSION:
                raise ValueError(f"its version must be {VERSION}")
            points = {}
            for part in values["parts"]:  # whose points may end with the seconds of processors, which are not used
                measured = {(d, n, t): float(took) for d, n, t, took, *_ in part["points"]}
                points[TimedPart(part["model"], part["work"], part["layout"])] = measured
            return Measurements(values["device"], values["dtype"], values["ranks"], dict(values["sizes"]), points)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is not a profile of python -m examples.rlhf_profile: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class _MeasuredCalls(Calls):
    """The calls of a model whose parts take what was measured; nan where they were not."""

    measured: Measurements
    key: str  # `model_key`

    def _at(self, work: str, sequences: float, tokens: float) -> float:
        part = TimedPart(self.key, work, layout_key(self.layout))
        return self.measured.at(part, len(self.model.layers), sequences, tokens)

    def rows(self, job: Job) -> Mapping[str, float]:
        """Return the seconds of the fewest rows that the layout allows, and of the others."""
        work, least = f"train {job.output}" if job.trained else job.output, job.dims.pp
        tokens, once = mean(self.workload.sequences), self._at(UPDATE + work, 1, 1)
        seconds = self._at(work, least * job.config.seq_len / tokens, tokens)
        again = seconds - (0.0 if math.isnan(once) else once)
        return {work: seconds + again * max(0, job.config.micro_batches - least) / least}

    def prefill(self, rows: int, tokens: int) -> float:
        return self._at(PREFILL, rows, tokens)

    def decode(self, run: Batching, length: float) -> float:
        return self._at(DECODE, run.slots, length * self.layout.dims.sp)


def _along(known: Mapping[Any, float], x: float, *others: float) -> float:
    """Return the value at (x, *others): on the line through the two nearest known x, or in proportion to only one."""
    xs = sorted({first for first, *_ in known})

    def at(first: int) -> float:
        line = {place[1:]: seconds for place, seconds in known.items() if place[0] == first}
        return _along(line, *others) if others else line[()]

    if len(xs) == 1:
        return at(xs[0]) * x / xs[0]
    right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    low, high = at(xs[right - 1]), at(xs[right])
    return max(0.0, low + (x - xs[right - 1]) / (xs[right] - xs[right - 1]) * (high - low))
