"""Steps with delta updates have the bits of steps without them, and send less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.rlhf.test_numerics import ONCE, builder, given, plan_of, weights_of
from usp.parallel import ProcessGroups
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.graph import DataflowGraph
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.runtime.measure import SENT_BYTES, WHOLE_BYTES
from usp.rlhf.runtime.timeline import Event

STEPS, COLLECTED = 2, ("tokens", "logprobs", "old_logprobs")
# The metrics of each step, what rank 0 collected, this rank's reallocations in the last step, its weights.
Result = tuple[list[dict[str, float]], list[Tensor], list[Event], dict[str, Tensor]]


def run(plan_name: str, delta_updates: bool, groups: ProcessGroups) -> Result:
    graph = build_graph("grpo", replace(ONCE, old_logprobs="recompute"))
    trained: dict[str, RoleModel] = {}
    build = builder(trained, torch.bfloat16)
    plan = plan_of(plan_name, graph)
    executor = Executor(
        graph, plan, CopyOptions(groups, build, torch.device("cpu"), 2, delta_updates), collect=COLLECTED
    )
    metrics, collected = [], []
    for number in range(1, STEPS + 1):
        for model in trained.values():
            model.learning_rate = 1e-5
        result = executor.run_step(given("grpo", number), number, seed=number)
        metrics.append(result.metrics)
        if result.samples is not None:
            collected += [value for key in COLLECTED for value in result.samples[key]]
    # An evaluation fills copies as well, and the step after it starts from what that has left.
    trains = tuple(call for call in graph.calls if call.kind == "train_step")
    generate = DataflowGraph(graph.calls[:1], ("prompt_ids",), trains)
    places = {call.name: plan[call.name] for call in (*generate.calls, *trains)}
    alone = replace(plan, calls=places, offload=frozenset())
    evaluation = executor.another(generate, alone, collect=(), progress=lambda doing: None)
    evaluation.run_step(given("grpo", 1).only({"prompt_ids"}), 1, seed=1)
    result = executor.run_step(given("grpo", STEPS + 1), STEPS + 1, seed=1)
    metrics.append(result.metrics)
    return metrics, collected, [e for e in result.events if e.kind == "reallocate"], weights_of(trained)


def run_both(plan_name: str) -> tuple[Result, Result]:
    groups = ProcessGroups()
    return run(plan_name, False, groups), run(plan_name, True, groups)


@pytest.mark.parametrize(
    "plan_name", ["separation", pytest.param("generate tp4, train u2 r2", marks=pytest.mark.exhaustive)]
)
@pytest.mark.exhaustive  # sent to a server: ../generation/test_server.py
def test_delta_updates_change_only_the_bytes(ranks: RankPool, plan_name: str) -> None:
    results = ranks.run(run_both, 4, plan_name)
    for (metrics, collected, whole, weights), (of_deltas, others, events, same) in results:
        assert all(map(torch.equal, others, collected)) and len(others) == len(collected)
        sizes = [(step.pop(SENT_BYTES), step.pop(WHOLE_BYTES)) for step in of_deltas]
        assert of_deltas == metrics
        assert sizes[0][0] == sizes[0][1]
        assert all(sent < 0.6 * needed for sent, needed in sizes[1:])
        assert [event.name for event in events] == [event.name for event in whole]
        assert weights.keys() == same.keys() and all(torch.equal(weights[name], same[name]) for name in weights)
    moved = [[event for _, result in results for event in result[2]], [e for result, _ in results for e in result[2]]]
    sent, of_whole = (sum(event.sent for event in events) for events in moved)
    assert sent == sum(event.received for event in moved[0]) < 0.6 * of_whole
