"""Sets of token indices, stored as ascending, disjoint, non-adjacent half-open intervals."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = tuple[tuple[int, int], ...]


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the set covered by intervals given in any order."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the indices in both sets."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            common.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the indices of `a` that are not in `b`."""
    rest, first = [], 0
    for start, stop in a:
        while first < len(b) and b[first][1] <= start:
            first += 1
        index = first
        while index < len(b) and b[index][0] < stop:
            if start < b[index][0]:
                rest.append((start, b[index][0]))
            start, index = b[index][1], index + 1
        if start < stop:
            rest.append((start, stop))
    return tuple(rest)


def size(a: Intervals) -> int:
    """Return the number of indices in the set."""
    return sum(stop - start for start, stop in a)


def locate(part: Intervals, whole: Intervals) -> Intervals:
    """Return the positions of `part`, a subset of `whole`, in a buffer that packs `whole` in ascending order."""
    found, offset, index = [], 0, 0
    for start, stop in part:
        while whole[index][1] <= start:
            offset += whole[index][1] - whole[index][0]
            index += 1
        shift = offset - whole[index][0]
        found.append((start + shift, stop + shift))
    return union(found)
