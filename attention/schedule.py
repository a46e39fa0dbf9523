"""The ring as data: who sends which keys to whom at which step, and what each rank computes meanwhile.

At step t of a ring that turns in direction d, rank r attends to the block of owner (r - d * t) % R. Every consumer
receives exactly the keys that it sees, once:

    from its neighbour r - d, which has just used them, where the neighbour saw them too;
    else from their owner, who always has them.

Gradients of keys take the same ways back: a rank passes its partial sums on to its neighbour r + d where that one adds
to them too, and sends the rest home to the owner. So forward moves one copy of what is seen (K and V), backward moves
it again with as many gradients, and a hop that would carry nothing is not made: with a window only neighbours talk,
with packed documents only the ranks that share one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from .bands import Pieces, Task, block_tasks, rank_pieces
from .intervals import Intervals, intersect, locate, size, subtract, union
from .layout import SequenceLayout
from .spec import AttentionSpec

SAMPLED_OWNERS = 16  # whose traffic decides which way a ring turns: either way is right, one sends less


@dataclass(frozen=True)
class Message:
    """Tokens of one peer's message, as slices of a token buffer."""

    peer: int
    slices: Intervals

    @property
    def tokens(self) -> int:
        return size(self.slices)


@dataclass(frozen=True)
class Step:
    """One rank's share of one ring step.

    `block` is the buffer of the `keys` tokens that this rank sees of `owner`'s, ascending. `held` is the block of the
    step before (at step 1 the rank's own tokens). `own` are the rank's own tokens.
    """

    owner: int
    keys: int
    tasks: tuple[Task, ...]  # over (own queries, block)
    receive: tuple[Message, ...] = ()  # keys and values into block, before computing this step
    send_held: tuple[Message, ...] = ()  # keys and values out of held, at the same time
    send_own: tuple[Message, ...] = ()  # ... and out of own
    grad_receive: tuple[Message, ...] = ()  # partial dK, dV added into block's, after computing this step
    grad_send: tuple[Message, ...] = ()  # block's dK, dV to the neighbour or home, after that
    grad_home: tuple[Message, ...] = ()  # others' partial dK, dV for own tokens, sent to us at this step


@dataclass(frozen=True)
class RingSchedule:
    """All steps of one rank. Step 0 is the rank's own block and moves nothing."""

    rank: int
    size: int
    direction: int
    steps: tuple[Step, ...]

    @property
    def tokens_sent(self) -> int:
        """Tokens whose K and V this rank sends in the forward, and again in the backward."""
        return sum(m.tokens for step in self.steps for m in (*step.send_held, *step.send_own))

    @property
    def grad_tokens_sent(self) -> int:
        """Tokens whose dK and dV this rank sends in the backward."""
        return sum(m.tokens for step in self.steps for m in step.grad_send)


def ring_schedule(layout: SequenceLayout, spec: AttentionSpec, batch: int, rank: int) -> RingSchedule:
    """Plan rank's part of the attention of `batch` rows over the ring. Pure: every rank derives matching plans.

    The ring turns whichever way lets more of the traffic pass between neighbours (zigzag and causal: rank j sends to
    j - 1).
    """
    pieces = [rank_pieces(layout, spec, batch, r) for r in range(layout.ring)]
    needs = _Needs(pieces, spec)
    direction = max((1, -1), key=lambda d: _neighbour_tokens(needs, d))
    step_of = _StepPlanner(rank, direction, needs)
    own = block_tasks(pieces[rank], pieces[rank], spec)
    steps = [Step(owner=rank, keys=batch * layout.ring_len, tasks=own)]
    for t in range(1, layout.ring):
        owner = (rank - direction * t) % layout.ring
        tasks = block_tasks(pieces[rank], pieces[owner], spec)
        steps.append(step_of(t, _packed_tasks(tasks, needs(rank, owner))))
    return RingSchedule(rank, layout.ring, direction, tuple(steps))


