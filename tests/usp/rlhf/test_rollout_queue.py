"""Every prompt is taken once and on time, whatever is complete first, also if a run is resumed under other plans."""

from __future__ import annotations

import json
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from usp.rlhf.rollout_queue import BegunPrompt, QueueRules, RolloutQueue, choose

SHARES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def complete_first(begun: tuple[BegunPrompt, ...], rules: QueueRules, number: int, order: list[int]) -> tuple[int, ...]:
    """What a rank takes as its prompts become complete one by one in an order; never before there are enough."""
    tickets = [each.ticket for each in begun]
    tickets.sort(key=lambda ticket: order[ticket % len(order)])
    for number_complete in range(len(tickets) + 1):
        taken = choose(rules, number, begun, tickets[:number_complete])
        if taken is not None:
            return taken
    raise AssertionError(f"all of {tickets} do not make a step")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(1, 4), st.floats(1, 4), st.booleans(), st.lists(st.integers(0, 99), min_size=8), st.data())
def test_every_prompt_is_taken_once_and_on_time(
    shares: tuple[int, ...], ahead: int, begun: float, partial: bool, order: list[int], data: st.DataObject
) -> None:
    steps = 7
    rules = QueueRules(shares, min(begun, ahead) if partial else begun, ahead if partial else 0, steps)
    queue, taken = RolloutQueue(), Counter[int]()
    for number in range(1, steps + 1):
        started = queue.begin(rules, number)
        assert queue.begin(rules, number) == started  # which a resumed run repeats
        assert set(taken).isdisjoint(each.ticket for each in started.begun)
        of_step: list[int] = []
        for owner, share in enumerate(rules.shares):
            mine = started.of(owner)
            assert len(mine) <= max(len(queue.of(owner)), int(rules.begun * share))
            of_step += complete_first(mine, rules, number, order)
            assert len(of_step) == sum(rules.shares[: owner + 1])
        assert all(number <= rules.last_step(each) or not partial for each in started.begun if each.ticket in of_step)
        taken.update(of_step)
        queue = RolloutQueue.from_extra(json.loads(json.dumps(started.end(rules, number, of_step).to_extra())))
        if data.draw(st.booleans()):  # resumed under another plan
            total = sum(shares)
            parts = data.draw(st.integers(1, total))
            rules = QueueRules(
                tuple(total // parts + (part < total % parts) for part in range(parts)), rules.begun, rules.ahead, steps
            )
            queue = queue.dealt(rules)
    assert taken == Counter(range(steps * sum(shares))) and queue == RolloutQueue(len(taken))


def test_the_slowest_go_on_until_others_would_be_too_late() -> None:
    rules = QueueRules((2,), begun=1.5, ahead=2, steps=9)
    first = RolloutQueue().begin(rules, 1)
    assert [each.ticket for each in first.begun] == [0, 1, 2]
    assert choose(rules, 1, first.begun, [2]) is None and choose(rules, 1, first.begun, [2, 1]) == (1, 2)
    second = first.end(rules, 1, (1, 2)).begin(rules, 2)
    assert second.begun == (BegunPrompt(0, 1, 0), BegunPrompt(3, 2, 0), BegunPrompt(4, 2, 0))
    assert choose(rules, 2, second.begun, [4, 3]) is None  # a token of 0 would be 3 steps old in step 3
    assert choose(rules, 2, second.begun, [4, 3, 0]) == (0, 4)
    dropped = QueueRules((2,), begun=1.5, ahead=0, steps=9)
    assert first.end(dropped, 1, (1, 2)) == RolloutQueue(3, (), (0,))
    assert first.end(dropped, 1, (1, 2)).begin(dropped, 2).begun == (
        BegunPrompt(0, 2, 0),
        BegunPrompt(3, 2, 0),
        BegunPrompt(4, 2, 0),
    )


def test_spare_samples_stay_if_a_later_step_may_take_them() -> None:
    rules = QueueRules((2,), begun=1.5, ahead=2, steps=9)
    first = RolloutQueue().begin(rules, 1)
    kept = first.end(rules, 1, (0, 1), spare={1})
    assert [each.ticket for each in kept.begun] == [1, 2]
    assert [each.ticket for each in kept.begin(rules, 2).end(rules, 2, (1, 2), spare={1}).begun] == [3]


@pytest.mark.parametrize(("steps", "begun"), [(1, 4), (2, 6), (3, 6)])
def test_no_more_prompts_are_begun_than_steps_remain_for(steps: int, begun: int) -> None:
    assert RolloutQueue().begin(QueueRules((4,), begun=1.5, ahead=2, steps=steps), 1).drawn == begun
