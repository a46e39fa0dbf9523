"""Partition the samples of a call over its data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .mini_batches import mini_batch_ids

# For each data-parallel index, the sample ids of each mini-batch.
Partition: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]


def batch_violation(samples: int, mini_batches: int, unit: int) -> str:
    """Return why `samples` cannot be split into mini-batches of whole units, or an empty string."""
    if samples % unit:
        return f"{samples} samples must be a multiple of {unit}, the samples that stay on one rank"
    if samples // unit < mini_batches:
        return (
            f"mini_batches={mini_batches} of {samples} samples in groups of {unit} would leave "
            f"{mini_batches - samples // unit} empty: use mini_batches={samples // unit} or fewer, or more samples"
        )
    return ""


def balance(ids: Sequence[int], weights: Sequence[int], parts: int, unit: int = 1) -> tuple[tuple[int, ...], ...]:
    """Split ids into parts of similar weight, each ascending; the heaviest is at most 4/3 of the optimum.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969), over units of `unit`
    consecutive ids. A part is empty only if there are fewer units than parts.

    Args:
        weights: by id.
    """
    units = [tuple(ids[start : start + unit]) for start in range(0, len(ids), unit)]
    heaviest_first = sorted(units, key=lambda members: -sum(weights[i] for i in members))
    loads = [(0, 0, part) for part in range(parts)]  # weight, units, and the part itself to break ties
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for members in heaviest_first:
        weight, count, part = min(loads)
        chosen[part] += members
        loads[part] = (weight + sum(weights[i] for i in members), count + 1, part)
    return tuple(tuple(sorted(part)) for part in chosen)


def partition(weights: Sequence[int], parts: int, mini_batches: int = 1, unit: int = 1) -> Partition:
    """Balance every mini-batch over the parts separately.

    Args:
        weights: of every sample of the step, by id.
    """
    batches = [mini_batch_ids(len(weights), mini_batches, number, unit) for number in range(mini_batches)]
    balanced = [balance(batch, weights, parts, unit) for batch in batches]
    return tuple(tuple(batch[part] for batch in balanced) for part in range(parts))