class _Needs:
    """Which of a rank's keys another one sees. Worked out when asked: a plan asks for a few rows and columns of it."""

    def __init__(self, pieces: list[Pieces], spec: AttentionSpec) -> None:
        self._pieces, self._spec = pieces, spec
        self._known: dict[tuple[int, int], Intervals] = {}

    @property
    def ring(self) -> int:
        return len(self._pieces)

    def __call__(self, q_rank: int, k_rank: int) -> Intervals:
        if q_rank == k_rank:
            return ()  # a rank's own block does not travel
        if (q_rank, k_rank) not in self._known:
            tasks = block_tasks(self._pieces[q_rank], self._pieces[k_rank], self._spec)
            self._known[q_rank, k_rank] = union((task.k_start, task.k_stop) for task in tasks)
        return self._known[q_rank, k_rank]


def _neighbour_tokens(needs: _Needs, direction: int) -> int:
    """Tokens of `SAMPLED_OWNERS` evenly spread ranks that a consumer gets from its ring neighbour, over all ranks."""
    ring = needs.ring
    total = 0
    for owner in range(0, ring, -(-ring // SAMPLED_OWNERS)):
        total += size(needs((owner + direction) % ring, owner))
        for t in range(2, ring):
            consumer, neighbour = (owner + direction * t) % ring, (owner + direction * (t - 1)) % ring
            total += size(intersect(needs(consumer, owner), needs(neighbour, owner)))
    return total


def _packed_tasks(tasks: tuple[Task, ...], keys: Intervals) -> tuple[Task, ...]:
    """The tasks with their keys counted in the buffer that packs `keys`."""
    starts = [start for start, _ in keys]
    places = [0, *accumulate(stop - start for start, stop in keys)]

    def shifted(task: Task) -> Task:
        interval = bisect_right(starts, task.k_start) - 1
        return task.shift_keys(places[interval] - starts[interval])

    return tuple(map(shifted, tasks))


@dataclass(frozen=True)
class _StepPlanner:
    rank: int
    direction: int
    needs: _Needs

    def __call__(self, t: int, tasks: tuple[Task, ...]) -> Step:
        here, ahead, behind = self.rank, self._at(1), self._at(-1)
        owner, held_owner, consumer = self._at(-t), self._at(1 - t), self._at(t)
        keys = self.needs(here, owner)
        receive = _messages((behind, self._relayed(owner, t)), (owner, self._direct(owner, t)), within=keys)
        relayed_on = self._relayed(held_owner, t)
        held = self.needs(here, held_owner) if t > 1 else None  # step 1 sends own tokens
        return Step(
            owner=owner,
            keys=size(keys),
            tasks=tasks,
            receive=receive,
            send_held=_messages((ahead, relayed_on), within=held),
            send_own=_messages((consumer, self._direct(here, t))),
            # From step 2 on, what the neighbour relayed to us comes back with its partial sums in it.
            grad_receive=_messages((behind, self._relayed(owner, t)), within=keys) if t > 1 else (),
            grad_send=_messages((ahead, self._relayed(owner, t + 1)), (owner, self._finished(owner, t)), within=keys),
            grad_home=_messages((consumer, self._finished(here, t))),
        )

    def _at(self, distance: int) -> int:
        return (self.rank + self.direction * distance) % self.needs.ring

    def _seen(self, owner: int, t: int) -> Intervals:
        """What the consumer at distance t sees of the owner's keys; the owner itself, at distance 0, holds all."""
        if t >= self.needs.ring:
            return ()
        return self.needs((owner + self.direction * t) % self.needs.ring, owner)

    def _relayed(self, owner: int, t: int) -> Intervals:
        """What the consumer at distance t gets from its neighbour at distance t - 1."""
        return self._seen(owner, t) if t == 1 else intersect(self._seen(owner, t), self._seen(owner, t - 1))

    def _direct(self, owner: int, t: int) -> Intervals:
        """What the consumer at distance t gets from the owner although it is not the neighbour."""
        return subtract(self._seen(owner, t), self._relayed(owner, t))

    def _finished(self, owner: int, t: int) -> Intervals:
        """Gradients that the consumer at distance t sends home: the next one adds nothing to them."""
        return subtract(self._seen(owner, t), self._seen(owner, t + 1))


def _messages(*parts: tuple[int, Intervals], within: Intervals | None = None) -> tuple[Message, ...]:
    """Messages of the parts that carry something, sliced from a buffer that packs `within` (None: all own tokens)."""
    return tuple(Message(peer, keys if within is None else locate(keys, within)) for peer, keys in parts if keys)
