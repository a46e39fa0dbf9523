"""Choose an execution plan for RLHF, and what a person asks about it: why each call got its layout, what the named
plans would cost, and what would change the verdict. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from usp.cost.grid import GIB
from usp.rlhf.plan.named_plans import Facts
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

from .baselines import Baseline, baselines
from .options import OptionSpace, options
from .plan_search import Found, NothingFits, Problem, search
from .simulator import Simulation, Simulator
from .step_bounds import StepBounds

Report = Callable[[float, int, float], None]


@dataclass(frozen=True)
class Alternative:
    """The best plan in which one call has other ranks or degrees, and all others are the same.

    Attributes:
        seconds: of a step; more than the chosen plan's.
        alone: seconds of the call itself there.
    """

    layout: CallLayout
    seconds: float
    alone: float


@dataclass(frozen=True)
class RlhfChoice:
    """A chosen plan.

    Attributes:
        found: of the search, with at least one plan that fits. simulation: of the best plan.
        named: the named plans at their best.
        next_best: by call; calls with a single layout are missing.
    """

    problem: Problem
    found: Found
    simulation: Simulation
    named: tuple[Baseline, ...]
    next_best: Mapping[str, Alternative]

    @property
    def plan(self) -> ExecutionPlan:
        """The best plan."""
        return self.found.best[0][1]


def problem_of(simulator: Simulator, space: OptionSpace, memory_bytes: float, offload: tuple[str, ...] = ()) -> Problem:
    """Return the problem of all options of a space, less those of calls that alone do not fit into memory.

    Raises:
        NothingFits: naming the calls that no layout fits.
    """
    found = {call.name: list(options(call, space)) for call in simulator.graph.calls}
    return Problem(simulator, found, memory_bytes, min(space.ranks_per_host, space.world_size), offload).that_fit()


def choose_plan(
    problem: Problem, space: OptionSpace, facts: Facts, *, seed: int = 0, budget: float = 60.0, report: Report
) -> RlhfChoice:
    """Search from the named plans, and simulate the best plan in full.

    Args:
        budget: seconds, in which the named plans are measured too.

    Raises:
        NothingFits: with the plan that needs least memory.
    """
    begin = time.monotonic()
    named = baselines(problem, space, facts)
    starts = [one.plan for one in named if one.plan]
    left = budget - (time.monotonic() - begin)
    found = search(problem, seed=seed, budget=left, starts=starts, progress=report)
    if not found.best:
        raise NothingFits(_nothing_fits(problem, found))
    _, plan = found.best[0]
    simulation = problem.simulator.run(plan)
    return RlhfChoice(problem, found, simulation, named, dict(_next_best(problem, plan)))


def _nothing_fits(problem: Problem, found: Found) -> str:
    if found.nearest is None:
        return "no plan keeps rollouts and training on different ranks, as --staleness 1 needs: use more ranks"
    needed, plan = found.nearest
    layouts = "; ".join(f"{name} {layout}" for name, layout in plan.calls.items())
    return (
        f"no plan fits into {problem.memory_bytes / GIB:.1f} GiB per rank. The nearest needs {needed / GIB:.1f} GiB: "
        f"{layouts}"
    )


def _next_best(problem: Problem, plan: ExecutionPlan) -> Iterator[tuple[str, Alternative]]:
    """Yield for each call the best plan in which it has other ranks or degrees."""
    bounds, calls = StepBounds(problem.simulator, problem.options), tuple(problem.options)
    for number, (name, layouts) in enumerate(problem.options.items()):
        own, best = plan[name], None
        least = bounds.of_options([plan[call] for call in calls], number)
        for index in np.argsort(least, kind="stable"):
            other = layouts[index]
            if best and least[index] >= best.seconds:
                break
            if (len(other.ranks), other.dims) == (len(own.ranks), own.dims):
                continue
            changed = replace(plan, calls={**plan.calls, name: other})
            if not problem.allows(changed):
                continue
            took, peak = problem.simulator.measure(changed)
            if peak <= problem.memory_bytes and (best is None or took < best.seconds):
                best = Alternative(other, took, problem.simulator.estimates.call_seconds(name, other))
        if best:
            yield name, best


def suppose(
    suppositions: Mapping[str, Callable[[], Problem]], choice: RlhfChoice, *, seed: int = 0, budget: float = 10.0
) -> Iterator[tuple[str, ExecutionPlan | None, float]]:
    """Yield (what is supposed, the best plan then or None, how much slower the chosen plan would be than that one).

    Plans whose gain is below 1% are the chosen one.

    Args:
        suppositions: each makes the problem, or raises NothingFits.
        budget: seconds, after which only the first one is looked at.
    """
    end = time.monotonic() + budget
    for number, (supposed, make) in enumerate(suppositions.items()):
        if number and time.monotonic() >= end:
            return
        try:
            problem = make()
        except NothingFits:
            yield supposed, None, 0.0
            continue
        left = (end - time.monotonic()) / (len(suppositions) - number)
        found = search(problem, seed=seed, budget=left, starts=[choice.plan])
        if not found.best:
            yield supposed, None, 0.0
            continue
        best, plan = found.best[0]
        kept, peak = problem.simulator.measure(choice.plan)
        loss = kept / best - 1 if peak <= problem.memory_bytes else float("inf")
        yield supposed, plan if loss > 0.01 else choice.plan, loss
