"""The search of ReaL's code (reallm/profiler, csrc/search; April 2024), which chose the plans that its figure measures.

estimates  what the layers of a model take on tp ranks alone, in a micro-batch, times micro-batches and stages, and less
           for more ranks by its authors' factors; no messages, sampling, reductions of gradients or offloads. A profile
           of layers stands behind them there, our prediction of these layers here
memory     2 bytes for each weight and gradient, 20 for the optimizer, divided over dp; a model that is not trained has
           twice its weights, and those of OFFLOADED only while they run. A plan beyond 80 GiB counts three times
walk       from every call's fastest layout, one call changes to any other at a time; what is slower by d seconds in
           five steps is accepted with probability exp(-10 beta d), so that three chains, of beta 0.001, 0.002 and
           0.003, walk about. Two minutes each, in which every proposal builds a hash table of all layouts: assumed
           are `PROPOSALS`. The fastest plan that was met is taken
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np

from benchmarks.rlhf.real_rows import PROMPT, Cell
from benchmarks.rlhf.real_system import HOST, OFFLOADED, RealEstimates, real_layout
from usp.model.facts import ModelShape
from usp.parallel import ParallelDims
from usp.planning.rlhf_search import OptionSpace, options
from usp.planning.workload import Workload
from usp.rlhf.graph import Generate, ModelCall
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

DEVICE_BYTES = 80 * 1024**3
BETAS, PROPOSALS, CHAINS = (0.001, 0.002, 0.003), 250_000, 64  # chains side by side share the proposals of a beta
PENALTY = 3  # of a plan that exceeds memory
MOST = 1000  # layouts of a call, the first ones
SMALLEST = 4  # devices of a call
Array = np.ndarray


def real_space(world_size: int, samples: int, smallest: int = SMALLEST) -> OptionSpace:
    """Return the space that ReaL searches: dp x tp of a train step is within a host of 8 ranks."""

    def allowed(call: ModelCall, layout: CallLayout) -> bool:
        return call.kind != "train_step" or layout.dims.tp * layout.dims.batch <= HOST

    return OptionSpace(world_size, HOST, samples, smallest, recompute=(("full", False),), allowed=allowed)


def bytes_by_rule(call: ModelCall, layout: CallLayout, model: ModelShape, workload: Workload) -> tuple[float, float]:
    """Return the bytes of a device that ReaL counts for a call: always, and besides while it runs."""
    pp, tp, dp = layout.dims.pp, layout.dims.tp, layout.dims.batch
    hidden, layers, samples = model.hidden_size, len(model.layers), len(workload.samples)
    facts, inputs = model.facts, 4 * workload.sequences[0] * hidden * layers / tp  # or keys and values, of a sample
    numel = 3 * facts.vocab_size * hidden + layers * hidden * (4 * hidden + 3 * facts.intermediate_size)
    held = 4 * numel / (pp * tp)
    if call.kind == "train_step":
        return held + 20 * numel / (pp * tp * dp), samples // (2 * pp * dp) * inputs
    if call.kind == "generate":
        return held, samples / (pp * dp) * inputs
    return (0.0, held) if call.role in OFFLOADED else (held, 0.0)


class ReaLsSeconds:
    """Seconds as ReaL's search estimates them."""

    def __init__(self, real: RealEstimates) -> None:
        self.real, self.samples = real, len(real.workload.samples)
        self._alone = cache(self._layers_alone)

    def _layers_alone(self, call: ModelCall, tp: int, samples: int) -> dict[str, float]:
        """Return what a micro-batch of every mini-batch takes in all layers; a decode step is that after the prompt."""
        layout = CallLayout(tuple(range(tp)), ParallelDims(tp=tp, dp_shard=1))
        if call.kind == "train_step":
            layout = CallLayout(layout.ranks, layout.dims, ac="full")
        response = 1 if call.kind == "generate" else self.real.workload.limit
        return dict(self.real.cost_of(call.name, layout, Workload.of(samples, 1, PROMPT, (response,))).seconds)

    def of_call(self, call: ModelCall, dims: ParallelDims) -> float:
        pp, tp, dp, trains = dims.pp, dims.tp, dims.batch, call.kind == "train_step"
        micro_batches = pp * (2 if trains and pp > 1 else 1)
        samples = self.samples / (dp * micro_batches)
        parts = {part: took * samples / ceil(samples) for part, took in self._alone(call, tp, ceil(samples)).items()}
        last, factor = parts.pop("update", 0.0) / pp, 1 - 0.03 * tp * (tp > 1)
        if isinstance(call.work, Generate):
            last = parts.pop("decode") * (call.work.max_new_tokens - 1)
            factor = 1 - 0.03 * min(dp * tp, HOST) * (dp * tp > 1)
        elif trains and pp * dp == 1:
            factor *= 1 - 0.04 * tp
        return (sum(parts.values()) / pp * (pp + micro_batches - 1) + last) * factor * (1 + 0.01 * pp * (pp > HOST))

    def of_reallocation(self, elements: int, has: ParallelDims, wants: ParallelDims, near: bool) -> float:
        """Return the time of a reallocation wherever the devices are, none between equal degrees."""
        same = (has.pp, has.tp, has.batch) == (wants.pp, wants.tp, wants.batch)
        return 0.0 if same else self.real.constants.moves(elements, has, wants, near)


