"""The ring schedule as data: the messages and the tasks of each rank at each step.

At step t of a ring that rotates in direction d, rank r attends to the block of owner (r - d * t) % R. Each rank
receives exactly the keys that its queries attend to, once:

    from its neighbour r - d, which has just used them, if the neighbour needed them too;
    otherwise from their owner.

Key gradients take the same routes: a rank forwards its partial sums to its neighbour r + d if that rank adds to them,
and returns the rest to the owner. The forward therefore moves one copy of the visible keys and values, the backward
moves them again plus the same number of gradients, and empty messages are skipped: with a window only neighbours
communicate, with packed documents only ranks that share a document.

Joint tokens, which every rank holds, are the last tokens of each row of a rank's own block. Their keys are never sent.
Their queries attend to the rank's own keys at step 0, on rank 0 also to each other; then the ranks' results are merged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from .bands import Pieces, Task, below, block_tasks, joint_pieces, rank_pieces
from .intervals import Intervals, intersect, locate, size, subtract, union
from .layout import SequenceLayout
from .spec import AttentionSpec, Joint

SAMPLED_OWNERS = 16  # owners whose traffic decides the direction of rotation; both are correct, one sends less


@dataclass(frozen=True)
class Message:
    """Tokens sent to or received from one peer, as slices of a token buffer."""

    peer: int
    slices: Intervals

    @cached_property
    def tokens(self) -> int:
        return size(self.slices)


@dataclass(frozen=True)
class Step:
    """One rank's part of one ring step.

    `block` is a buffer of the `keys` tokens of `owner` that this rank needs, ascending. `held` is the previous step's
    block (at step 1 the rank's own tokens). `own` is the buffer of the rank's own tokens.
    """

    owner: int
    keys: int
    tasks: tuple[Task, ...]  # over (own queries, block)
    receive: tuple[Message, ...] = ()  # keys and values into block, before computing this step
    send_held: tuple[Message, ...] = ()  # keys and values from held, at the same time
    send_own: tuple[Message, ...] = ()  # ... and from own
    grad_receive: tuple[Message, ...] = ()  # partial dK, dV added to block's, after computing this step
    grad_send: tuple[Message, ...] = ()  # block's dK, dV to the neighbour or the owner, after that
    grad_home: tuple[Message, ...] = ()  # partial dK, dV of own tokens, which other ranks return at this step


@dataclass(frozen=True)
class RingSchedule:
    """All steps of one rank. Step 0 is the rank's own block and communicates nothing.

    merged: joint queries, as slices of the queries, whose results must be merged with those of the other ranks.
    """

    rank: int
    direction: int
    steps: tuple[Step, ...]
    merged: Intervals = ()

    @cached_property
    def tokens_sent(self) -> int:
        """Number of tokens whose K and V this rank sends in the forward, and again in the backward."""
        return sum(m.tokens for step in self.steps for m in (*step.send_held, *step.send_own))

    @cached_property
    def grad_tokens_sent(self) -> int:
        """Number of tokens whose dK and dV this rank sends in the backward."""
        return sum(m.tokens for step in self.steps for m in step.grad_send)


def ring_schedule(
    layout: SequenceLayout, spec: AttentionSpec, batch: int, rank: int, key_layout: SequenceLayout | None = None
) -> RingSchedule:
    """Plan one rank's part of ring attention over `batch` rows. Pure: all ranks derive matching plans.

    The ring rotates in the direction in which more of the traffic passes between neighbours (with causal zigzag, rank
    j sends to j - 1).

    key_layout: of cross attention; None if queries and keys are of the same tokens.
    """
    joint = spec.joint or Joint(0, queries=False)
    row_len = layout.ring_len + joint.query_tokens
    pieces = key_pieces = [rank_pieces(layout, spec, batch, r, row_len) for r in range(layout.ring)]
    lower = [below(each, spec) for each in pieces]
    of_keys = key_layout or layout
    key_row_len = of_keys.ring_len + joint.tokens
    if key_layout is not None or key_row_len != row_len:
        key_spec = spec if key_layout is None else replace(spec, documents=spec.key_documents, key_documents=None)
        key_pieces = [rank_pieces(of_keys, key_spec, batch, r, key_row_len) for r in range(layout.ring)]

    def tasks(q_rank: int, k_rank: int) -> tuple[Task, ...]:
        return block_tasks(pieces[q_rank], lower[q_rank], key_pieces[k_rank], spec)

    @cache  # a plan needs few of the pairs
    def needs(q_rank: int, k_rank: int) -> Intervals:
        if q_rank == k_rank:
            return ()  # a rank's own block is not sent
        return union((task.k_start, task.k_stop) for task in tasks(q_rank, k_rank))

    planners = [_StepPlanner(rank, direction, layout.ring, needs) for direction in (1, -1)]
    planner = max(planners, key=_StepPlanner.neighbour_tokens)
    # Under a causal mask joint queries in front only see each other: every rank has all of their results.
    merging = joint.queries and layout.ring > 1 and not (spec.causal and joint.front)
    queries = joint_pieces(joint, batch, row_len) if joint.queries else {}
    keys = _united(key_pieces[rank], joint_pieces(joint, batch, key_row_len))
    if merging and rank:
        own = block_tasks(pieces[rank], {}, keys, spec) + block_tasks(queries, {}, key_pieces[rank], spec)
    else:
        own = block_tasks(_united(pieces[rank], queries), lower[rank], keys, spec)
    steps = [Step(owner=rank, keys=batch * key_row_len, tasks=own)]
    for t in range(1, layout.ring):
        owner = planner.at(-t)
        steps.append(planner.step(t, _packed_tasks(tasks(rank, owner), needs(rank, owner))))
    merged = [(end - joint.tokens, end) for end in range(row_len, (batch + 1) * row_len, row_len)] if merging else []
    return RingSchedule(rank, planner.direction, tuple(steps), tuple(merged))


def local_schedule(
    layout: SequenceLayout, spec: AttentionSpec, batch: int, ring_rank: int, ulysses_rank: int
) -> RingSchedule:
    """Plan attention of one rank's own queries to joint keys only, which communicates nothing."""
    assert spec.joint is not None
    queries = rank_pieces(layout, spec, batch, ring_rank, layout.local_len, ulysses_rank)
    tasks = block_tasks(queries, {}, joint_pieces(spec.joint, batch, spec.joint.tokens), spec)
    return RingSchedule(0, 1, (Step(owner=0, keys=batch * spec.joint.tokens, tasks=tasks),))


def _united(a: Pieces, b: Pieces) -> Pieces:
    return {group: [*a.get(group, ()), *b.get(group, ())] for group in {**a, **b}}


def _packed_tasks(tasks: tuple[Task, ...], keys: Intervals) -> tuple[Task, ...]:
    """Return the tasks with key indices into the buffer that packs `keys`."""
    starts = [start for start, _ in keys]
    places = accumulate((stop - start for start, stop in keys), initial=0)
    offsets = [place - start for place, start in zip(places, starts, strict=False)]
    return tuple(task.shift_keys(offsets[bisect_right(starts, task.k_start) - 1]) for task in tasks)


@dataclass(frozen=True)
class _StepPlanner:
    rank: int
    direction: int
    ring: int
    needs: Callable[[int, int], Intervals]  # keys of the second rank that the first one's queries attend to

    def at(self, distance: int) -> int:
        return (self.rank + self.direction * distance) % self.ring

    def neighbour_tokens(self) -> int:
        """Count the tokens of `SAMPLED_OWNERS` evenly spaced ranks that the other ranks get from their neighbour."""
        owners = range(0, self.ring, -(-self.ring // SAMPLED_OWNERS))
        return sum(size(self._relayed(owner, t)) for owner in owners for t in range(1, self.ring))

    def step(self, t: int, tasks: tuple[Task, ...]) -> Step:
        here, ahead, behind = self.rank, self.at(1), self.at(-1)
        owner, held_owner, consumer = self.at(-t), self.at(1 - t), self.at(t)
        keys = self.needs(here, owner)
        receive = _messages((behind, self._relayed(owner, t)), (owner, self._direct(owner, t)), within=keys)
        held = self.needs(here, held_owner) if t > 1 else None  # step 1 sends own tokens
        return Step(
            owner=owner,
            keys=size(keys),
            tasks=tasks,
            receive=receive,
            send_held=_messages((ahead, self._relayed(held_owner, t)), within=held),
            send_own=_messages((consumer, self._direct(here, t))),
            # From step 2 on, the neighbour also sends its partial gradients of the keys it forwarded.
            grad_receive=_messages((behind, self._relayed(owner, t)), within=keys) if t > 1 else (),
            grad_send=_messages((ahead, self._relayed(owner, t + 1)), (owner, self._finished(owner, t)), within=keys),
            grad_home=_messages((consumer, self._finished(here, t))),
        )

    def _seen(self, owner: int, t: int) -> Intervals:
        """Return the owner's keys that the consumer at distance t needs."""
        return self.needs((owner + self.direction * t) % self.ring, owner) if t < self.ring else ()

    def _relayed(self, owner: int, t: int) -> Intervals:
        """Return the keys that the consumer at distance t gets from its neighbour at distance t - 1."""
        return self._seen(owner, t) if t == 1 else intersect(self._seen(owner, t), self._seen(owner, t - 1))

    def _direct(self, owner: int, t: int) -> Intervals:
        """Return the keys that the consumer at distance t gets from the owner, which is not its neighbour."""
        return subtract(self._seen(owner, t), self._relayed(owner, t))

    def _finished(self, owner: int, t: int) -> Intervals:
        """Return the keys whose gradients the consumer at distance t sends to the owner: the next adds nothing."""
        return subtract(self._seen(owner, t), self._seen(owner, t + 1))


def _messages(*parts: tuple[int, Intervals], within: Intervals | None = None) -> tuple[Message, ...]:
    """Return messages for the non-empty parts, as slices of a buffer that packs `within` (None: all own tokens)."""
    return tuple(Message(peer, keys if within is None else locate(keys, within)) for peer, keys in parts if keys)
