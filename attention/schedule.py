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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .bands import Tasks, below, block_tasks, joint_pieces, rank_pieces, row_parts, summary_tasks, united
from .intervals import EMPTY, Intervals, expanded, intersect, locate, shifts, size, subtract
from .layout import SequenceLayout
from .spec import AttentionSpec, Joint
from .tiles import tile_tasks

MESSAGES = ("receive", "send_held", "send_own", "grad_receive", "grad_send", "grad_home")  # fields of a step
SAMPLED_OWNERS = 16  # owners whose traffic decides the direction of rotation; both are correct, one sends less


@dataclass(frozen=True, eq=False)
class Message:
    """Tokens sent to or received from one peer, as slices of a token buffer.

    index: their indices in the buffer, on its device, if they are several slices.
    """

    peer: int
    slices: Intervals
    index: Tensor | None = None

    def on(self, device: torch.device) -> Message:
        """Return the message with its `index`, if it needs one."""
        return (
            self
            if len(self.slices) == 1
            else replace(self, index=torch.tensor(expanded(*self.slices.T), device=device))
        )

    @cached_property
    def start(self) -> int:
        return int(self.slices[0, 0])

    @cached_property
    def tokens(self) -> int:
        return size(self.slices)


@dataclass(frozen=True, eq=False)
class Step:
    """One rank's part of one ring step.

    `block` is a buffer of the `keys` tokens of `owner` that this rank needs, ascending. `held` is the previous step's
    block (at step 1 the rank's own tokens). `own` is the buffer of the rank's own tokens.
    """

    owner: int
    keys: int
    tasks: Tasks  # over (own queries, block)
    receive: tuple[Message, ...] = ()  # keys and values into block, before computing this step
    send_held: tuple[Message, ...] = ()  # keys and values from held, at the same time
    send_own: tuple[Message, ...] = ()  # ... and from own
    grad_receive: tuple[Message, ...] = ()  # partial dK, dV added to block's, after computing this step
    grad_send: tuple[Message, ...] = ()  # block's dK, dV to the neighbour or the owner, after that
    grad_home: tuple[Message, ...] = ()  # partial dK, dV of own tokens, which other ranks return at this step

    def on(self, device: torch.device) -> Step:
        """Return the step with the indices of its messages."""
        messages: dict[str, Any] = {name: tuple(m.on(device) for m in getattr(self, name)) for name in MESSAGES}
        return replace(self, **messages)


