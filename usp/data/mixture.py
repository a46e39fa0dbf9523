"""Mix the rows of several stores by weight: every PERIOD rows hold each store's share, in a random order.

A row depends only on its number, as in one store: its place in its period, permuted, falls to a store and is one of
that store's next rows. Stores that are smaller than their share begin another epoch of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .rows import PackedRows, Permutation, Row
from .sources import STDLIB
from .store import Numbers

PERIOD = 1024


class MixedRows:
    """Rows of `sources`, which have one seq_len and one seed, in the proportions of `weights`.

    shares: rows of each source in every PERIOD rows. weights: the same as fractions of 1. per_epoch: the rows of an
    epoch of every source, added up.

    Raises ValueError for a weight that is too small for a row in PERIOD.
    """

    def __init__(self, sources: Sequence[PackedRows], weights: Sequence[float]) -> None:
        self.sources = tuple(sources)
        self.seq_len, self.seed = sources[0].seq_len, sources[0].seed
        self.per_epoch = sum(source.per_epoch for source in sources)
        self.shares = shares(weights)
        self.weights = tuple(share / PERIOD for share in self.shares)
        self._period = -1, np.zeros(0, np.int64), np.zeros(0, np.int64)  # the last one that was read

    @property
    def identity(self) -> str:
        parts = zip(self.shares, self.sources, strict=True)
        return "; ".join(f"{share}/{PERIOD} of {source.identity}" for share, source in parts)

    def row(self, number: int) -> Row:
        """Return what row `number` consists of; its tokens are not read."""
        period, place = divmod(number, PERIOD)
        if period != self._period[0]:
            self._period = period, *self._order(period)
        _, which, numbers = self._period
        return self.sources[which[place]].row(int(numbers[place]))

    def _order(self, period: int) -> tuple[Numbers, Numbers]:
        """Return for every row of a period its source, and its number in that, which ascends."""
        which = _sources(self.shares, self.seed, period)
        numbers = np.empty(PERIOD, np.int64)
        for source, share in enumerate(self.shares):
            numbers[which == source] = period * share + np.arange(share)
        return which, numbers


def taken(weights: Sequence[float], seed: int | None, rows: int) -> list[int]:
    """Return the number of rows of each source among the first `rows` rows of a mixture."""
    in_period = shares(weights)
    periods, rest = divmod(rows, PERIOD)
    in_rest = np.bincount(_sources(in_period, seed, periods)[:rest], minlength=len(in_period))
    return [periods * share + int(more) for share, more in zip(in_period, in_rest, strict=True)]


def _sources(in_period: Sequence[int], seed: int | None, period: int) -> Numbers:
    places = Permutation(PERIOD, None if seed is None else (seed, period, 2)).at(np.arange(PERIOD))
    return np.repeat(np.arange(len(in_period)), in_period)[places]


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return PERIOD divided in the proportions of `weights`, by largest remainders. Raises ValueError, naming a weight
    that gets nothing."""
    exact = [weight / math.fsum(weights) * PERIOD for weight in weights]
    rounded = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: rounded[index] - exact[index])
    for index in by_remainder[: PERIOD - sum(rounded)]:
        rounded[index] += 1
    if not all(rounded):
        raise ValueError(f"weight {weights[rounded.index(0)]:g} is too small: of {PERIOD} rows it gives none")
    return tuple(rounded)


def parse_mixture(data: str) -> list[tuple[str, float]]:
    """Return the paths and weights of `PATH=WEIGHT,PATH=WEIGHT`; of a path that exists, or has no `=`, the weight is 1.
    Raises ValueError for no path, or a path without a weight that is a positive number."""
    if not data.strip():
        raise ValueError(f"data={data!r} names no data: give a token store, files of documents, or PATH=WEIGHT,...")
    if data == STDLIB or "=" not in data or Path(data).expanduser().exists():
        return [(data, 1.0)]
    mixture = []
    for item in data.split(","):
        path, _, text = item.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not path or not 0 < weight < math.inf:
            raise ValueError(f"data={data}: {item!r} must be PATH=WEIGHT with a positive weight, such as books=0.3")
        mixture.append((path, weight))
    if len({path for path, _ in mixture}) < len(mixture):
        raise ValueError(f"data={data} names a path twice: give it once, with the sum of its weights")
    return mixture
