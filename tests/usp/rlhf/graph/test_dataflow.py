"""Graph edges follow from keys; invalid graphs are rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.usp.rlhf.toy import ppo
from usp.rlhf.graph import Compute, DataflowGraph, Generate, Inference, ModelCall, TrainStep, key_kinds
from usp.rlhf.samples import Samples


def nothing(samples: Samples, reduce: object) -> Samples:
    return samples


def function(name: str, inputs: str = "", outputs: str = "") -> ModelCall:
    return ModelCall(name, "", Compute(nothing), tuple(inputs.split()), tuple(outputs.split()))


def test_ppo_starts_calls_early_and_trains_last() -> None:
    graph = ppo()
    assert [[call.name for call in level] for level in graph.levels] == [
        ["actor_generate"],
        ["ref_inference", "reward_inference", "critic_inference", "actor_inference"],
        ["advantages"],
        ["actor_train", "critic_train"],
    ]
    assert graph.roles == ("actor", "critic", "ref", "reward")
    assert graph.trained_roles == ("actor", "critic")
    assert set(graph.consumers("actor_generate")) == {c.name for c in graph.calls} - {"actor_generate"}


def test_a_train_step_waits_for_the_other_calls_of_its_role() -> None:
    late = ModelCall("late", "actor", Inference("logprobs"), ("tokens",), ("late_logprobs",))
    graph = replace(ppo(), calls=(*ppo().calls, late))
    assert "late" in graph.before("actor_train")
    assert "late" not in graph.before("critic_train")


def test_all_violations_are_reported_at_once() -> None:
    train = ModelCall("t", "actor", TrainStep(None), ("x",))  # type: ignore[arg-type]
    calls = (
        *(function("a", "given", "x"), function("a", "y", "x given")),
        ModelCall("g", "the judge", Generate(), ("prompt_ids",), ("tokens",)),
        ModelCall("h", "actor", Generate(group_size=2), ("given",), ("greedy_tokens",)),
        *(train, replace(train, name="u", outputs=("z",))),
        ModelCall("odd", "actor", object(), ()),  # type: ignore[arg-type]
    )
    with pytest.raises(ValueError) as caught:
        DataflowGraph(calls, ("given",))
    for part in (
        "2 calls are named 'a'",
        "key 'x' comes from a and a",
        "key 'given' comes from the step's given keys and a",
        "call 'a' reads 'y', which no call produces",
        "'g' has the role 'the judge': name the model",
        "must have the same group_size, got [1, 2]",
        "role actor has 2 train steps",
        "train_step call 'u' must not have outputs, got ('z',): a train step only changes weights",
        "call 'odd' is a object: use Generate",
    ):
        assert part in str(caught.value)


def test_cycles_are_reported() -> None:
    with pytest.raises(ValueError, match="calls wait for each other: b -> c -> b"):
        DataflowGraph((function("a", "", "x"), function("b", "x z", "y"), function("c", "y", "z")), ())


@pytest.mark.slow
@given(st.data())
def test_order_puts_producers_first_and_each_call_as_early_as_possible(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 8))
    inputs = [" ".join(f"k{m}" for m in range(n) if data.draw(st.booleans())) for n in range(number)]
    calls = [function(f"c{n}", keys, f"k{n}") for n, keys in enumerate(inputs)]
    graph = DataflowGraph(tuple(data.draw(st.permutations(calls))), ())
    level = {call.name: n for n, calls in enumerate(graph.levels) for call in calls}
    assert len(graph.order) == number
    for call in calls:
        assert level[call.name] == 1 + max((level[f"c{key[1:]}"] for key in call.inputs), default=-1)
        for key in call.inputs:
            assert call.name in graph.consumers(graph.producers[key])


def test_key_kinds_are_known_before_the_step() -> None:
    kinds = key_kinds(ppo())
    assert (kinds["score"].tokens, kinds["finished"].tokens) == ("", "")
    assert {kinds[key].tokens for key in ("tokens", "mask", "values", "advantages", "returns")} == {"tokens"}
    lost = function("f", "given", "x")
    with pytest.raises(ValueError, match="x: per-token keys without tokens"):
        key_kinds(DataflowGraph((lost,), ("given",)))
    wrong = ModelCall("g", "actor", Generate(), ("given",), ("text",))
    with pytest.raises(ValueError, match=r"produces \['text'\], expected tokens, mask.*; .* must produce tokens"):
        key_kinds(DataflowGraph((wrong,), ("given",)))
