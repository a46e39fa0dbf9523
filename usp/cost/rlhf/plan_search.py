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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations, product
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from usp.cost.grid import GIB
from usp.rlhf.graph.calls import TrainStep
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, staleness_violations

from .simulator import Simulator
from .step_bounds import StepBounds

OVER_MEMORY = 3.0  # the factor of ReaL's search
_BETAS = (30.0, 100.0, 300.0)  # per relative difference: 1% worse is accepted with 0.74, 0.37, 0.05
_FRUITLESS = 2000  # moves of a chain without a new best, after which it ends
_PROPOSALS = 16  # of a move, until the bound of one allows it
_DRY = 3  # chains without a new best, after which the search ends


class NothingFits(ValueError):
    """No plan fits into memory."""


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
        """Return the problem without layouts whose call alone takes more memory than there is.

        Raises:
            NothingFits: naming the calls that no layout fits.
        """
        options = {name: [o for o in of if self._fits_alone(name, o)] for name, of in self.options.items()}
        if missing := [name for name, of in self.options.items() if not of]:
            raise NothingFits(
                f"{', '.join(missing)}: no layout, as the model and the samples of a step allow none on these ranks"
            )
        if homeless := [name for name, of in options.items() if not of]:
            raise NothingFits(
                f"no layout of some calls fits into {self.memory_bytes / GIB:.1f} GiB per rank. The nearest: "
                f"{'; '.join(map(self._nearest, homeless))}"
            )
        return replace(self, options=options)

    def allows(self, plan: ExecutionPlan) -> bool:
        """Return whether rollouts have ranks of their own, if they run beside the training of the step before."""
        return not self.simulator.staleness or not any(staleness_violations(self.simulator.graph, plan))

    def _fits_alone(self, name: str, layout: CallLayout) -> bool:
        kept = self._kept_bytes(name, layout)
        # What the call takes beside its weights is predicted only where these fit.
        return (
            kept <= self.memory_bytes and kept + self.simulator.estimates.call_bytes(name, layout) <= self.memory_bytes
        )

    def _kept_bytes(self, name: str, layout: CallLayout) -> float:
        """Return the memory of a call's weights and optimizer states if its role has no other call, and all that can be
        offloaded is."""
        estimates, call = self.simulator.estimates, self.simulator.graph[name]
        if not call.role:
            return 0.0
        copy = WeightCopy(call.role, layout.of_weights)
        return estimates.weight_bytes(copy) + (estimates.state_bytes(copy) if isinstance(call.work, TrainStep) else 0)

    def _nearest(self, name: str) -> str:
        """Return the layout of a call that needs least memory, in words."""
        kept = {layout: self._kept_bytes(name, layout) for layout in self.options[name]}
        needed = math.inf
        nearest: CallLayout | None = None
        for layout in sorted(kept, key=kept.__getitem__):
            if kept[layout] >= needed:
                break
            total = kept[layout] + self.simulator.estimates.call_bytes(name, layout)
            if total < needed:
                needed, nearest = total, layout
        return f"{name} needs {needed / GIB:.1f} GiB on {nearest}"

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
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Search for the plan of lowest energy, until the time is up or chains find nothing better.

    Args:
        budget: seconds.
        starts: plans to start from, besides every call's fastest layout. They may be outside of the options.
        keep: how many of the best plans to return.
        progress: called with (seconds, simulated plans, best energy) at each new best.
        clock: of the budget.
    """
    walk = _Walk(problem, keep, budget, progress, clock)
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
    walk = _Walk(problem, keep, math.inf)
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
        self,
        problem: Problem,
        keep: int,
        budget: float,
        progress: Callable[[float, int, float], None] = lambda seconds, simulated, best: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._problem, self._keep, self._progress = problem, keep, progress
        self._calls = tuple(problem.options)
        self._bounds = StepBounds(problem.simulator, problem.options)
        self._known: dict[_State, float] = {}
        self._energies: dict[object, float] = {}  # the same, once for plans that are alike
        self._placed = cache(self._new_placed)
        self._kinds: dict[CallLayout, int] = {}
        random_bits = np.random.default_rng(0).integers(1, 2**63, (2, max(len(self._calls), problem.ranks_per_host)))
        self._of_call, self._of_rank = random_bits.astype(np.uint64)
        self._options = tuple(problem.options.values())
        self._like: list[dict[object, list[CallLayout]]] = list(map(_grouped, self._options))
        self._nearest: tuple[float, _State] | None = None
        self._top: list[tuple[float, _State]] = []
        self._budget, self._clock = budget, clock
        self._begin = clock()
        self._history: list[tuple[float, float]] = []
        self._roles = [problem.simulator.graph[name].role for name in self._calls]

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self._clock() - self._begin > self._budget

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
        if state not in self._known:
            self._known[state] = self._new_energy(state)
        return self._known[state]

    def _new_energy(self, state: _State) -> float:
        key = self._key(state)
        if key not in self._energies and not self._problem.allows(self.plan(state)):
            self._energies[key] = math.inf
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
            self._history.append((self._clock() - self._begin, energy))
            self._progress(self._history[-1][0], len(self._energies), energy)
        if len(self._top) < self._keep or energy < self._top[-1][0]:
            self._top = sorted([*self._top, (energy, state)], key=itemgetter(0))[: self._keep]

    def chain(self, state: _State, beta: float, chance: random.Random) -> None:
        """Walk from a state until nothing better was found for long, then descend from the best of the walk."""
        energy = self.energy(state)
        best, fruitless = (energy, state), 0
        while fruitless < _FRUITLESS and not self.over:
            # The most that is accepted, with probability exp(-beta x difference).
            most = energy - math.log(1 - chance.random()) / beta * best[0]
            proposed = self._proposal(state, most, chance)
            if proposed and self.energy(proposed) <= most:
                state, energy = proposed, self.energy(proposed)
            if energy < best[0]:
                best, fruitless = (energy, state), 0
            fruitless += 1
        self.descend(best[1], chance)

    def descend(self, state: _State, chance: random.Random) -> None:
        """Give every call its best layout in turn, until no change helps."""
        energy, improved = self.energy(state), True
        numbers = list(range(len(self._calls)))
        while improved and not self.over:
            improved = False
            for name in self._problem.offload:
                neighbor = state._replace(offload=state.offload ^ {name})
                if self.energy(neighbor) < energy:
                    state, energy, improved = neighbor, self.energy(neighbor), True
            chance.shuffle(numbers)
            for number in numbers:
                bounds, layouts = self._bounds.of_options(state.layouts, number), self._options[number]
                for index in np.argsort(bounds, kind="stable"):
                    if bounds[index] >= energy or self.over:
                        break
                    neighbor = _with(state, number, layouts[index])
                    if self.energy(neighbor) < energy:
                        state, energy, improved = neighbor, self.energy(neighbor), True

    def _proposal(self, state: _State, most: float, chance: random.Random) -> _State | None:
        """Change one call (as ReaL does), or with it calls of its role to the same place, or what is offloaded.

        Where a bound exceeds `most`, which is not accepted, another one is proposed; None if there is no other, or
        after many.
        """
        kind = chance.random()
        if kind < 0.1 and self._problem.offload:
            return state._replace(offload=state.offload ^ {chance.choice(self._problem.offload)})
        number = chance.randrange(len(self._calls))
        if kind >= 0.5 or not self._roles[number]:
            allowed = np.flatnonzero(self._bounds.of_options(state.layouts, number) <= most)
            return _with(state, number, self._options[number][chance.choice(allowed)]) if len(allowed) else None
        others = [n for n, role in enumerate(self._roles) if role == self._roles[number] and n != number]
        for _ in range(_PROPOSALS):
            layout = chance.choice(self._options[number])
            found = _with(state, number, layout)
            for other in others:
                same = self._like[other].get(_place(layout))
                if same and chance.random() < 0.5:
                    found = _with(found, other, chance.choice(same))
            if self._bounds.of(found.layouts) <= most:
                return found
        return None

    def _key(self, state: _State) -> object:
        """Return the same for plans that differ in which of equal hosts, or ranks of a host, do what."""
        kinds, columns = zip(*map(self._placed, range(len(self._calls)), state.layouts), strict=True)
        ranks = np.sort(np.sum(columns, axis=0).reshape(-1, self._problem.ranks_per_host), axis=1)
        hosts = np.sort((ranks * self._of_rank[: ranks.shape[1]]).sum(axis=1))
        return kinds, state.offload, hosts.tobytes()

    def _new_placed(self, number: int, layout: CallLayout) -> tuple[int, np.ndarray]:
        """Return a number for a call's layout without its ranks, and random bits for each rank's part of the model."""
        parts = np.zeros(self._problem.simulator.world_size, np.uint64)
        parts[list(layout.ranks)] = [1 + _part(layout, place) for place in range(len(layout.ranks))]
        return self._kinds.setdefault(replace(layout, ranks=()), len(self._kinds)), parts * self._of_call[number]

    def found(self) -> Found:
        best = tuple((energy, self.plan(state)) for energy, state in self._top)
        nearest = (self._nearest[0], self.plan(self._nearest[1])) if self._nearest and not best else None
        return Found(best, nearest, len(self._energies), self._clock() - self._begin, tuple(self._history))


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