@dataclass(frozen=True, eq=False)
class RingSchedule:
    """All steps of one rank. Step 0 is the rank's own block and communicates nothing.

    merged: joint queries, as slices of the queries, whose results must be merged with those of the other ranks.
    """

    rank: int
    direction: int
    steps: tuple[Step, ...]
    merged: tuple[tuple[int, int], ...] = ()

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
    joint, of_keys = spec.joint or Joint(0, queries=False), key_layout or layout
    row_len, key_row_len = layout.ring_len + joint.query_tokens, of_keys.ring_len + joint.tokens
    rows, tree = row_parts(spec, batch, layout.seq_len)
    pieces = key_pieces = [rank_pieces(layout, rows, r, row_len) for r in range(layout.ring)]
    if key_layout is not None or key_row_len != row_len:
        key_spec = spec if key_layout is None else replace(spec, documents=spec.key_documents, key_documents=None)
        key_rows, _ = row_parts(key_spec, batch, of_keys.seq_len)
        key_pieces = [rank_pieces(of_keys, key_rows, r, key_row_len) for r in range(layout.ring)]
    lower = [below(each, tree, spec) for each in pieces]

    def tasks(q_rank: int, k_rank: int) -> Tasks:
        if spec.function is not None:
            return tile_tasks(layout, spec, spec.function, batch, q_rank, k_rank)
        return block_tasks(pieces[q_rank], lower[q_rank], key_pieces[k_rank], spec)

    own = [tasks(rank, r) for r in range(layout.ring)]

    different: dict[bytes, Intervals] = {}  # of many pairs, few; operations on one set with itself are fast

    @cache  # a plan needs few of the pairs
    def needs(q_rank: int, k_rank: int) -> Intervals:
        if q_rank == k_rank:
            return EMPTY  # a rank's own block is not sent
        keys = (own[k_rank] if q_rank == rank else tasks(q_rank, k_rank)).needed_keys()
        return different.setdefault(keys.tobytes(), keys)

    # Both directions have the same pairs of neighbours, except for an owner's own.
    owners = range(0, layout.ring, -(-layout.ring // SAMPLED_OWNERS))
    up, down = (sum(size(needs((r + d) % layout.ring, r)) for r in owners) for d in (1, -1))
    planner = _StepPlanner(rank, 1 if up >= down else -1, layout.ring, needs)
    # Under a causal mask joint queries in front only see each other: every rank has all of their results.
    merging = joint.queries and layout.ring > 1 and not (spec.causal and joint.front)
    at_home = own[rank]
    if joint.tokens and joint.every:
        more = summary_tasks(pieces[rank], joint_pieces(joint, batch, key_row_len), rows, joint.every)
        at_home = Tasks(np.concatenate((at_home.rows, more.rows)))
    elif joint.tokens:
        none = below(pieces[rank], tree, spec)
        queries = joint_pieces(joint, batch, row_len) if joint.queries else none
        home = united(key_pieces[rank], joint_pieces(joint, batch, key_row_len))
        if merging and rank:
            parts = [(pieces[rank], home), (queries, key_pieces[rank])]
        else:
            parts = [(united(pieces[rank], queries), home)]
        at_home = Tasks(np.concatenate([block_tasks(q, none, k, spec).rows for q, k in parts]))
    steps = [Step(owner=rank, keys=batch * key_row_len, tasks=at_home)]
    for t in range(1, layout.ring):
        owner = planner.at(-t)
        keys = needs(rank, owner)
        steps.append(planner.step(t, own[owner].shift_keys(keys[:, 0], shifts(keys))))
    merged = [(end - joint.tokens, end) for end in range(row_len, (batch + 1) * row_len, row_len)] if merging else []
    return RingSchedule(rank, planner.direction, tuple(steps), tuple(merged))


def local_schedule(
    layout: SequenceLayout, spec: AttentionSpec, batch: int, ring_rank: int, ulysses_rank: int
) -> RingSchedule:
    """Plan attention of one rank's own queries to joint keys only, which communicates nothing."""
    assert spec.joint is not None
    rows, tree = row_parts(spec, batch, layout.seq_len)
    queries = rank_pieces(layout, rows, ring_rank, layout.local_len, ulysses_rank)
    keys = joint_pieces(spec.joint, batch, spec.joint.tokens)
    tasks = block_tasks(queries, below(queries, tree, spec), keys, spec)
    return RingSchedule(0, 1, (Step(owner=0, keys=batch * spec.joint.tokens, tasks=tasks),))


@dataclass(frozen=True)
class _StepPlanner:
    rank: int
    direction: int
    ring: int
    needs: Callable[[int, int], Intervals]  # keys of the second rank that the first one's queries attend to

    def at(self, distance: int) -> int:
        return (self.rank + self.direction * distance) % self.ring

    def step(self, t: int, tasks: Tasks) -> Step:
        here, ahead, behind = self.rank, self.at(1), self.at(-1)
        owner, held_owner, consumer = self.at(-t), self.at(1 - t), self.at(t)
        keys, relayed = self.needs(here, owner), self._relayed(owner, t)
        held = self.needs(here, held_owner) if t > 1 else None  # step 1 sends own tokens
        return Step(
            owner=owner,
            keys=size(keys),
            tasks=tasks,
            receive=_messages((behind, relayed), (owner, self._direct(owner, t)), within=keys),
            send_held=_messages((ahead, self._relayed(held_owner, t)), within=held),
            send_own=_messages((consumer, self._direct(here, t))),
            # From step 2 on, the neighbour also sends its partial gradients of the keys it forwarded.
            grad_receive=_messages((behind, relayed), within=keys) if t > 1 else (),
            grad_send=_messages((ahead, self._relayed(owner, t + 1)), (owner, self._finished(owner, t)), within=keys),
            grad_home=_messages((consumer, self._finished(here, t))),
        )

    def _seen(self, owner: int, t: int) -> Intervals:
        """Return the owner's keys that the consumer at distance t needs."""
        return self.needs((owner + self.direction * t) % self.ring, owner) if t < self.ring else EMPTY

    def _relayed(self, owner: int, t: int) -> Intervals:
        """Return the keys that the consumer at distance t gets from its neighbour at distance t - 1."""
        return self._seen(owner, t) if t == 1 else intersect(self._seen(owner, t), self._seen(owner, t - 1))

    def _direct(self, owner: int, t: int) -> Intervals:
        """Return the keys that the consumer at distance t gets from the owner, which is not its neighbour."""
        return EMPTY if t == 1 else subtract(self._seen(owner, t), self._seen(owner, t - 1))

    def _finished(self, owner: int, t: int) -> Intervals:
        """Return the keys whose gradients the consumer at distance t sends to the owner: the next adds nothing."""
        return subtract(self._seen(owner, t), self._seen(owner, t + 1))


def _messages(*parts: tuple[int, Intervals], within: Intervals | None = None) -> tuple[Message, ...]:
    """Return messages for the non-empty parts, as slices of a buffer that packs `within` (None: all own tokens)."""
    return tuple(Message(peer, keys if within is None else locate(keys, within)) for peer, keys in parts if len(keys))
