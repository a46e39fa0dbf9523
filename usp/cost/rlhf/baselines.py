"""Named plans, each with the degrees whose simulated step is the shortest that fits into memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from usp.rlhf.plan.named_plans import NAMED_PLANS, Facts, named_plan
from usp.rlhf.plan.plan import ExecutionPlan

from .options import OptionSpace, allows, degrees
from .plan_search import Problem


@dataclass(frozen=True)
class Baseline:
    """A named plan with its best degrees.

    Attributes:
        seconds, peak_bytes: of a simulated step.
        plan: None where `why` says why there is none.
    """

    name: str
    seconds: float = 0.0
    peak_bytes: float = 0.0
    plan: ExecutionPlan | None = None
    why: str = ""


def baselines(problem: Problem, space: OptionSpace, facts: Facts) -> tuple[Baseline, ...]:
    """Return every named plan. Where none of its degrees fit into memory, it is the one that needs least.

    Args:
        facts: the cluster and the models; degrees, ZeRO stages and activation checkpointing are chosen here.
    """
    return tuple(_best(name, problem, space, facts) for name in NAMED_PLANS)


def _best(name: str, problem: Problem, space: OptionSpace, facts: Facts) -> Baseline:
    variants = [replace(facts, ac=ac, ac_offload=offload) for ac, offload in space.recompute]
    ranks = space.world_size // 2 if name == "separation" else space.world_size
    if name != "heuristic":  # which chooses its degrees itself
        every = product(variants, degrees(ranks, space), space.zero)
        variants = [replace(saving, dims=dims, zero=zero) for saving, dims, zero in every]
    found = _fastest(name, variants, problem, space)
    if found and name == "separation":
        found = _fastest(name, [replace(found[0], rollout_dims=d) for d in degrees(ranks, space)], problem, space)
    return found[1] if found else Baseline(name, why="no degrees fit the ranks, the heads, the layers and the batch")


def _fastest(
    name: str, variants: Iterable[Facts], problem: Problem, space: OptionSpace
) -> tuple[Facts, Baseline] | None:
    """Return the fastest variant that fits into memory, or else the one that needs least."""
    measured = [(facts, one) for facts in variants if (one := _measured(name, facts, problem, space))]

    def order(pair: tuple[Facts, Baseline]) -> tuple[bool, float]:
        fits = pair[1].peak_bytes <= problem.memory_bytes
        return not fits, pair[1].seconds if fits else pair[1].peak_bytes

    return min(measured, key=order, default=None)


def _measured(name: str, facts: Facts, problem: Problem, space: OptionSpace) -> Baseline | None:
    """Return a named plan, offloading all it may where it does not fit; None if it cannot have the degrees."""
    graph = problem.simulator.graph
    try:
        plan = named_plan(name, graph, facts)
    except ValueError:
        return None
    layouts = [(call, plan[call.name]) for call in graph.calls]
    if not all(allows(call, layout.dims, space) and space.allowed(call, layout) for call, layout in layouts):
        return None
    found = Baseline(name, *problem.simulator.measure(plan), plan)
    if found.peak_bytes <= problem.memory_bytes:
        return found
    plan = replace(plan, offload=frozenset(problem.offload))
    return Baseline(name, *problem.simulator.measure(plan), plan)
