"""Seconds of a reallocation as a sum over its plan, for ranks that share processors, which do all of the copying."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel import ReallocPlan

Moves = tuple[float, float, float]  # seconds of a reallocation, of each of its messages, and of each byte sent


def moved(plan: ReallocPlan) -> tuple[float, float, float]:
    """Return what the seconds of a reallocation are proportional to: 1, its messages, and its bytes."""
    return 1.0, float(len(plan.links) * plan.shares), float(plan.total_bytes)


def move_seconds(moves: Moves, plan: ReallocPlan) -> float:
    """Return the predicted time of a reallocation."""
    return sum(each * number for each, number in zip(moves, moved(plan), strict=True))


def fitted(plans: Sequence[ReallocPlan], seconds: Sequence[float]) -> Moves:
    """Return the least-squares fit to measured reallocations, without negative terms."""
    terms, target, kept = np.array([moved(plan) for plan in plans]), np.array(seconds), [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, kept] / terms[:, kept].max(0), target, rcond=None)
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    result = np.zeros(3)
    result[kept] = found / terms[:, kept].max(0)
    return float(result[0]), float(result[1]), float(result[2])
