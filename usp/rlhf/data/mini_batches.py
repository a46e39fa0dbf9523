"""Which samples of a step are in which mini-batch: the same for who trains on them and who makes their weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


def mini_batch_ids(samples: int, mini_batches: int, number: int, unit: int = 1) -> range:
    """The ids of mini-batch `number` of a step's samples: consecutive ones, cut at multiples of `unit`."""
    units = samples // unit
    return range(number * units // mini_batches * unit, (number + 1) * units // mini_batches * unit)


def mini_batch_of(ids: Iterable[int], samples: int, mini_batches: int, unit: int = 1) -> list[int]:
    """For each of `ids` the number of its mini-batch."""
    ends = [mini_batch_ids(samples, mini_batches, number, unit).stop for number in range(mini_batches)]
    return [bisect_right(ends, sample) for sample in ids]
