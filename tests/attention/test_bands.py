"""Tasks and schedules cover each visible pair exactly once, and no other pair, for random layouts and masks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from usp.attention import OF_DOCUMENTS, AttentionSpec, RingSchedule, SequenceLayout, Task, ring_schedule
from usp.attention.bands import _join, below, block_tasks, rank_pieces, row_parts, tight_task
from usp.attention.intervals import expanded, intersect, locate, size, subtract, union
from usp.attention.schedule import Message
from usp.attention.spec import Joint

from .dense import visible
from .scalar_planner import scalar_tasks
from .strategies import layouts, specs, trees


def pairs(task: Task) -> set[tuple[int, int]]:
    return {
        (i, j)
        for i in range(task.q_start, task.q_stop)
        for j in range(task.k_start, task.k_stop)
        if (task.lowest is None or i - j >= task.lowest) and (task.highest is None or i - j <= task.highest)
    }


limits = st.none() | st.integers(-8, 8)
rectangles = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))


@given(rectangles, limits, limits)
def test_a_tight_task_has_a_visible_pair_in_every_row_and_column(rectangle, lowest, highest) -> None:
    wanted = pairs(Task(*rectangle, lowest, highest))
    task = tight_task(*rectangle, lowest, highest)
    if task is None:
        assert not wanted
        return
    assert pairs(task) == wanted
    assert task.visible() == len(wanted)
    assert {i for i, _ in wanted} == set(range(task.q_start, task.q_stop))
    assert {j for _, j in wanted} == set(range(task.k_start, task.k_stop))
    assert task.full == (len(wanted) == task.rows * task.columns)


@given(rectangles, limits, limits, rectangles, limits, limits)
def test_joined_tasks_cover_the_pairs_of_both(r, low, high, other, other_low, other_high) -> None:
    a, b = tight_task(*r, low, high), tight_task(*other, other_low, other_high)
    if a is None or b is None or pairs(a) & pairs(b):
        return
    joined = _join(a, b)
    assert joined is None or pairs(joined) == pairs(a) | pairs(b)


def test_causal_zigzag_needs_one_task_per_block() -> None:
    layout = SequenceLayout("zigzag", 64, ring=4)
    for rank in range(4):
        steps = ring_schedule(layout, AttentionSpec(), 1, rank).steps
        assert [len(step.tasks) for step in steps] == [1, 1, 1, 1]
        assert steps[0].tasks[0].lowest == 0  # one triangle across both chunks
        assert all(step.tasks[0].full for step in steps[1:])


@st.composite
def problems(draw: st.DrawFn) -> tuple[SequenceLayout, AttentionSpec, int]:
    layout, batch = draw(layouts()), draw(st.integers(1, 2))
    spec = draw(specs(layout.seq_len, batch) | trees(layout.seq_len, batch))
    if layout.kind in OF_DOCUMENTS:
        layout = replace(layout, documents=spec.documents)
    return layout, spec, batch


@pytest.mark.slow
@settings(max_examples=100)
@given(problems())
def test_a_schedule_computes_each_visible_pair_once_and_sends_each_needed_key_once(problem) -> None:
    layout, spec, batch = problem
    documents = None if spec.documents is None else torch.tensor(spec.documents)
    prefix = None if spec.prefixes is None else torch.tensor(spec.prefixes)
    tree = None if spec.parents is None else torch.tensor(spec.parents)
    rows = {"cu_seqlens": documents, "prefix": prefix, "prefix_tree": tree}
    seen = visible(batch, layout.seq_len, causal=spec.causal, window=spec.window, **rows)
    schedules = [ring_schedule(layout, spec, batch, rank) for rank in range(layout.ring)]
    counted, needed = torch.zeros_like(seen, dtype=torch.int), 0
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            keys = needed_keys(layout, seen, rank, step.owner)
            if step.owner == rank:
                keys = list(range(batch * layout.ring_len))
            else:
                needed += len(keys)
            assert step.keys == len(keys)
            for task in step.tasks:
                for i, j in pairs(task):
                    (row, query), (key_row, key) = (token(layout, r, x) for r, x in ((rank, i), (step.owner, keys[j])))
                    assert row == key_row
                    counted[row, query, key] += 1
    assert torch.equal(counted, seen.int())
    assert sum(s.tokens_sent for s in schedules) == needed == sum(s.grad_tokens_sent for s in schedules)
    assert_messages_match(schedules)


# Documents 1 and 3 continue the first one, and a token of neither is between them.
APART = AttentionSpec(documents=((0, 4, 6, 7, 9),), parents=((-1, 0, -1, 0),))


@pytest.mark.slow
@settings(max_examples=100)
@example((SequenceLayout("contiguous", 9, 1), APART, 1))
@given(problems())
def test_arrays_plan_the_tasks_that_a_search_pair_by_pair_finds(problem) -> None:
    layout, spec, batch = problem
    rows, tree = row_parts(spec, batch, layout.seq_len)
    pieces = [rank_pieces(layout, rows, rank) for rank in range(layout.ring)]
    for q_rank, k_rank in product(range(layout.ring), repeat=2):
        lower = below(pieces[q_rank], tree, spec)
        found = block_tasks(pieces[q_rank], lower, pieces[k_rank], spec)
        assert list(found) == scalar_tasks(layout, spec, batch, q_rank, k_rank)


@pytest.mark.slow
@given(problems())
def test_the_ring_turns_where_more_passes_between_neighbours(problem) -> None:
    layout, spec, batch = problem
    ring, seen = layout.ring, {}
    for q_rank, k_rank in product(range(ring), repeat=2):
        keys = ({*range(t.k_start, t.k_stop)} for t in scalar_tasks(layout, spec, batch, q_rank, k_rank))
        seen[q_rank, k_rank] = set().union(*keys)

    def relayed(direction: int) -> int:
        total = 0
        for owner, t in product(range(ring), range(1, ring)):
            here, before = ((owner + direction * hop) % ring for hop in (t, t - 1))
            total += len(seen[here, owner] & seen[before, owner]) if t > 1 else len(seen[here, owner])
        return total

    assert ring_schedule(layout, spec, batch, 0).direction == (1 if relayed(1) >= relayed(-1) else -1)


sets = st.sets(st.integers(0, 30))


@pytest.mark.slow
@given(sets, sets)
def test_sets_of_indices(a, b) -> None:
    def intervals(indices: set[int]) -> np.ndarray:
        points = np.array(sorted(indices), np.int64)
        return union(points, points + 1)

    def indices(found: np.ndarray) -> set[int]:
        flat = found.ravel()
        assert (np.diff(flat) > 0).all(), "ascending, disjoint and not adjacent"
        return {*expanded(*found.T).tolist()}

    assert indices(intervals(a)) == a and size(intervals(a)) == len(a)
    assert indices(intersect(intervals(a), intervals(b))) == a & b
    assert indices(subtract(intervals(a), intervals(b))) == a - b
    places = {index: place for place, index in enumerate(sorted(a))}
    assert indices(locate(intervals(a & b), intervals(a))) == {places[index] for index in a & b}


def token(layout: SequenceLayout, rank: int, local: int) -> tuple[int, int]:
    """Return (row, global position) of a ring rank's local token."""
    row, index = divmod(local, layout.ring_len)
    return row, int(layout.positions(rank, row=row)[index])


