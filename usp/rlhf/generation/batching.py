"""Continuous batching as data: which sequence is in which slot, what the next step is fed, and what came of it.

    waiting --admit--> a free slot --prefill of all prompt tokens but the last--> steps --take--> done: the slot is free

The last prompt token is fed in a step like every token after it: all sampling happens in steps. (Orca, Yu et al. 2022,
section 3.1: scheduling by iteration.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Rollout:
    """A prompt and its response so far.

    Attributes:
        limit: tokens at which the response ends without a stop id.
        kept: prompt tokens that this rank's cache has from the prefill.
    """

    prompt: list[int]
    seed: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: int = 0
    stopped: bool = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) == self.limit


@dataclass(frozen=True)
class Group:
    """Sequences that are prefilled in one call of `len(rows)` rows of `padded` tokens.

    Attributes:
        slots: slots[i] gets row rows[i]. Equal prompts share a row.
        prompts: the rows.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...]
    prompts: tuple[Sequence[int], ...]
    padded: int


class Slots:
    """The sequences under way, in at most `slots` places, and those that wait for one."""

    def __init__(self, rollouts: Sequence[Rollout], slots: int) -> None:
        # Alike lengths are admitted together, and equal prompts as neighbours.
        self._waiting = deque(sorted(rollouts, key=lambda rollout: (-len(rollout.prompt), rollout.prompt)))
        self.active: list[Rollout | None] = [None] * min(slots, len(rollouts))

    @property
    def pending(self) -> bool:
        return bool(self._waiting) or any(self.active)

    def admit(self) -> list[int]:
        """Fill free slots; returns which."""
        free = [slot for slot, rollout in enumerate(self.active) if rollout is None][: len(self._waiting)]
        for slot in free:
            self.active[slot] = self._waiting.popleft()
        return free

    def groups(self, slots: Sequence[int], multiple: int, most_tokens: int) -> list[Group]:
        """How to prefill newly filled slots: longest prompts first, as `admit` gives them.

        A row is padded to a multiple of `multiple`, and by at most a third of its prompt beyond that. A call has at
        most `most_tokens` tokens, unless one row has more.
        """
        groups: list[Group] = []
        for slot in slots:
            rollout = self.active[slot]
            assert rollout is not None
            prompt = rollout.prompt[:-1]
            if not prompt:
                continue
            padded = -(-len(prompt) // multiple) * multiple
            last = groups[-1] if groups else None
            if last is not None and prompt == last.prompts[-1]:
                groups[-1] = Group((*last.slots, slot), (*last.rows, last.rows[-1]), last.prompts, last.padded)
            elif last and 4 * padded >= 3 * last.padded and (len(last.prompts) + 1) * last.padded <= most_tokens:
                rows = (*last.rows, len(last.prompts))
                groups[-1] = Group((*last.slots, slot), rows, (*last.prompts, prompt), last.padded)
            else:
                groups.append(Group((slot,), (0,), (prompt,), padded))
        return groups

    def step(self, ranks: int, rank: int) -> Step:
        """What the next step feeds. Token number n of those fed is kept by rank n % ranks."""
        columns, length = [], 1
        for rollout in self.active:
            if rollout is None:
                columns.append((0, 0, 0, ranks == 1))
                continue
            fed = len(rollout.tokens)
            token = rollout.tokens[-1] if fed else rollout.prompt[-1]
            place, own = rollout.kept + fed // ranks, fed % ranks == rank
            columns.append((token, len(rollout.prompt) - 1 + fed, place, own))
            length = max(length, place + 1)
        return Step(torch.tensor(columns).T, length)

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], stop_ids: frozenset[int]) -> None:
        """Add a step's tokens; a sequence that they complete leaves its slot."""
        for slot, rollout in enumerate(self.active):
            if rollout is None:
                continue
            rollout.tokens.append(tokens[slot])
            rollout.logprobs.append(logprobs[slot])
            rollout.stopped = tokens[slot] in stop_ids
            if rollout.done:
                self.active[slot] = None


@dataclass(frozen=True)
class Step:
    """A token a slot, zeros for an empty one.

    Attributes:
        columns: int64 (4, slots): token, position, place in this rank's cache, whether this rank keeps it.
        length: places of the cache in use on this rank, this step's among them.
    """

    columns: Tensor
    length: int


def capacity(rollouts: Sequence[Rollout], ranks: int, multiple: int) -> int:
    """Places that a slot needs on each rank, for any of the sequences. `ranks` divides `multiple`."""
    # A row may be as long as the longest prompt of its call, and a contiguous layout then gives one rank all of a
    # shorter one: its share is no bound.
    longest = max(len(rollout.prompt) for rollout in rollouts) - 1
    return -(-longest // multiple) * multiple // ranks + -(-max(rollout.limit for rollout in rollouts) // ranks)
