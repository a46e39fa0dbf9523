"""Sample lengths of a step, and continuous batching without a model: what a data-parallel rank prefills and decodes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from usp.rlhf.generation.decoding import Rollout, Slots, capacity, fitting_slots
from usp.rlhf.runtime.measure import StepLengths

PREFILL_TOKENS = 16384  # as in usp.rlhf.generation.generate


@dataclass(frozen=True)
class Workload(StepLengths):
    """The lengths of a step's samples; raise ValueError if groups are not whole, or a response beyond the limit."""

    limit: int  # the most tokens that a response may have

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

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The lengths of each sample, and which prompt it has."""
        each = enumerate(zip(self.prompts, self.responses, strict=True))
        return tuple(Sample(number // self.group_size, *lengths) for number, lengths in each)

    @staticmethod
    def of(prompts: int, group_size: int, prompt_tokens: int, quantiles: Sequence[int]) -> Workload:
        """Return prompts of equal length, with responses of lengths in any order, linear between `quantiles`: ascending
        lengths at equal steps of probability, such as minimum, median and maximum, or one. The last is the limit."""
        number = prompts * group_size
        places = [(index + 0.5) / number * (len(quantiles) - 1) for index in range(number)]
        lengths = [max(1, round(float(length))) for length in np.interp(places, range(len(quantiles)), quantiles)]
        random.Random(0).shuffle(lengths)
        return Workload((prompt_tokens,) * number, tuple(lengths), group_size, quantiles[-1])


class Sample(NamedTuple):
    """Tokens of a prompt and of its response; samples of one group have the same prompt."""

    group: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Stretch:
    """Decode steps between two completions, after the prefills of the sequences that took free slots."""

    prefills: tuple[tuple[int, int], ...]  # (rows, tokens per row) of each forward over prompts
    steps: int
    active: int  # sequences that are decoded; the other slots are empty, but computed
    length: float  # the most places in use in a rank's cache, the mean over the steps


@dataclass(frozen=True)
class Batching:
    """The steps of a generate call."""

    slots: int  # sequences that are decoded at a time
    places: int  # in the cache, per slot and rank
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, order=True)
class _Prompt:
    """A prompt reduced to its group and length."""

    group: int
    tokens: int

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, part: slice) -> _Prompt:
        return _Prompt(self.group, len(range(self.tokens)[part]))


def batching(
    samples: Sequence[Sample],
    limit: int,
    *,
    slots: int,
    ranks: int,
    multiple: int,
    cache_tokens: int = 0,
    begun: float = 1.0,
) -> Batching:
    """Return what `usp.rlhf.generation.decoding` does with samples of these lengths, of which there is at least one.
    A response has at most `limit` tokens; `ranks` share a sequence, and divide the `multiple` of a prefill's tokens.
    With partial rollouts `begun` times as many samples are decoded at once, where there are slots for them."""
    empty: Any = range(0)  # of texts, lengths are read, and prompts compared
    rollouts = [Rollout(cast(Any, _Prompt(of.group, of.prompt)), 0, of.response, empty) for of in samples]
    places = capacity([replace(rollout, limit=limit) for rollout in rollouts], ranks, multiple)
    slots = max(1, fitting_slots(slots, cache_tokens, places, ranks))
    running, stretches = Slots(rollouts, slots), []
    while running.pending:
        groups = running.prefill_groups(running.admit(), multiple, PREFILL_TOKENS)
        for group in groups:
            for slot in group.slots:
                if rollout := running.active[slot]:
                    rollout.cached = -(-(len(rollout.prompt) - 1) // ranks)
        active = [rollout for rollout in running.active if rollout is not None]
        steps = min(rollout.limit - len(rollout.tokens) for rollout in active)
        first = max(rollout.cached + len(rollout.tokens) // ranks for rollout in active) + 1
        for slot, rollout in enumerate(running.active):
            if rollout is not None:
                rollout.tokens = cast(Any, range(len(rollout.tokens) + steps))
                running.active[slot] = None if rollout.done else rollout
        prefills = tuple((len(group.prompts), group.padded) for group in groups)
        stretches.append(Stretch(prefills, steps, len(active), first + (steps - 1) / ranks / 2))
    return Batching(min(slots, math.ceil(begun * len(rollouts))), places, tuple(stretches))