def needed_keys(layout: SequenceLayout, seen: torch.Tensor, q_rank: int, k_rank: int) -> list[int]:
    """Return local indices of the keys of `k_rank` that any query of `q_rank` attends to."""
    ranks = q_rank, k_rank
    blocks = [
        pairs[torch.meshgrid(*(layout.positions(rank, row=row) for rank in ranks), indexing="ij")]
        for row, pairs in enumerate(seen)
    ]
    return torch.stack(blocks).any(1).flatten().nonzero().flatten().tolist()


def assert_messages_match(schedules: list[RingSchedule]) -> None:
    """Check that every message sent at a step is expected by its receiver at that step."""

    def sizes(rank: int, messages: tuple[Message, ...], outgoing: bool) -> dict[tuple[int, int], int]:
        ends = {((rank, m.peer) if outgoing else (m.peer, rank)): m.tokens for m in messages}
        assert len(ends) == len(messages), "two messages between the same ranks at one step"
        return ends

    for index in range(len(schedules)):
        sent, expected, returned, collected = {}, {}, {}, {}
        for rank, schedule in enumerate(schedules):
            step = schedule.steps[index]
            sent |= sizes(rank, (*step.send_held, *step.send_own), True)
            expected |= sizes(rank, step.receive, False)
            returned |= sizes(rank, step.grad_send, True)
            following = schedule.steps[index + 1].grad_receive if index + 1 < len(schedules) else ()
            collected |= sizes(rank, (*step.grad_home, *following), False)
        assert sent == expected
        assert returned == collected


def test_windows_communicate_only_with_neighbours_and_documents_only_with_ranks_that_share_one() -> None:
    layout = SequenceLayout("contiguous", 64, ring=8)
    window = [ring_schedule(layout, AttentionSpec(window=(4, 0)), 1, rank) for rank in range(8)]
    assert [s.tokens_sent for s in window] == [4] * 7 + [0]
    assert all(m.peer == s.rank + 1 for s in window for step in s.steps for m in (*step.send_held, *step.send_own))
    apart = AttentionSpec(documents=((0, 8, 16, 40, 64),))
    assert [ring_schedule(layout, apart, 1, rank).tokens_sent for rank in range(8)] == [0, 0, 8, 16, 0, 8, 16, 0]