class Options(NamedTuple):
    """The layouts of a call, their different degrees, and of each layout: seconds, whether it is on each half host,
    bytes held and used, and which degrees it has."""

    layouts: Sequence[CallLayout]
    degrees: Sequence[ParallelDims]
    seconds: Array
    places: Array
    held: Array
    used: Array
    kinds: Array


def _options(call: ModelCall, cell: Cell, estimate: ReaLsSeconds) -> Options:
    model, workload = estimate.real.models[call.role], cell.workload
    facts = {role: shape.facts for role, shape in estimate.real.models.items()}
    every = options(call, replace(real_space(cell.devices, cell.samples), models=facts))
    fit = [layout for layout in every if sum(bytes_by_rule(call, layout, model, workload)) < DEVICE_BYTES][:MOST]
    degrees = list(dict.fromkeys(layout.dims for layout in fit))
    seconds = {dims: estimate.of_call(call, dims) for dims in degrees}
    places = np.zeros((len(fit), cell.devices // SMALLEST), dtype=bool)
    for number, layout in enumerate(fit):
        places[number, layout.ranks[0] // SMALLEST : layout.ranks[-1] // SMALLEST + 1] = True
    held, used = np.array([bytes_by_rule(call, layout, model, workload) for layout in fit]).T
    return Options(
        [real_layout(call, layout, cell) for layout in fit],
        degrees,
        np.array([seconds[layout.dims] for layout in fit]),
        places,
        held,
        used,
        np.array([degrees.index(layout.dims) for layout in fit]),
    )


def _tables(one: Options, other: Options, elements: int, estimate: ReaLsSeconds) -> tuple[Array, Array]:
    """Return the seconds of reallocations by the degrees of two calls, from the first to the second and back."""

    def seconds(has: ParallelDims, wants: ParallelDims) -> float:
        near = max(dims.pp * dims.tp * dims.batch for dims in (has, wants)) <= HOST
        return estimate.of_reallocation(elements, has, wants, near)

    there = [[seconds(a, b) for b in other.degrees] for a in one.degrees]
    return np.array(there), np.array([[seconds(b, a) for b in other.degrees] for a in one.degrees])


class Pair(NamedTuple):
    """A rollout or inference of a trained role, and its train step: their places among the calls, and the seconds in
    which weights move to the train step and back, by the degrees of both."""

    other: int
    trains: int
    there: Array
    back: Array


@dataclass(frozen=True)
class Plans:
    """The plans of a cell: an index for each call, into its layouts."""

    devices: int
    calls: Sequence[ModelCall]  # with a model, the rollout first
    options: Sequence[Options]
    pairs: Sequence[Pair]

    @staticmethod
    def of(cell: Cell, real: RealEstimates) -> Plans:
        estimate, calls = ReaLsSeconds(real), [call for call in real.graph.calls if call.role]
        of = [_options(call, cell, estimate) for call in calls]
        pairs = [
            Pair(here, there, *_tables(of[here], of[there], real.models[trains.role].numel, estimate))
            for there, trains in enumerate(calls)
            for here, other in enumerate(calls)
            if trains.kind == "train_step" != other.kind and other.role == trains.role
        ]
        return Plans(cell.devices, calls, of, pairs)

    def steps(self, chosen: Array) -> tuple[Array, Array]:
        """Return the seconds of the steps of plans, of each in a row, and which exceed memory."""
        free = np.zeros((len(chosen), self.devices // SMALLEST))
        held, used = np.zeros_like(free), np.zeros_like(free)
        places = [each.places[chosen[:, number]] for number, each in enumerate(self.options)]
        seconds = [each.seconds[chosen[:, number]] for number, each in enumerate(self.options)]
        kinds = [each.kinds[chosen[:, number]] for number, each in enumerate(self.options)]
        for number, each in enumerate(self.options):
            held += places[number] * each.held[chosen[:, number], None]
            used = np.maximum(used, places[number] * each.used[chosen[:, number], None])

        def run(ready: Array, at: Array, took: Array) -> Array:
            end = np.maximum(ready, (free * at).max(1)) + took
            np.copyto(free, end[:, None], where=at & (took > 0)[:, None])
            return np.where(took > 0, end, ready)

        rolled = run(np.zeros(len(chosen)), places[0], seconds[0])
        inference = [number for number, call in enumerate(self.calls) if call.kind == "inference"]
        ready = np.maximum.reduce([run(rolled, places[number], seconds[number]) for number in inference])
        both = [places[pair.other] | places[pair.trains] for pair in self.pairs]
        moved = [
            run(ready, at, pair.there[kinds[pair.other], kinds[pair.trains]])
            for pair, at in zip(self.pairs, both, strict=True)
        ]
        trained = [
            run(begin, places[pair.trains], seconds[pair.trains]) for pair, begin in zip(self.pairs, moved, strict=True)
        ]
        for pair, at, end in zip(self.pairs, both, trained, strict=True):
            run(end, at, pair.back[kinds[pair.other], kinds[pair.trains]])
        return free.max(1), (held + used).max(1) > DEVICE_BYTES


def reals_plan(cell: Cell, real: RealEstimates, seed: int = 0) -> tuple[float, ExecutionPlan]:
    """Return the seconds of a step by ReaL's estimate, and the plan that its search takes."""
    plans, chance = Plans.of(cell, real), np.random.default_rng(seed)
    betas, chains = np.repeat(BETAS, CHAINS), np.arange(CHAINS * len(BETAS))
    ends = np.cumsum([0, *(len(each.layouts) for each in plans.options)])
    at = np.tile([int(each.seconds.argmin()) for each in plans.options], (len(chains), 1))
    cost, best, found = np.full(len(chains), np.inf), np.inf, at[0]
    for number in range(PROPOSALS // CHAINS):
        new = at.copy()
        if number:
            drawn = chance.integers(ends[-1], size=len(chains))
            which = np.searchsorted(ends, drawn, side="right") - 1
            new[chains, which] = drawn - ends[which]
        seconds, over = plans.steps(new)
        costs = seconds * np.where(over, PENALTY, 1)
        slower = np.floor(50 * np.maximum(0.0, costs - cost))  # tenths of a second in five steps
        accepted = chance.random(len(chains)) < np.exp(-betas * slower)
        at, cost = np.where(accepted[:, None], new, at), np.where(accepted, costs, cost)
        allowed = np.where(accepted & ~over, seconds, np.inf)
        if allowed.min() < best:
            best, found = float(allowed.min()), new[allowed.argmin()]
    layouts = {
        call.name: options.layouts[index]
        for call, options, index in zip(plans.calls, plans.options, found, strict=True)
    }
    rest = {call.name: CallLayout((0,), ParallelDims(dp_shard=1)) for call in real.graph.calls if not call.role}
    ordered = {call.name: (layouts | rest)[call.name] for call in real.graph.calls}
    return best, ExecutionPlan("search", ordered, frozenset(OFFLOADED))
