"""Find an execution plan by simulated step time: Metropolis-Hastings as in ReaL (arXiv 2406.14088, section 5), or all.

A state has one layout per call and a set of offloaded roles. Its energy is the simulated step time, times
`OVER_MEMORY` where a rank needs more memory than it has. A proposal changes one call to another of its layouts, as in
ReaL, or one role to what another call of it has, or what is offloaded; a better state is accepted, a worse one with
probability exp(-beta x difference), in units of a tenth of a second of ReaL's steps of about 30 seconds: here relative
to the best energy, so that steps of milliseconds are searched alike. Each chain ends with a descent: every call in turn
takes its best layout, until none changes.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from usp.rlhf.graph.calls import TrainStep
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

from .simulator import Simulator, rank_index

OVER_MEMORY = 3.0  # the factor of ReaL's search
_BETAS = (30.0, 100.0, 300.0)  # per relative difference: 1% worse is accepted with 0.74, 0.37, 0.05
_FRUITLESS = 2000  # moves of a chain without a new best, after which it ends
_DRY = 3  # chains without a new best, after which the search ends


@dataclass(frozen=True)
class Problem:
    """What is searched.

    Attributes:
        options: by call, its layouts.
        memory_bytes: of a rank. ranks_per_host: hosts are alike, and so are the ranks of a host.
        offload: names that may be offloaded: see `ExecutionPlan.offload`.
    """

    simulator: Simulator
    options: Mapping[str, Sequence[CallLayout]] = field(hash=False)
    memory_bytes: float
    ranks_per_host: int
    offload: tuple[str, ...] = ()

    def that_fit(self) -> Problem:
        """Return the problem without layouts whose call alone takes more memory than there is."""
        options = {
            name: [o for o in of if self._alone(name, o) <= self.memory_bytes] for name, of in self.options.items()
        }
        return replace(self, options=options)

    def _alone(self, name: str, layout: CallLayout) -> float:
        """Return the memory of a call whose role has no other, all that can be offloaded being so."""
        estimates, call = self.simulator.estimates, self.simulator.graph[name]
        needed = estimates.call_bytes(name, layout)
        if call.role:
            copy = WeightCopy(call.role, layout.of_weights)
            needed += estimates.weight_bytes(copy)
            needed += estimates.state_bytes(copy) if isinstance(call.work, TrainStep) else 0
        return needed

    @property
    def plans(self) -> int:
        """The number of plans."""
        return math.prod(map(len, self.options.values())) * 2 ** len(self.offload)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: (seconds of a step, plan) of the fastest plans that fit into memory, ascending.
        nearest: (bytes, plan) of the plan that needs least memory; None if one fits.
        simulated: how many plans were simulated; seconds: how long the search took.
        history: (seconds since the beginning, energy) of each new best.
    """

    best: tuple[tuple[float, ExecutionPlan], ...]
    nearest: tuple[float, ExecutionPlan] | None
    simulated: int
    seconds: float
    history: tuple[tuple[float, float], ...]


def search(
    problem: Problem,
    *,
    seed: int = 0,
    budget: float = 60.0,
    starts: Sequence[ExecutionPlan] = (),
    keep: int = 10,
    progress: Callable[[float, int, float], None] = lambda seconds, simulated, best: None,
) -> Found:
    """Search for the plan of lowest energy, until the time is up or chains find nothing better.

    Args:
        budget: seconds.
        starts: plans to start from, besides every call's fastest layout. They may be outside of the options.
        keep: how many of the best plans to return.
        progress: called with (seconds, simulated plans, best energy) at each new best.
    """
    walk = _Walk(problem, keep, budget, progress)
    first = [walk.state(plan) for plan in starts] + [walk.fastest()]
    chance = random.Random(seed)
    for state in first:
        walk.energy(state)
    for state in first:
        walk.descend(state, chance)
    without, number = 0, 0
    while without < _DRY * len(_BETAS) and not walk.over:
        before = walk.best
        begin = walk.best_state if number % 2 else walk.anywhere(chance)
        walk.chain(begin or first[-1], _BETAS[number % len(_BETAS)], chance)
        without = without + 1 if walk.best == before else 0
        number += 1
    return walk.found()