@pytest.mark.slow
def test_causal_traffic_relative_to_a_full_ring() -> None:
    def share(kind: str, ring: int) -> float:
        layout = SequenceLayout(kind, 64 * ring, ring)
        sent = sum(ring_schedule(layout, AttentionSpec(), 1, rank).tokens_sent for rank in range(ring))
        return sent / (layout.seq_len * (ring - 1))

    for ring in (2, 4, 8):
        assert share("contiguous", ring) == 0.5
        assert share("zigzag", ring) == 0.75
        assert 0.95 < share("striped", ring) < 1
    zigzag = ring_schedule(SequenceLayout("zigzag", 256, 4), AttentionSpec(), 1, 2)
    assert zigzag.direction == -1  # rank j sends only to j - 1
    assert {m.peer for step in zigzag.steps for m in (*step.send_held, *step.send_own)} == {1}


@pytest.mark.parametrize(
    "of_joint",
    [((0, 2, 2, 7, 7), (0, 1, 6, 6, 6)), ((0, 1, 1, 3, 3), (0, 1, 2, 2, 2)), ((0, 0, 0, 1, 1), (0, 1, 4, 4, 4))],
    ids=["one for each three", "fewer", "one"],
)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped", "balanced"])
def test_joint_tokens_that_stand_for_others_are_seen_from_the_last_of_these_on(
    kind: str, of_joint: tuple[tuple[int, ...], ...]
) -> None:
    documents, every = ((0, 7, 8, 24, 24), (0, 3, 20, 22, 24)), 3
    spec = AttentionSpec(documents=documents, joint=Joint(7, queries=False, documents=of_joint, every=every))
    layout = SequenceLayout(kind, 24, 2, documents=documents if kind == "balanced" else None)
    for rank in range(2):
        seen, expected = np.zeros((2, 24, 38), np.int64)
        for task in ring_schedule(layout, spec, 2, rank).steps[0].tasks:
            if task.k_start % 19 >= 12:
                assert task.full
                seen[task.q_start : task.q_stop, task.k_start : task.k_stop] += 1
        for row in range(2):
            for local, position in enumerate(layout.ring_positions(rank, row).tolist()):
                for number, (start, stop) in enumerate(pairwise(documents[row])):
                    if start <= position < stop:
                        first, last = of_joint[row][number : number + 2]
                        ready = min((position - start + 1) // every, last - first)
                        expected[row * 12 + local, row * 19 + 12 + first : row * 19 + 12 + first + ready] = 1
        assert expected.any() and np.array_equal(seen, expected)
    for wrong in ({"queries": True}, {"queries": False, "only": True}):
        with pytest.raises(ValueError, match="joint_every says which joint keys"):
            AttentionSpec(joint=Joint(7, **wrong, every=3))


@pytest.mark.slow
def test_ulysses_inside_of_hosts_crosses_between_them_as_little_as_a_double_ring_could() -> None:
    """Two hosts, 8,192 tokens. A double ring (LoongTrain, arXiv 2406.18485) sends each block between the hosts once and
    passes it on inside of them; what it would gain over a ring of 8, a ring of 2 around Ulysses inside each host has.
    """
    crossing = {}  # tokens, each of an equal part of the heads: those sent, and those needed on the other host
    for mask, spec in (("causal", AttentionSpec()), ("full", AttentionSpec(causal=False))):
        for ring in (2, 4, 8):
            layout, host = SequenceLayout("zigzag", 8192, ring), ring // 2
            schedules = [ring_schedule(layout, spec, 1, rank) for rank in range(ring)]
            messages = [(s.rank // host, m) for s in schedules for t in s.steps for m in (*t.send_held, *t.send_own)]
            sent = sum(m.tokens for here, m in messages if m.peer // host != here)
            rows, tree = row_parts(spec, 1, 8192)
            pieces = [rank_pieces(layout, rows, rank, layout.ring_len) for rank in range(ring)]
            needed = 0
            for owner in range(ring):
                others = [pieces[rank] for rank in range(ring) if rank // host != owner // host]
                keys = [block_tasks(q, below(q, tree, spec), pieces[owner], spec).needed_keys() for q in others]
                needed += size(union(*np.concatenate(keys).T))
            crossing[mask, ring] = sent, needed
    assert crossing == {
        ("causal", 2): (6144, 6144), ("causal", 4): (8192, 6144), ("causal", 8): (9216, 6144),
        ("full", 2): (8192, 8192), ("full", 4): (12288, 8192), ("full", 8): (14336, 8192),
    }  # fmt: skip
