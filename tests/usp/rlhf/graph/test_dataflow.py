"""Edges from keys, and everything that is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.usp.rlhf.toy import ppo
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Compute, Generate, Inference, ModelCall, TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import key_kinds


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
    assert ("actor_train", "actor_generate") in graph.carried
    assert not any(call.startswith(("ref", "reward")) for _, call in graph.carried)


def test_a_step_trains_with_the_weights_that_its_other_calls_read() -> None:
    late = ModelCall("late", "actor", Inference("logprobs"), ("tokens",), ("late_logprobs",))
    graph = replace(ppo(), calls=(*ppo().calls, late))
    assert "late" in graph.before("actor_train")
    assert "late" not in graph.before("critic_train")


def test_everything_wrong_is_said_at_once() -> None:
    train = ModelCall("t", "actor", TrainStep(None), ("x",))  # type: ignore[arg-type]
    calls = (
        *(function("a", "given", "x"), function("a", "y", "x given")),
        ModelCall("g", "judge", Generate(), ("prompt_ids",), ("tokens",)),
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
        "call 'a' takes 'y', which nobody gives",
        "'g' has the unknown role 'judge': use actor, critic, ref, reward",
        "need the same group_size, but have [1, 2]",
        "role actor has 2 train steps",
        "train_step call 'u' gives ('z',), but a train step changes weights alone",
        "call 'odd' is a object: use Generate",
    ):
        assert part in str(caught.value)


def test_a_cycle_is_named() -> None:
    with pytest.raises(ValueError, match="calls wait for each other: b -> c -> b"):
        DataflowGraph((function("a", "", "x"), function("b", "x z", "y"), function("c", "y", "z")), ())


@given(st.data())
def test_an_order_puts_producers_first_and_each_call_as_early_as_it_can_be(data: st.DataObject) -> None:
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


def test_the_kind_of_every_value_is_known_beforehand() -> None:
    kinds = key_kinds(ppo())
    assert (kinds["score"].tokens, kinds["finished"].tokens) == ("", "")
    assert {kinds[key].tokens for key in ("tokens", "mask", "values", "advantages", "returns")} == {"tokens"}
    lost = function("f", "given", "x")
    with pytest.raises(ValueError, match="x: one entry per token, but of no tokens"):
        key_kinds(DataflowGraph((lost,), ("given",)))
    wrong = ModelCall("g", "actor", Generate(), ("given",), ("text",))
    with pytest.raises(ValueError, match=r"gives \['text'\], but can give only tokens, mask.*; .* must give tokens"):
        key_kinds(DataflowGraph((wrong,), ("given",)))
