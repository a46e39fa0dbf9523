"""Hold examples out of the training data, to evaluate on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .datasets import Example, Examples, FileExamples

_LISTED = 2**24  # of a larger collection, the last examples are held out: training reads it from the beginning


@dataclass(frozen=True, eq=False)
class _First:
    """The first examples of a collection."""

    examples: Examples
    number: int
    dropped: int = 0

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int, /) -> Example:
        return self.examples[index]


def hold_out(examples: Examples, number: int, seed: int) -> tuple[Examples, list[Example]]:
    """Divide examples into those to train on, in their order, and `number` random ones that `seed` determines.

    number: less than there are examples.
    """
    size = len(examples)
    if not number:
        return examples, []
    if size > _LISTED:
        return _First(examples, size - number), [examples[size - number + index] for index in range(number)]
    chosen = set(np.random.default_rng((seed, size)).choice(size, number, replace=False).tolist())
    rest = FileExamples([examples[index] for index in range(size) if index not in chosen], examples.dropped)
    return rest, [examples[index] for index in sorted(chosen)]