def exhaustive(problem: Problem, keep: int = 10) -> Found:
    """Simulate every plan, but for those that are another one with hosts or ranks of a host exchanged."""
    walk = _Walk(problem, keep, math.inf, lambda seconds, simulated, best: None)
    names = problem.offload
    subsets = [frozenset(s) for size in range(len(names) + 1) for s in combinations(names, size)]
    for layouts, offload in product(product(*problem.options.values()), subsets):
        walk.energy(_State(layouts, offload))
    return walk.found()


class _State(NamedTuple):
    layouts: tuple[CallLayout, ...]  # in the order of `Problem.options`
    offload: frozenset[str]


class _Walk:
    """Energies of states, each kind of state simulated once, and the best ones."""

    def __init__(
        self, problem: Problem, keep: int, budget: float, progress: Callable[[float, int, float], None]
    ) -> None:
        self._problem, self._keep, self._progress = problem, keep, progress
        self._calls = tuple(problem.options)
        self._energies: dict[object, float] = {}
        self._places: dict[CallLayout, tuple[CallLayout, np.ndarray]] = {}
        self._like: list[dict[object, list[CallLayout]]] = [_grouped(problem.options[name]) for name in self._calls]
        self._nearest: tuple[float, _State] | None = None
        self._top: list[tuple[float, _State]] = []
        self._begin = time.monotonic()
        self._budget = budget
        self._history: list[tuple[float, float]] = []
        self._roles = [problem.simulator.graph[name].role for name in self._calls]
        self._order = [call.name for call in problem.simulator.graph.order]
        self._before = {name: problem.simulator.graph.before(name) for name in self._order}

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() - self._begin > self._budget

    @property
    def best(self) -> float:
        """The lowest energy of a plan that fits."""
        return self._top[0][0] if self._top else math.inf

    @property
    def best_state(self) -> _State | None:
        return self._top[0][1] if self._top else None

    def state(self, plan: ExecutionPlan) -> _State:
        return _State(tuple(plan[name] for name in self._calls), plan.offload)

    def plan(self, state: _State) -> ExecutionPlan:
        return ExecutionPlan("search", dict(zip(self._calls, state.layouts, strict=True)), state.offload)

    def fastest(self) -> _State:
        """Return the state of ReaL's first plan: every call as fast as it can be alone."""
        seconds = self._problem.simulator.estimates.call_seconds
        fastest = (min(of, key=partial(seconds, name)) for name, of in self._problem.options.items())
        return _State(tuple(fastest), frozenset())

    def anywhere(self, chance: random.Random) -> _State:
        return _State(tuple(map(chance.choice, self._problem.options.values())), frozenset())

    def energy(self, state: _State) -> float:
        """Return the energy of a state, and remember it among the best."""
        key = self._key(state)
        if key not in self._energies:
            seconds, peak = self._problem.simulator.measure(self.plan(state))
            fits = peak <= self._problem.memory_bytes
            energy = self._energies[key] = seconds * (1.0 if fits else OVER_MEMORY)
            if fits:
                self._keep_best(energy, state)
            elif self._nearest is None or peak < self._nearest[0]:
                self._nearest = peak, state
        return self._energies[key]

    def _keep_best(self, energy: float, state: _State) -> None:
        if energy < self.best:
            self._history.append((time.monotonic() - self._begin, energy))
            self._progress(self._history[-1][0], len(self._energies), energy)
        if len(self._top) < self._keep or energy < self._top[-1][0]:
            self._top = sorted([*self._top, (energy, state)], key=itemgetter(0))[: self._keep]

    def chain(self, state: _State, beta: float, chance: random.Random) -> None:
        """Walk from a state until nothing better was found for long, then descend from the best of the walk."""
        energy = self.energy(state)
        best, fruitless = (energy, state), 0
        while fruitless < _FRUITLESS and not self.over:
            proposed = self._proposal(state, chance)
            most = (
                energy - math.log(1 - chance.random()) / beta * best[0]
            )  # that is exp(-beta x difference) with exp(-beta x difference)
            if self._bound(proposed) <= most and self.energy(proposed) <= most:
                state, energy = proposed, self.energy(proposed)
            if energy < best[0]:
                best, fruitless = (energy, state), 0
            fruitless += 1
        self.descend(best[1], chance)

    def descend(self, state: _State, chance: random.Random) -> None:
        """Give every call its best layout in turn, until no change helps."""
        energy, improved = self.energy(state), True
        while improved and not self.over:
            improved = False
            for neighbors in self._neighborhoods(state, chance):
                for neighbor in neighbors:
                    if self.over:
                        return
                    if self._bound(neighbor) < energy and self.energy(neighbor) < energy:
                        state, energy, improved = neighbor, self.energy(neighbor), True
                if improved:
                    break

    def _neighborhoods(self, state: _State, chance: random.Random) -> Iterator[Iterator[_State]]:
        """Yield the states that differ in what is offloaded, then those that differ in one call, call by call."""
        yield (state._replace(offload=state.offload ^ {name}) for name in self._problem.offload)
        numbers = list(range(len(self._calls)))
        chance.shuffle(numbers)
        for number in numbers:
            yield (_with(state, number, layout) for layout in self._problem.options[self._calls[number]])

    def _proposal(self, state: _State, chance: random.Random) -> _State:
        """Change one call (as ReaL does), or with it calls of its role to the same place, or what is offloaded."""
        kind = chance.random()
        if kind < 0.1 and self._problem.offload:
            return state._replace(offload=state.offload ^ {chance.choice(self._problem.offload)})
        number = chance.randrange(len(self._calls))
        layout = chance.choice(self._problem.options[self._calls[number]])
        found = _with(state, number, layout)
        if kind < 0.5 and self._roles[number]:
            for other, role in enumerate(self._roles):
                same = self._like[other].get(_place(layout)) if role == self._roles[number] else None
                if same and other != number and chance.random() < 0.5:
                    found = _with(found, other, chance.choice(same))
        return found

    def _bound(self, state: _State) -> float:
        """Return a lower bound of the energy: the calls of the busiest rank, or those of the longest path."""
        busy = np.zeros(self._problem.simulator.world_size)
        seconds = dict(
            zip(
                self._calls,
                map(self._problem.simulator.estimates.call_seconds, self._calls, state.layouts),
                strict=True,
            )
        )
        for name, layout in zip(self._calls, state.layouts, strict=True):
            busy[rank_index(layout.ranks)] += seconds[name]
        ends: dict[str, float] = {}
        for name in self._order:
            ends[name] = seconds[name] + max((ends[before] for before in self._before[name]), default=0.0)
        return max(float(busy.max()), *ends.values())

    def _key(self, state: _State) -> object:
        """Return the same for plans that differ in which of equal hosts, or ranks of a host, do what."""
        kinds, columns = zip(*map(self._placed, state.layouts), strict=True)
        hosts = np.stack(columns, axis=-1).reshape(-1, self._problem.ranks_per_host, len(columns))
        return kinds, state.offload, tuple(sorted(b"".join(sorted(map(bytes, host))) for host in hosts))

    def _placed(self, layout: CallLayout) -> tuple[CallLayout, np.ndarray]:
        """Return a layout without its ranks, and for each rank its part of the model; -1: none."""
        if layout not in self._places:
            parts = np.full(self._problem.simulator.world_size, -1, np.int16)
            parts[list(layout.ranks)] = [_part(layout, place) for place in range(len(layout.ranks))]
            self._places[layout] = replace(layout, ranks=()), parts
        return self._places[layout]

    def found(self) -> Found:
        best = tuple((energy, self.plan(state)) for energy, state in self._top)
        nearest = (self._nearest[0], self.plan(self._nearest[1])) if self._nearest and not best else None
        return Found(best, nearest, len(self._energies), time.monotonic() - self._begin, tuple(self._history))


def _with(state: _State, number: int, layout: CallLayout) -> _State:
    return state._replace(layouts=(*state.layouts[:number], layout, *state.layouts[number + 1 :]))


def _part(layout: CallLayout, place: int) -> int:
    """Return a number of the part of the model on a rank of a layout: data-parallel replicas have the same."""
    dims, at = layout.dims, layout.dims.coordinates(place)
    parts = {"pp": dims.pp, "tp": dims.tp, "sp": dims.sp, "dp_shard": dims.dp_shard if layout.zero else 1}
    number = 0
    for axis, degree in parts.items():
        number = number * degree + at[axis] % degree
    return number


def _place(layout: CallLayout) -> tuple[object, ...]:
    return layout.ranks, layout.dims


def _grouped(layouts: Sequence[CallLayout]) -> dict[object, list[CallLayout]]:
    """Group layouts by ranks and degrees."""
    found: dict[object, list[CallLayout]] = {}
    for layout in layouts:
        found.setdefault(_place(layout), []).append(layout)
    return found
