"""When another plan is worth a change, from given figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.usp.rlhf.toy import ppo
from usp.rlhf.config import ReplanOptions
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.replanning import FIGURES, call_seconds
from usp.rlhf.runtime.measure import StepLengths
from usp.rlhf.runtime.timeline import Event
from usp.train.tuning import Decision

COST = {"nbytes": 2**20, "switch_seconds": 4.0, "search_seconds": 100.0}
GOOD = Decision(10, 20, ExecutionPlan("other", {}), running_seconds=2.0, best_seconds=1.5, gain=0.05, **COST)


def test_a_gain_above_its_cost_is_taken() -> None:
    assert not GOOD.verdict and not replace(GOOD, remaining=9).verdict and GOOD.relative_gain == 0.25
    assert "2.000 s, and 1.500 s with the best plan" in GOOD.line() and GOOD.line().endswith("changing the plan")
    assert GOOD.figures(FIGURES)["replan/switched"] == 1 and GOOD.figures(FIGURES)["replan/switch_seconds"] == 4.0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"switch_seconds": 10.0}, "the change takes 10.00 s and saves 10.00 s"),
        ({"remaining": 8}, "the change takes 4.00 s and saves 4.00 s"),
        ({"gain": 0.3}, "a step would be 25.0% faster, and 30.0% is asked for"),
        ({"best_seconds": 2.0, "gain": 0.0}, "no faster plan is found"),
        ({"why_not": "it needs another rank"}, "it needs another rank"),
    ],
)
def test_anything_else_is_refused(changed: dict, why: str) -> None:
    decision = replace(GOOD, **changed)
    assert decision.verdict == why and decision.line().endswith(why)
    assert decision.figures(FIGURES)["replan/switched"] == 0


def test_options_are_read_from_the_flag() -> None:
    assert ReplanOptions.parse("every=3,gain=2.5%") == ReplanOptions(3, 0.025, 5.0)
    assert ReplanOptions.parse("gain=0.1,budget=2") == ReplanOptions(10, 0.1, 2.0)
    with pytest.raises(ValueError, match=r"every=0 must be at least 1; gain=1\.5 must .*; budget=0\.0 must"):
        ReplanOptions.parse("every=0,gain=150%,budget=0")
    with pytest.raises(ValueError, match="unknown 'evry'"):
        ReplanOptions.parse("evry=3")


def test_a_call_takes_what_its_slowest_rank_works() -> None:
    """Without the time until the last rank arrives; data-parallel ranks that generate do not meet."""
    events = [
        Event(1, 0, "generate", "actor_generate", 0.0, 3.0, group=0),
        Event(1, 1, "generate", "actor_generate", 1.0, 5.0, group=1),
        Event(1, 0, "train_step", "actor_train", 3.0, 9.0),
        Event(1, 1, "train_step", "actor_train", 5.0, 9.0),
        Event(1, 1, "reallocate", "actor for actor_generate", 9.0, 9.5),
    ]
    assert call_seconds(events) == {"actor_generate": 4.0, "actor_train": 4.0}


def test_lengths_are_those_of_the_call_that_generates() -> None:
    lengths = StepLengths.of_step(ppo(), {"prompt_ids": [3, 3, 2, 2], "tokens": [5, 7, 3, 10]})
    assert lengths == StepLengths((3, 3, 2, 2), (2, 4, 1, 8), ppo().group_size)
