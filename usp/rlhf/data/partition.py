"""Which samples each data-parallel rank of a call gets."""

from __future__ import annotations

from collections.abc import Sequence

from .mini_batches import mini_batch_ids


def batch_violation(samples: int, mini_batches: int, unit: int) -> str:
    """Why so many samples cannot be divided; "" if they can."""
    if samples % unit:
        return f"{samples} samples must be a multiple of the {unit} that stay together"
    if samples // unit < mini_batches:
        return (
            f"mini_batches={mini_batches} of {samples} samples, of which {unit} stay together, would leave "
            f"{mini_batches - samples // unit} empty: use mini_batches={samples // unit} or fewer, or more samples"
        )
    return ""


def balance(ids: Sequence[int], weights: Sequence[int], parts: int, unit: int = 1) -> tuple[tuple[int, ...], ...]:
    """The ids of each part, ascending, so that the heaviest part is light: its weight is at most 4/3 of the best.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969), over units of `unit`
    consecutive ids. There are parts without samples only where units are fewer than parts.

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


def partition(
    weights: Sequence[int], parts: int, mini_batches: int = 1, unit: int = 1
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each part, its ids of each mini-batch; every mini-batch is balanced by itself.

    Args:
        weights: of every sample of the step, by id.
    """
    batches = [mini_batch_ids(len(weights), mini_batches, number, unit) for number in range(mini_batches)]
    balanced = [balance(batch, weights, parts, unit) for batch in batches]
    return tuple(tuple(batch[part] for batch in balanced) for part in range(parts))
