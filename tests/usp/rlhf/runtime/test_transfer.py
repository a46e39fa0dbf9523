"""Every rank receives the inputs of its calls, each value once, from the rank that produced it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from usp.parallel import ParallelDims
from usp.rlhf.graph import KeyKind
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.runtime.transfer import TransferEnd, message_bytes, plan_transfer
from usp.rlhf.samples import balance

KINDS = {
    "tokens": KeyKind(torch.int64, "tokens"),
    "mask": KeyKind(torch.float32, "tokens"),
    "finished": KeyKind(torch.bool, ""),
}


@st.composite
def ends(draw: st.DrawFn, keys: tuple[str, ...], weights: list[int]) -> TransferEnd:
    degrees = {axis: draw(st.integers(1, 2)) for axis in ("pp", "dp_shard", "ring", "tp")}
    dims = ParallelDims(**degrees)  # type: ignore[arg-type]
    number = degrees["pp"] * degrees["dp_shard"] * degrees["ring"] * degrees["tp"]
    ranks = draw(st.lists(st.integers(0, 19), min_size=number, max_size=number, unique=True))
    return TransferEnd(CallLayout(tuple(sorted(ranks)), dims), balance(range(len(weights)), weights, dims.batch), keys)


@pytest.mark.slow
@given(st.data())
def test_each_rank_receives_exactly_the_inputs_that_it_lacks(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    producer = data.draw(ends(tuple(KINDS), lengths))
    takes = st.lists(st.sampled_from([*KINDS, "given"]), unique=True).map(tuple)
    consumers = [data.draw(ends(data.draw(takes), lengths)) for _ in range(data.draw(st.integers(0, 3)))]
    late = data.draw(st.integers(0, len(consumers)))
    plans = [plan_transfer(producer, consumers[:late]), plan_transfer(producer, consumers[late:], consumers[:late])]
    made = {
        rank: {(key, i) for key in KINDS for i in ids}
        for rank, ids in zip(producer.layout.leaders, producer.ids, strict=True)
    }
    held = {rank: set(made.get(rank, ())) for rank in range(20)}
    for plan in plans:
        for (source, target), message in plan.items():
            assert message
            assert made[source].issuperset(message)
            assert held[target].isdisjoint(message)
            held[target].update(message)
    for rank, values in held.items():
        wanted = {
            (key, i)
            for end in consumers
            if rank in end.layout.ranks
            for key in end.keys
            if key in KINDS
            for i in end.ids[end.layout.number_of(rank)]
        }
        assert values - made.get(rank, set()) == wanted - made.get(rank, set())


def test_bytes_of_a_message() -> None:
    one, two = CallLayout((0,), ParallelDims(dp_shard=1)), CallLayout((0, 1), ParallelDims(dp_shard=1, tp=2))
    keys = tuple(KINDS)
    messages = plan_transfer(TransferEnd(one, ((0, 1),), keys), [TransferEnd(two, ((0, 1),), keys)])
    assert messages.keys() == {(0, 1)}
    assert message_bytes(messages[0, 1], KINDS, {"tokens": [3, 5]}) == (3 + 5) * (8 + 4) + 2
