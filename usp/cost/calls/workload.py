"""The samples of a step, as lengths alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Workload:
    """The lengths of a step's samples.

    Attributes:
        prompts, responses: tokens of each sample's prompt and response; the samples of a prompt are adjacent.
        group_size: samples per prompt.
        limit: the most tokens that a response may have.

    Raises:
        ValueError: for samples that are not whole groups, or a response that is empty or longer than the limit.
    """

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    group_size: int
    limit: int

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.responses) or len(self.prompts) % max(1, self.group_size):
            raise ValueError(
                f"{len(self.prompts)} prompts and {len(self.responses)} responses must be as many, in groups of "
                f"{self.group_size}"
            )
        if wrong := [length for length in self.responses if not 0 < length <= self.limit]:
            raise ValueError(f"responses of {wrong[:5]} tokens must have 1 to limit={self.limit}")

    @cached_property
    def sequences(self) -> tuple[int, ...]:
        """Tokens of each sample, prompt and response."""
        return tuple(map(sum, zip(self.prompts, self.responses, strict=True)))

    def longer(self, factor: float) -> Workload:
        """Return the workload with the lengths of responses, and their limit, times a factor."""
        responses = tuple(max(1, round(factor * length)) for length in self.responses)
        return replace(self, responses=responses, limit=max(1, round(factor * self.limit)))

    @staticmethod
    def of(
        prompts: int, group_size: int, prompt_tokens: int, quantiles: Sequence[int], limit: int = 0, seed: int = 0
    ) -> Workload:
        """Return prompts of equal length, with responses whose lengths follow a distribution.

        Args:
            quantiles: lengths of responses at equal steps of probability, ascending, such as the minimum, the median
                and the maximum; one for responses of one length. Linear in between.
            limit: 0 for the last quantile.
            seed: of the order of lengths.
        """
        number = prompts * group_size
        found = [_quantile(quantiles, (index + 0.5) / number) for index in range(number)]
        random.Random(seed).shuffle(found)
        return Workload((prompt_tokens,) * number, tuple(found), group_size, limit or quantiles[-1])


def _quantile(quantiles: Sequence[int], part: float) -> int:
    place = part * (len(quantiles) - 1)
    low = min(int(place), len(quantiles) - 1)
    high = min(low + 1, len(quantiles) - 1)
    return max(1, round(quantiles[low] + (quantiles[high] - quantiles[low]) * (place - low)))
