"""Continuous batching: the sequence in each slot, and the inputs of the next decode step.

    waiting --admit--> slot --prefill of all prompt tokens but the last--> decode steps --append--> done, slot is free

The last prompt token is decoded like a generated one, so all sampling happens in decode steps. (Iteration-level
scheduling: Orca, Yu et al. 2022, section 3.1.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Rollout:
    """A prompt and its response so far.

    Attributes:
        limit: maximum tokens in the response.
        cached: prompt tokens in this rank's cache.
    """

    prompt: list[int]
    seed: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    stopped: bool = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) == self.limit


@dataclass(frozen=True)
class PrefillGroup:
    """Sequences to prefill in one forward.

    Attributes:
        slots, rows: slots[i] is filled from row rows[i]. Equal prompts share a row.
        prompts: one per row.
        padded: tokens in each row, including padding.
    """

    slots: tuple[int, ...]
    rows: tuple[int, ...]
    prompts: tuple[Sequence[int], ...]
    padded: int


class Slots:
    """The active sequences, at most `slots`, and the waiting ones."""

    def __init__(self, rollouts: Sequence[Rollout], slots: int) -> None:
        # Sorted, so that prompts of similar length are prefilled together and equal prompts are adjacent.
        self._waiting = deque(sorted(rollouts, key=lambda rollout: (-len(rollout.prompt), rollout.prompt)))
        self.active: list[Rollout | None] = [None] * min(slots, len(rollouts))

    @property
    def pending(self) -> bool:
        return bool(self._waiting) or any(self.active)

    def admit(self) -> list[int]:
        """Fill free slots; return them."""
        free = [slot for slot, rollout in enumerate(self.active) if rollout is None][: len(self._waiting)]
        for slot in free:
            self.active[slot] = self._waiting.popleft()
        return free

    def prefill_groups(self, slots: Sequence[int], multiple: int, max_tokens: int) -> list[PrefillGroup]:
        """Group newly admitted slots, longest prompts first, for prefill.

        A row is padded to a multiple of `multiple`, plus at most a third to match the longest row. A group has at most
        `max_tokens` tokens, unless a single row is longer.
        """
        groups: list[PrefillGroup] = []
        for slot in slots:
            rollout = self.active[slot]
            assert rollout is not None
            prompt = rollout.prompt[:-1]
            if not prompt:
                continue
            padded = -(-len(prompt) // multiple) * multiple
            last = groups[-1] if groups else None
            if last is not None and prompt == last.prompts[-1]:
                groups[-1] = PrefillGroup((*last.slots, slot), (*last.rows, last.rows[-1]), last.prompts, last.padded)
            elif last and 4 * padded >= 3 * last.padded and (len(last.prompts) + 1) * last.padded <= max_tokens:
                rows = (*last.rows, len(last.prompts))
                groups[-1] = PrefillGroup((*last.slots, slot), rows, (*last.prompts, prompt), last.padded)
            else:
                groups.append(PrefillGroup((slot,), (0,), (prompt,), padded))
        return groups

    def decode_inputs(self, ranks: int, rank: int) -> DecodeInputs:
        """Return the inputs of the next decode step. The n-th decoded token is cached on rank n % ranks."""
        columns, length = [], 1
        for rollout in self.active:
            if rollout is None:
                columns.append((0, 0, 0, ranks == 1))
                continue
            decoded = len(rollout.tokens)
            token = rollout.tokens[-1] if decoded else rollout.prompt[-1]
            place, own = rollout.cached + decoded // ranks, decoded % ranks == rank
            columns.append((token, len(rollout.prompt) - 1 + decoded, place, own))
            length = max(length, place + 1)
        return DecodeInputs(torch.tensor(columns).T, length)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float], ended: Callable[[Sequence[int]], bool]) -> None:
        """Append a step's tokens; free the slots of completed sequences.

        ended: whether a response ends with its last token.
        """
        for slot, rollout in enumerate(self.active):
            if rollout is None:
                continue
            rollout.tokens.append(tokens[slot])
            rollout.logprobs.append(logprobs[slot])
            rollout.stopped = ended(rollout.tokens)
            if rollout.done:
                self.active[slot] = None


@dataclass(frozen=True)
class DecodeInputs:
    """One token per slot, zeros for empty slots.

    Attributes:
        columns: int64 (4, slots): token, position, place in this rank's cache, whether this rank caches it.
        length: places in use in this rank's cache, including this step's.
    """

    columns: Tensor
    length: int


def capacity(rollouts: Sequence[Rollout], ranks: int, multiple: int) -> int:
    """Return the cache places per slot and rank that fit any of the sequences. `ranks` divides `multiple`."""
    # Rows are as long as the longest prompt of their group, and in a contiguous layout one rank may then hold all of a
    # shorter prompt, so a sequence's own share is not a bound.
    longest = max(len(rollout.prompt) for rollout in rollouts) - 1
    return -(-longest // multiple) * multiple // ranks + -(-max(rollout.limit for rollout in rollouts) // ranks)
