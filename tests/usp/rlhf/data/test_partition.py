"""Samples are partitioned into whole, balanced units."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from usp.rlhf.samples import batch_violation, mini_batch_ids, partition


@given(st.data())
def test_each_sample_is_assigned_once_with_its_unit_and_mini_batches_are_balanced(data: st.DataObject) -> None:
    unit, parts, mini_batches = (data.draw(st.integers(1, most)) for most in (3, 6, 3))
    units = data.draw(st.integers(mini_batches, 20))
    weights = data.draw(st.lists(st.integers(1, 50), min_size=units * unit, max_size=units * unit))
    assert not batch_violation(len(weights), mini_batches, unit)
    found = partition(weights, parts, mini_batches, unit)
    for number in range(mini_batches):
        batch = mini_batch_ids(len(weights), mini_batches, number, unit)
        shares = [part[number] for part in found]
        assert sorted(i for share in shares for i in share) == list(batch)
        assert all(list(share) == sorted(share) for share in shares)
        for share in shares:
            assert all(share[k] // unit == share[k - k % unit] // unit for k in range(len(share)))
        loads = [sum(weights[i] for i in share) for share in shares]
        heaviest = max(sum(weights[i : i + unit]) for i in range(batch.start, batch.stop, unit))
        assert max(loads) - min(loads) <= heaviest
        assert sum(map(bool, shares)) == min(parts, len(batch) // unit)


def test_batches_that_cannot_be_split() -> None:
    assert "7 samples must be a multiple of 2, the samples that stay on one rank" in batch_violation(7, 1, 2)
    assert "would leave 1 empty: use mini_batches=3 or fewer" in batch_violation(6, 4, 2)
