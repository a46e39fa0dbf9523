"""Continuous batching without a model: the prefills and decode steps of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from usp.rlhf.generation.batching import PrefillGroup, Rollout, Slots, capacity

PREFILL_TOKENS, ROW_MULTIPLE, READ_MULTIPLE = 16384, 16, 64  # as in usp.rlhf.generation.generate


class Sample(NamedTuple):
    """Tokens of a prompt and of its response; samples of one group have the same prompt."""

    group: int
    prompt: int
    response: int


@dataclass(frozen=True)
class Stretch:
    """Decode steps between two completions, after the prefills of the sequences that took free slots.

    Attributes:
        prefills: (rows, tokens per row) of each forward over prompts.
        steps: number of decode steps.
        active: sequences that are decoded; the other slots are empty, but computed.
        length: the most places in use in a rank's cache, the mean over the steps.
    """

    prefills: tuple[tuple[int, int], ...]
    steps: int
    active: int
    length: float


@dataclass(frozen=True)
class Batching:
    """The steps of a generate call.

    Attributes:
        slots: sequences that are decoded at a time.
        places: cache places per slot and rank.
    """

    slots: int
    places: int
    stretches: tuple[Stretch, ...]

    @property
    def steps(self) -> int:
        return sum(stretch.steps for stretch in self.stretches)

    @property
    def occupancy(self) -> float:
        """The fraction of slots in use, over all steps."""
        used = sum(stretch.steps * stretch.active for stretch in self.stretches)
        return used / (self.steps * self.slots) if self.steps else 0.0


@dataclass(frozen=True, order=True)
class _Prompt:
    """A prompt of which only its group, whose samples have the same one, and its length matter."""

    group: int
    tokens: int

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, part: slice) -> _Prompt:
        return _Prompt(self.group, len(range(self.tokens)[part]))


def batching(samples: Sequence[Sample], limit: int, *, slots: int, ranks: int, multiple: int) -> Batching:
    """Return what `usp.rlhf.generation.batching` does with samples of these lengths, of which there is at least one.

    Args:
        limit: the most tokens of a response.
        ranks: that share a sequence; multiple: of the tokens in a row of a prefill, which `ranks` divide.
    """
    # Rollouts read the length of prompts and responses, and compare prompts.
    rollouts = [Rollout(cast(Any, _Prompt(s.group, s.prompt)), 0, s.response, cast(Any, range(0))) for s in samples]
    places = capacity([replace(rollout, limit=limit) for rollout in rollouts], ranks, multiple)
    running, found = Slots(rollouts, slots), []
    while running.pending:
        groups = running.prefill_groups(running.admit(), multiple, PREFILL_TOKENS)
        for group in groups:
            _cache(running, group, ranks)
        active = [rollout for rollout in running.active if rollout is not None]
        steps = min(rollout.limit - len(rollout.tokens) for rollout in active)
        first = max(rollout.cached + len(rollout.tokens) // ranks for rollout in active) + 1
        for slot, rollout in enumerate(running.active):
            if rollout is not None:
                rollout.tokens = cast(Any, range(len(rollout.tokens) + steps))
                running.active[slot] = None if rollout.done else rollout
        prefills = tuple((len(group.prompts), group.padded) for group in groups)
        found.append(Stretch(prefills, steps, len(active), first + (steps - 1) / ranks / 2))
    return Batching(len(running.active), places, tuple(found))


def _cache(running: Slots, group: PrefillGroup, ranks: int) -> None:
    for slot in group.slots:
        rollout = running.active[slot]
        assert rollout is not None
        rollout.cached = -(-(len(rollout.prompt) - 1) // ranks)
