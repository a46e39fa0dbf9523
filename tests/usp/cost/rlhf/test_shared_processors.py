"""Steps whose calls share processors."""

from __future__ import annotations

import pytest

from parallel import ParallelDims
from tests.usp.cost.rlhf.estimates import Simple
from tests.usp.rlhf.toy import ppo
from usp.cost.rlhf.shared_processors import SharedSimulator, Task, run_tasks
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan


@pytest.mark.parametrize(
    ("tasks", "ends"),
    [
        ([Task(2, 1, 4, ()), Task(1, 1, 4, ())], [2, 1]),  # one processor each
        ([Task(1, 2, 4, ()), Task(1, 2, 4, ())], [2, 2]),  # half of both each
        ([Task(1, 2, 6, ()), Task(1, 2, 2, ())], [4 / 3, 2]),  # by ranks: the second is at 1/3 when the first ends
        ([Task(1, 2, 4, ()), Task(1, 0.5, 4, ())], [1.25, 1]),  # the second uses less than its share
        ([Task(1, 2, 4, ()), Task(0, 2, 4, (0,)), Task(1, 2, 4, (1,))], [1, 1, 2]),  # one after another
    ],
)
def test_tasks_at_once_share_processors(tasks: list[Task], ends: list[float]) -> None:
    assert [end for _, end in run_tasks(tasks, 2.0)] == pytest.approx(ends)


def test_calls_on_other_ranks_are_no_faster_where_all_share_two_processors() -> None:
    graph = ppo()

    def plan(second: int) -> ExecutionPlan:
        places = {first: CallLayout((first, first + 1), ParallelDims(dp_shard=2)) for first in (0, 2)}
        moved = ("critic_inference", "critic_train")
        return ExecutionPlan("", {call.name: places[second * (call.name in moved)] for call in graph.calls})

    apart, shared = (SharedSimulator(graph, Simple(), 4, processors=number) for number in (0.0, 2.0))
    assert apart.measure(plan(2))[0] < apart.measure(plan(0))[0]
    assert shared.run(plan(0)).seconds == pytest.approx(apart.run(plan(0)).seconds)
    assert shared.measure(plan(2))[0] == pytest.approx(shared.measure(plan(0))[0], rel=0.05)
