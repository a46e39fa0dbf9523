"""The layouts that a call of an RLHF step may have, and the search of a plan by simulated step time.

Layouts have the ranks and degrees of ReaL (arXiv 2406.14088, section 5 and its public code): part of a host, of a size
that divides the host and at a multiple of that size, or whole consecutive hosts; a pipeline stage is within a host or
has whole hosts. Ring and Ulysses degrees, ZeRO stages and activation checkpointing are beyond it.

The search descends from the named plans, from every call's fastest layout, and again from the best plan with all or
half of its calls changed by chance. A plan that does not fit is worse than any that does, by the memory it needs."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, count, product, zip_longest
from operator import itemgetter

import numpy as np

from usp.model.facts import ModelFacts
from usp.parallel import ParallelDims, divisors
from usp.rlhf.graph import ModelCall, TrainStep
from usp.rlhf.plan.named_plans import NAMED_PLANS, Facts, named_plan
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.run.tables import GIB

from .question import Tried, silent, within
from .simulator import Simulator, rank_index

_STAGES_BESIDE_HOSTS = 8  # ReaL: pp is at most the number of hosts, or this if there are fewer
_FORBIDDEN, _OVER_MEMORY = 1e18, 1e9  # seconds, more than any step takes
_BEST = 10  # plans that a search returns
_MOST_LATE = 8  # groups of layouts of a call that are tried after the time is up, until one fits
RESTARTS = 10  # without a new best in a row, after which the search ends
Progress = Callable[[float, int, float], None]  # with (seconds, simulated plans, seconds of the best plan's step)


@dataclass(frozen=True)
class OptionSpace:
    """The layouts to choose from, on whole hosts. By the models of roles, tp divides both kinds of heads, tp x ulysses
    is at most the number of heads, pp of layers; beyond that, `allowed` tells what the model of a call can have."""

    world_size: int
    ranks_per_host: int
    samples: int  # of a step
    smallest: int = 1  # the fewest ranks of a call
    even: bool = False  # whole hosts are as many as divide all of them, from a multiple of that number
    max_tp: int = 8
    max_sequence: int = 1  # the highest ring x ulysses; 1: no sequence parallelism
    zero: tuple[int, ...] = (0,)  # stages of train and inference calls where there are ranks to shard over
    recompute: tuple[tuple[str, bool], ...] = (("none", False),)  # (--ac, --ac-offload) of train steps
    models: Mapping[str, ModelFacts] = field(default_factory=dict, hash=False)
    allowed: Callable[[ModelCall, CallLayout], bool] = field(default=lambda call, layout: True, compare=False)

    def __post_init__(self) -> None:
        if self.world_size > self.ranks_per_host and self.world_size % self.ranks_per_host:
            raise ValueError(f"{self.world_size} ranks must be whole hosts of {self.ranks_per_host}")

    @property
    def hosts(self) -> int:
        return max(1, self.world_size // self.ranks_per_host)


def rank_sets(space: OptionSpace) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that a call may have, smaller sets first."""
    host = min(space.ranks_per_host, space.world_size)
    for size in (size for size in divisors(host) if space.smallest <= size < host):
        yield from (tuple(range(first, first + size)) for first in range(0, space.world_size, size))
    for hosts in divisors(space.hosts) if space.even else range(1, space.hosts + 1):
        if hosts * host >= space.smallest:
            for first in range(0, space.hosts - hosts + 1, hosts if space.even else 1):
                yield tuple(range(first * host, (first + hosts) * host))


