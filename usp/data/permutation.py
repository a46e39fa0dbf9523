"""Random orders that are computed number by number, in both directions, and hold nothing in memory.

A Feistel network permutes the numbers of n bits: each round adds to one half of the bits (exclusive or) a random
function of the other half (Luby and Rackoff, SIAM Journal on Computing 17, 1988). Numbers that leave the range are
permuted again until they are back in it (cycle walking: Black and Rogaway, CT-RSA 2002), on average less than twice.
The random functions are the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), each with a key of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

ROUNDS = 4
LEAST_BITS = 6  # with fewer, the rounds reach some orders more often than others
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class Permutation:
    """An order of the numbers 0, ..., count - 1: a random one fixed by `key`, or ascending for None.

    key: nonnegative integers.
    """

    def __init__(self, count: int, key: Sequence[int] | None) -> None:
        self.count = count
        bits = max(LEAST_BITS, (count - 1).bit_length())
        low = bits // 2
        self._low, self._low_mask, self._high_mask = np.uint64(low), _mask(low), _mask(bits - low)
        self._keys = (
            () if key is None or count == 1 else tuple(np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64))
        )

    def at(self, places: Numbers) -> Numbers:
        """Return the numbers at `places`, int64 of their shape."""
        return self._walk(places, list(enumerate(self._keys)))

    def place_of(self, numbers: Numbers) -> Numbers:
        """Return the places at which `numbers` are, int64 of their shape."""
        return self._walk(numbers, list(enumerate(self._keys))[::-1])

    def _walk(self, numbers: Numbers, rounds: list[tuple[int, np.uint64]]) -> Numbers:
        if not rounds:
            return numbers.astype(np.int64)
        found = self._permute(numbers.astype(np.uint64), rounds)
        outside = np.flatnonzero(found >= self.count)
        while len(outside):
            found[outside] = self._permute(found[outside], rounds)
            outside = outside[found[outside] >= self.count]
        return found.astype(np.int64)

    def _permute(self, numbers: npt.NDArray[np.uint64], rounds: list[tuple[int, np.uint64]]) -> npt.NDArray[np.uint64]:
        high, low = numbers >> self._low, numbers & self._low_mask
        for number, key in rounds:
            if number % 2:
                low ^= _scrambled(high, key) & self._low_mask
            else:
                high ^= _scrambled(low, key) & self._high_mask
        return (high << self._low) | low


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _scrambled(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = numbers + key  # arrays of unsigned integers wrap around
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS[:2], strict=True):
        mixed ^= mixed >> shift
        mixed *= multiplier
    mixed ^= mixed >> _SHIFTS[2]
    return mixed
