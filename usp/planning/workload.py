"""Sample lengths of a step, and continuous batching without a model: what a data-parallel rank prefills and decodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby
from typing import Any, NamedTuple, cast

import numpy as np

from usp.rlhf.generation.decoding import Rollout, Slots, capacity, fitting_slots
from usp.rlhf.rollout_queue import QueueRules, RolloutQueue, choose
from usp.rlhf.runtime.measure import StepLengths

PREFILL_TOKENS = 16384  # as in usp.rlhf.generation.generate
_LENGTHS = 128  # of responses that are begun ahead, rounded to as many different ones
_COUNTED_STEPS = 4  # in the middle of a run


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


def _rollout(sample: Sample, done: int = 0) -> Rollout:
    """Return what is left of a sample after `done` tokens. Of its texts, lengths are read, and prompts compared."""
    prompt = cast(Any, _Prompt(sample.group, sample.prompt + done))
    return Rollout(prompt, 0, sample.response - done, cast(Any, range(0)), resumed=done)


def batching(
    samples: Sequence[Sample], limit: int, *, slots: int, ranks: int, multiple: int, cache_tokens: int = 0
) -> Batching:
    """Return what `usp.rlhf.generation.decoding` does with samples of these lengths, of which there is at least one.
    A response has at most `limit` tokens; `ranks` share a sequence, and divide the `multiple` of a prefill's tokens."""
    rollouts = list(map(_rollout, samples))
    places = capacity([replace(rollout, limit=limit) for rollout in rollouts], ranks, multiple)
    slots = max(1, fitting_slots(slots, cache_tokens, places, ranks))
    return Batching(min(slots, len(rollouts)), places, _stretches(rollouts, slots, ranks, multiple, lambda: False))


def _stretches(
    rollouts: Sequence[Rollout], slots: int, ranks: int, multiple: int, enough: Callable[[], bool]
) -> tuple[Stretch, ...]:
    """Decode rollouts until they are complete, or, after a stretch, `enough` is."""
    running, stretches = Slots(rollouts, slots), []
    while running.pending and not enough():
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
    return tuple(stretches)


@dataclass(frozen=True)
class Ahead:
    """Prompts that are begun before their step: `begun` and `ahead` of `QueueRules`."""

    begun: float
    ahead: int


@dataclass(frozen=True)
class AheadBatchings:
    """Generate calls of steps in the middle of a run, and the ages of the tokens that they take, in steps."""

    steps: tuple[Batching, ...]
    mean_age: float
    oldest: int


def batchings_ahead(
    samples: Sequence[Sample], limit: int, ahead: Ahead, *, slots: int, ranks: int, multiple: int, cache_tokens: int = 0
) -> AheadBatchings:
    """Return what `usp.rlhf.runtime.rollouts` does with a data-parallel rank's samples, in a new order for each step. A
    token's age is that of its weights when a step trains on it, whose samples are made one step before."""
    unit, order = max(1, limit // _LENGTHS), random.Random(0)
    rounded = [each._replace(response=max(1, round(each.response / unit) * unit)) for each in samples]
    groups = [tuple(of) for _, of in groupby(rounded, lambda sample: sample.group)]
    rules = QueueRules((len(groups),), ahead.begun, ahead.ahead, steps=1 << 40)
    queue, drawn = RolloutQueue(), list[tuple[Sample, ...]]()
    prompts: dict[int, list[tuple[Sample, Counter[int]]]] = {}  # begun ones: tokens of each sample by step
    steps, ages, first = list[Batching](), Counter[int](), max(1, ahead.ahead) + 1
    for number in range(1, first + _COUNTED_STEPS):
        queue = queue.begin(rules, number)
        while len(drawn) < queue.drawn:
            drawn += order.sample(groups, len(groups))
        tickets = (each.ticket for each in queue.begun)
        prompts = {t: prompts.get(t) or [(sample, Counter()) for sample in drawn[t]] for t in tickets}
        running = {ticket: [_rollout(sample, of.total()) for sample, of in begun] for ticket, begun in prompts.items()}
        taken = partial(_taken, rules, number, queue, running)
        left = [rollout for each in running.values() for rollout in each if not rollout.done]
        most = [replace(rollout, limit=limit - rollout.resumed) for rollout in left]
        places = capacity(most, ranks, multiple) if left else 0
        at_once = max(1, fitting_slots(slots, cache_tokens, places, ranks))
        stretches = _stretches(left, at_once, ranks, multiple, lambda taken=taken: taken() is not None)  # type: ignore[misc]
        for ticket, rollouts in running.items():
            for (_, of), rollout in zip(prompts[ticket], rollouts, strict=True):
                of[number] += len(rollout.tokens)
        chosen = taken() or ()
        if number >= first:
            steps.append(Batching(min(at_once, len(left)), places, stretches))
            for _, of in chain(*(prompts[ticket] for ticket in chosen)):
                ages.update({number + 1 - at: tokens for at, tokens in of.items() if tokens})
        queue = queue.end(rules, number, chosen)
        prompts = {each.ticket: prompts[each.ticket] for each in queue.begun}
    return AheadBatchings(tuple(steps), sum(age * tokens for age, tokens in ages.items()) / ages.total(), max(ages))


def _taken(
    rules: QueueRules, number: int, queue: RolloutQueue, running: Mapping[int, Sequence[Rollout]]
) -> tuple[int, ...] | None:
    complete = [ticket for ticket, rollouts in running.items() if all(rollout.done for rollout in rollouts)]
    return choose(rules, number, queue.begun, complete)