def degrees(ranks: int, space: OptionSpace) -> Iterator[ParallelDims]:
    """Yield the ways to divide a number of ranks, all data-parallel ranks in dp_shard."""
    host = space.ranks_per_host
    for tp in (tp for tp in divisors(ranks, min(space.max_tp, host)) if host % tp == 0):
        for pp in divisors(ranks // tp):
            stage = ranks // pp
            for sequence in divisors(stage // tp, space.max_sequence) if 0 in (host % stage, stage % host) else ():
                for ulysses in divisors(sequence):
                    yield ParallelDims(pp, 1, stage // tp // sequence, sequence // ulysses, ulysses, tp)


def options(call: ModelCall, space: OptionSpace) -> Iterator[CallLayout]:
    """Yield every layout of a call: a function (`compute`) has only data-parallel ranks, generation ZeRO stage 0."""
    trains = call.kind == "train_step"
    recompute = space.recompute if trains else (("none", False),)
    for ranks in rank_sets(space):
        if call.kind == "compute":
            yield CallLayout(ranks, ParallelDims(dp_replicate=len(ranks), dp_shard=1))
            continue
        for dims in (dims for dims in degrees(len(ranks), space) if allows(call, dims, space)):
            stages = space.zero if dims.dp_shard * dims.sp > 1 and call.kind != "generate" else (0,)
            whole = CallLayout(ranks, dims, tp_sequence_parallel=trains and dims.tp > 1)
            every = (replace(whole, zero=zero, ac=ac, ac_offload=out) for zero, (ac, out) in product(stages, recompute))
            yield from (layout for layout in every if space.allowed(call, layout))


def allows(call: ModelCall, dims: ParallelDims, space: OptionSpace) -> bool:
    """Return whether the model and the batch of a call allow degrees."""
    if call.kind == "compute":
        return True
    if facts := space.models.get(call.role):
        heads, divided = facts.num_heads, math.gcd(facts.num_heads, facts.num_kv_heads)
        if divided % dims.tp or dims.tp * dims.ulysses > heads or dims.pp > len(facts.windows):
            return False
    rows = 2 * call.work.mini_batches if isinstance(call.work, TrainStep) else 1  # at least, for each stage
    return dims.pp <= max(space.hosts, _STAGES_BESIDE_HOSTS) and space.samples >= rows * dims.batch * dims.pp


def _in_turns(layouts: Iterable[CallLayout]) -> list[list[CallLayout]]:
    """Return the layouts in groups that differ in their place only, in turns the group with the fewest degrees and
    options, and the one whose ranks hold least."""

    def axes(layout: CallLayout) -> int:
        dims = layout.dims
        degrees = (dims.pp, dims.batch, dims.ring, dims.ulysses, dims.tp)
        return sum(degree > 1 for degree in degrees) + (layout.zero > 0) + (layout.ac != "none")

    def held(layout: CallLayout) -> tuple[int, bool, int]:  # parameters first, then activations
        dims = layout.dims
        shards = dims.tp * dims.pp * dims.sp * (dims.batch if layout.zero else 1)
        return -shards, layout.ac == "none", -dims.tp * dims.sp

    groups = defaultdict[CallLayout, list[CallLayout]](list)
    for layout in layouts:
        groups[replace(layout, ranks=tuple(range(len(layout.ranks))))].append(layout)
    turns = chain(*zip(sorted(groups, key=axes), sorted(groups, key=held), strict=True))
    return [groups[first] for first in dict.fromkeys(turns)]


class NothingFits(ValueError):
    """No plan fits into memory."""


@dataclass(frozen=True)
class Problem:
    """What is searched."""

    simulator: Simulator
    options: Mapping[str, Sequence[CallLayout]] = field(hash=False)  # layouts by call
    memory_bytes: float  # of a rank
    offload: tuple[str, ...] = ()  # names that may be offloaded: see `ExecutionPlan.offload`
    clock: Callable[[], float] = time.monotonic  # of every `until` and budget; read once a step of work: `work_clock`

    def that_fit(self, until: float = math.inf, report: Tried = silent) -> Problem:
        """Return the problem without layouts that alone need too much, and without those that are not predicted by the
        time `until` of `clock`; tell `report` how many are, of all. Calls take turns, each with its simplest
        layouts and its most sharded ones first. Raise NothingFits naming calls without any."""
        if missing := [name for name, layouts in self.options.items() if not layouts]:
            raise NothingFits(
                f"{', '.join(missing)}: no layout, as the model and the samples of a step allow none on these ranks"
            )
        limit, work = self.memory_bytes, self.simulator.estimates.call_bytes
        fitting: dict[str, list[CallLayout]] = {name: [] for name in self.options}
        least: dict[str, tuple[float, str]] = dict.fromkeys(fitting, (math.inf, ""))
        calls = ([(name, group) for group in _in_turns(layouts)] for name, layouts in self.options.items())
        tried, late, every = 0, Counter[str](), sum(map(len, self.options.values()))
        for name, group in filter(None, chain(*zip_longest(*calls))):
            late[name] += self.clock() >= until
            if late[name] and (fitting[name] or late[name] > _MOST_LATE):
                continue
            tried += len(group)
            for layout in group:
                needed = self._weight_bytes(name, layout)
                if needed <= limit or (not fitting[name] and needed < least[name][0]):  # else nothing more matters
                    needed += work(name, layout)
                if needed <= limit:
                    fitting[name].append(layout)
                if needed < least[name][0]:
                    least[name] = needed, f"{name} needs {needed / GIB:.1f} GiB on {layout}"
            report(tried, every)
        if nearest := [words for name, (_, words) in least.items() if not fitting[name]]:
            part = "" if tried == every else f" of the {tried} of {every} layouts that --budget had time to predict"
            raise NothingFits(
                f"no layout of some calls fits into {limit / GIB:.1f} GiB per rank{part}. The nearest: "
                f"{'; '.join(nearest)}"
            )
        return replace(self, options=fitting)

    def tightest(self) -> ExecutionPlan:
        """Return the plan whose calls need least memory, each alone, and that offloads all it may; rollouts that may
        not train on the same ranks have the first half of them."""
        graph, half, work = self.simulator.graph, self.simulator.world_size // 2, self.simulator.estimates.call_bytes
        rollouts = {call.name for call in graph.rollouts_ahead}

        def order(name: str, layout: CallLayout) -> tuple[bool, float]:
            trains = bool(rollouts) and isinstance(graph[name].work, TrainStep)
            outside = layout.ranks[-1] >= half if name in rollouts else trains and layout.ranks[0] < half
            return outside, self._weight_bytes(name, layout) + work(name, layout)

        calls = {name: min(layouts, key=partial(order, name)) for name, layouts in self.options.items()}
        return ExecutionPlan("search", calls, frozenset(self.offload))

    def _weight_bytes(self, name: str, layout: CallLayout) -> float:
        """Return the memory of a call's weights and optimizer states."""
        estimates, call = self.simulator.estimates, self.simulator.graph[name]
        if not call.role:
            return 0.0
        copy = WeightCopy(call.role, layout.of_weights)
        return estimates.weight_bytes(copy) + (estimates.state_bytes(copy) if isinstance(call.work, TrainStep) else 0)

    def shared_ranks(self, plan: ExecutionPlan) -> int:
        """Return how many ranks of rollouts that run ahead train, too: none may."""
        graph = self.simulator.graph
        trains = filter(None, map(graph.train_call, graph.trained_roles))
        training = {rank for call in trains for rank in plan[call.name].ranks}
        return sum(len(training.intersection(plan[call.name].ranks)) for call in graph.rollouts_ahead)

    def alternatives(
        self, plan: ExecutionPlan, call: str, limit: Callable[[CallLayout], float]
    ) -> Iterator[ExecutionPlan]:
        """Yield the plans with another layout of one call whose bound, the busiest rank's seconds of calls, is below
        the limit, ordered by it."""
        busy, seconds = np.zeros(self.simulator.world_size), self.simulator.estimates.call_seconds
        for other, layout in plan.calls.items():
            if other != call:
                busy[rank_index(layout.ranks)] += seconds(other, layout)
        most, at = float(busy.max()), cache(lambda ranks: float(busy[rank_index(ranks)].max()))

        def bound(layout: CallLayout) -> float:
            return max(most, at(layout.ranks) + seconds(call, layout))

        for layout in within(self.options[call], bound, limit):
            yield replace(plan, calls={**plan.calls, call: layout})


def work_clock() -> Callable[[], float]:
    """Return a clock that goes on by a thousandth of a second whenever it is read, so that a budget counts work."""
    return (step / 1000 for step in count()).__next__


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: tuple[tuple[float, ExecutionPlan], ...]  # (seconds of a step, plan) that fit, the shortest first
    nearest: tuple[float, ExecutionPlan] | None  # (bytes, plan) that needs least memory of those that do not fit
    simulated: int  # plans
    seconds: float  # of the search


def search(
    problem: Problem,
    *,
    seed: int = 0,
    budget: float = 60.0,
    starts: Sequence[ExecutionPlan] = (),
    progress: Progress = silent,
) -> Found:
    """Search for the fastest plan that fits, until `budget` seconds are up or no change of a call helps, from every
    call's fastest layout and from `starts`, be they outside of the options; where none of these fits, first from the
    layouts that need least memory. Report each new best to `progress`."""
    seconds = problem.simulator.estimates.call_seconds
    fastest = {name: min(layouts, key=partial(seconds, name)) for name, layouts in problem.options.items()}
    plans = [ExecutionPlan("search", {name: plan[name] for name in fastest}, plan.offload) for plan in starts]
    plans.append(ExecutionPlan("search", fastest))
    descents, chance, idle = _Descents(problem, budget, progress, problem.clock()), random.Random(seed), 0
    for plan in plans:
        descents.energy(plan)
    if not descents.best:  # several calls may have to change at once until one fits
        plans.append(problem.tightest())
    plans.sort(key=descents.energy)
    for plan in plans:
        descents.descend(plan, chance)
    for number in count():
        if idle == RESTARTS or descents.over:
            break
        before, best = descents.best[:1], descents.best[0][1] if descents.best else plans[0]
        share = 0.5 if number % 2 else 1.0
        changed = {name: chance.choice(of) for name, of in problem.options.items() if chance.random() < share}
        descents.descend(replace(best, calls={**best.calls, **changed}), chance)
        idle = idle + 1 if descents.best[:1] == before else 0
    took = problem.clock() - descents.begin
    return Found(tuple(descents.best), descents.nearest, len(descents.energies), took)


@dataclass(eq=False)
class _Descents:
    """Descents to plans of low energy: the seconds of a step, if the plan is allowed and fits into memory."""

    problem: Problem
    budget: float
    progress: Progress
    begin: float  # by the problem's clock
    energies: dict[object, float] = field(default_factory=dict)
    best: list[tuple[float, ExecutionPlan]] = field(default_factory=list)
    nearest: tuple[float, ExecutionPlan] | None = None

    def descend(self, plan: ExecutionPlan, chance: random.Random) -> None:
        """Offload what helps and give every call its best layout in turn, until no change helps or the time is up."""
        energy, before, names = self.energy(plan), math.inf, list(self.problem.options)

        def neighbors() -> Iterator[ExecutionPlan]:
            for name in self.problem.offload:
                yield replace(plan, offload=plan.offload ^ {name})
            chance.shuffle(names)
            for name in names:
                yield from self.problem.alternatives(plan, name, lambda _: energy)

        while energy < before and not self.over:
            before = energy
            for neighbor in neighbors():
                if self.over:
                    return
                if (found := self.energy(neighbor)) < energy:
                    plan, energy = neighbor, found

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.problem.clock() - self.begin > self.budget

    def energy(self, plan: ExecutionPlan) -> float:
        """Return the energy of a plan, and remember it if it is among the best."""
        key = tuple(plan.calls.values()), plan.offload
        if key not in self.energies:
            self.energies[key] = self._energy(plan)
        return self.energies[key]

    def _energy(self, plan: ExecutionPlan) -> float:
        if shared := self.problem.shared_ranks(plan):
            return _FORBIDDEN * shared
        step = self.problem.simulator.run(plan)
        seconds, peak = step.seconds, step.peak_bytes
        if peak > self.problem.memory_bytes:
            self.nearest = min(self.nearest or (peak, plan), (peak, plan), key=itemgetter(0))
            return _OVER_MEMORY * peak / self.problem.memory_bytes
        if not self.best or seconds < self.best[0][0]:
            self.progress(self.problem.clock() - self.begin, len(self.energies), seconds)
        self.best = sorted([*self.best, (seconds, plan)], key=itemgetter(0))[:_BEST]
        return seconds


@dataclass(frozen=True)
class Baseline:
    """A named plan with its best degrees, and its simulated step; None if it has none."""

    name: str
    seconds: float = 0.0
    peak_bytes: float = 0.0
    plan: ExecutionPlan | None = None


def baselines(problem: Problem, space: OptionSpace, facts: Facts, until: float = math.inf) -> tuple[Baseline, ...]:
    """Return every named plan with its fastest degrees and memory options, of those that are predicted by the time
    `until`; where none fit, those that need least."""
    found, graph, begin = [], problem.simulator.graph, problem.clock()

    def measured(name: str, facts: Facts) -> Baseline | None:
        """Measure a named plan, offloading all it may where it does not fit; None if it cannot have the degrees."""
        try:
            plan = named_plan(name, graph, facts)
        except ValueError:
            return None
        layouts = [(call, plan[call.name]) for call in graph.calls]
        if not all(allows(call, layout.dims, space) and space.allowed(call, layout) for call, layout in layouts):
            return None
        for tried in (plan, replace(plan, offload=frozenset(problem.offload))):
            step = problem.simulator.run(tried)
            if step.peak_bytes <= problem.memory_bytes:
                break
        return Baseline(name, step.seconds, step.peak_bytes, tried)

    def best(name: str, variants: Iterable[Facts], end: float) -> tuple[Baseline, Facts]:
        every: list[tuple[Baseline, Facts]] = []
        for variant in variants:
            if every and problem.clock() >= end:
                break
            every += [(one, variant)] if (one := measured(name, variant)) else []
        fit = [pair for pair in every if pair[0].peak_bytes <= problem.memory_bytes]
        fastest = min(fit, key=lambda pair: pair[0].seconds, default=None)
        return fastest or min(every, key=lambda pair: pair[0].peak_bytes, default=(Baseline(name), facts))

    for number, name in enumerate(NAMED_PLANS, start=1):
        variants = [replace(facts, ac=ac, ac_offload=offload) for ac, offload in space.recompute]
        end, ranks = begin + (until - begin) * number / len(NAMED_PLANS), space.world_size
        if name == "separation":
            ranks //= 2
        if name != "heuristic":  # which chooses its degrees itself
            every = product(variants, degrees(ranks, space), space.zero)
            variants = [replace(saving, dims=dims, zero=zero) for saving, dims, zero in every]
        one, chosen = best(name, variants, end)
        if name == "separation" and one.plan:
            one, _ = best(name, (replace(chosen, rollout_dims=dims) for dims in degrees(ranks, space)), end)
        found.append(one)
    return tuple(found)
