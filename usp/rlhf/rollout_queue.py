"""The prompts that are begun before their step, as pure functions that every rank computes alike.

    waiting --begin--> begun, on a data-parallel rank of generation --choose--> taken by a step
       ^                                                            --end-----> stays begun (partial rollouts)
       +---------------------------------------------------------------------+  or is dropped

A prompt's ticket is its position in the stream of `example_indices`. Without dynamic sampling, each is trained on once:
a run of `steps` steps begins no more tickets than it trains on. With partial rollouts, a step takes the prompts whose
responses are complete first, unless others must go before: no prompt waits for more than `ahead` steps (earliest
deadline first), as in AReaL (arXiv 2505.24298, section 5.1), whose bound holds for the average.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class QueueRules:
    """How prompts are begun and taken.

    Attributes:
        shares: prompts of a step that each data-parallel rank of generation completes.
        begun: prompts that are begun at a time, as a multiple of those of a step; at least 1.
        ahead: with partial rollouts, by how many steps the oldest token of a sample may be older than the weights that
            train on it; at least `begun`. 0: prompts that a step does not take are dropped, and wait again.
        steps: of the run.
    """

    shares: tuple[int, ...]
    begun: float
    ahead: int
    steps: int

    def last_step(self, begun: BegunPrompt) -> int:
        """Return the last step that may take a prompt; its samples are made one step before that trains."""
        return begun.step + self.ahead - 1


@dataclass(frozen=True, order=True)
class BegunPrompt:
    """A ticket, the step whose rollouts began it, and the data-parallel rank that has it."""

    ticket: int
    step: int
    owner: int


@dataclass(frozen=True)
class RolloutQueue:
    """The prompts of a run after a step."""

    drawn: int = 0  # tickets so far
    begun: tuple[BegunPrompt, ...] = ()  # by ticket
    waiting: tuple[int, ...] = ()  # tickets that were dropped; they are begun again before others

    def of(self, owner: int) -> tuple[BegunPrompt, ...]:
        return tuple(each for each in self.begun if each.owner == owner)

    def begin(self, rules: QueueRules, number: int) -> RolloutQueue:
        """Begin prompts for the rollouts of step `number`, on each rank as many as it lacks, in turns."""
        left = rules.steps - number + 1
        lacking = [
            min(int(rules.begun * share), left * share) - len(self.of(owner))
            for owner, share in enumerate(rules.shares)
        ]
        owners = [o for turn in range(max(lacking)) for o, lacks in enumerate(lacking) if turn < lacks]
        again = self.waiting[: len(owners)]
        drawn = self.drawn + len(owners) - len(again)
        tickets = (*again, *range(self.drawn, drawn))
        new = (BegunPrompt(ticket, number, owner) for ticket, owner in zip(tickets, owners, strict=True))
        return RolloutQueue(drawn, tuple(sorted((*self.begun, *new))), self.waiting[len(again) :])

    def end(self, rules: QueueRules, number: int, taken: Collection[int], spare: Collection[int] = ()) -> RolloutQueue:
        """Return the queue after the rollouts of step `number`, which takes tickets; of these, it leaves `spare` ones
        to later steps, if they may still take them."""
        rest = tuple(
            each
            for each in self.begun
            if each.ticket not in taken or (each.ticket in spare and rules.last_step(each) > number)
        )
        if rules.ahead:
            return replace(self, begun=rest)
        return replace(self, begun=(), waiting=(*(each.ticket for each in rest), *self.waiting))

    def dealt(self, rules: QueueRules) -> RolloutQueue:
        """Deal the begun prompts anew to other data-parallel ranks, the oldest first, so that each can take its part in
        time."""
        turns = sorted(((turn + 0.5) / share, o) for o, share in enumerate(rules.shares) for turn in range(share))
        oldest_first = sorted(self.begun, key=lambda each: (each.step, each.ticket))
        dealt = (replace(each, owner=turns[place % len(turns)][1]) for place, each in enumerate(oldest_first))
        return replace(self, begun=tuple(sorted(dealt)))

    def to_extra(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_extra(extra: Mapping[str, Any]) -> RolloutQueue:
        begun = tuple(BegunPrompt(**each) for each in extra["begun"])
        return RolloutQueue(extra["drawn"], begun, tuple(extra["waiting"]))


def choose(
    rules: QueueRules, number: int, begun: Sequence[BegunPrompt], complete: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the tickets that step `number` takes of one rank's begun prompts, ascending; None: too few are complete.

    complete: tickets, the first to complete first.
    """
    share, step_of = rules.shares[begun[0].owner] if begun else 0, {each.ticket: each.step for each in begun}
    chosen: list[int] = []
    for step in sorted({each.step for each in begun}) if rules.ahead else ():
        # So many of the prompts begun until this step must be taken now, so that later steps can take the rest.
        left_to_later = (step + rules.ahead - 1 - number) * share
        needed = min(share, sum(each.step <= step for each in begun) - left_to_later)
        older = [ticket for ticket in complete if step_of[ticket] <= step and ticket not in chosen]
        if len(chosen) + len(older) < needed:
            return None
        chosen += older[: max(0, needed - len(chosen))]
    chosen += [ticket for ticket in complete if ticket not in chosen][: share - len(chosen)]
    return tuple(sorted(chosen)) if len(chosen) == share else None
