"""Sets of token indices: arrays (intervals, 2) of ascending, disjoint, non-adjacent half-open intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.int64]
Intervals: TypeAlias = Array

EMPTY: Intervals = np.empty((0, 2), np.int64)


def union(starts: Array, stops: Array) -> Intervals:
    """Return the set covered by non-empty intervals given in any order."""
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    first = np.ones(len(starts), bool)
    first[1:] = starts[1:] > stops[:-1]
    return np.stack((starts[first], stops[np.roll(first, -1)]), 1)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the indices in both sets."""
    return a if a is b else _selected(a, b, np.logical_and)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the indices of `a` that are not in `b`."""
    return EMPTY if a is b else _selected(a, b, np.greater)


def _selected(a: Intervals, b: Intervals, choose: Callable[..., npt.NDArray[np.bool_]]) -> Intervals:
    edges = np.sort(np.concatenate((a, b)), axis=None, kind="stable")
    chosen = choose(*(np.searchsorted(x.ravel(), edges, side="right") % 2 == 1 for x in (a, b)))
    return edges[np.diff(chosen, prepend=False)].reshape(-1, 2)


def size(a: Intervals) -> int:
    """Return the number of indices in the set."""
    return int((a[:, 1] - a[:, 0]).sum())


def expanded(starts: Array, stops: Array) -> Array:
    """Return the indices in each interval, one interval after the other."""
    lengths = stops - starts
    return np.arange(lengths.sum()) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)


def shifts(whole: Intervals) -> Array:
    """Return how far each interval moves in a buffer that packs them in ascending order."""
    lengths = whole[:, 1] - whole[:, 0]
    return np.cumsum(lengths) - lengths - whole[:, 0]


def locate(part: Intervals, whole: Intervals) -> Intervals:
    """Return the positions of `part`, a subset of `whole`, in a buffer that packs `whole` in ascending order."""
    if part is whole and len(whole):
        return np.array([(0, size(whole))])
    inside = np.searchsorted(whole[:, 0], part[:, 0], side="right") - 1
    moved = part + shifts(whole)[inside, None]
    return union(moved[:, 0], moved[:, 1])
