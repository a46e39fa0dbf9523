"""Which samples of a step belong to which mini-batch, for training and for the weights of its samples alike."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


def mini_batch_ids(samples: int, mini_batches: int, number: int, unit: int = 1) -> range:
    """Return the consecutive sample ids of mini-batch `number`, split at multiples of `unit`."""
    units = samples // unit
    return range(number * units // mini_batches * unit, (number + 1) * units // mini_batches * unit)


def mini_batch_of(ids: Iterable[int], samples: int, mini_batches: int, unit: int = 1) -> list[int]:
    """Return the mini-batch number of each sample id."""
    ends = [mini_batch_ids(samples, mini_batches, number, unit).stop for number in range(mini_batches)]
    return [bisect_right(ends, sample) for sample in ids]
