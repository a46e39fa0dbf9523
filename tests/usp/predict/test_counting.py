"""The counters of a dry run, one by one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from usp.attention import band_pairs
from usp.predict.fake_world import HostMemory
from usp.predict.meter import ACTIVATIONS, PARAMETERS, TRANSIENT, LiveMemory, StepMeter

MIB = 2**20


def mib(number: int) -> torch.Tensor:
    return torch.empty(number * MIB, dtype=torch.uint8)


def test_storage_counts_until_its_last_view_is_gone() -> None:
    memory = LiveMemory(HostMemory())
    x = mib(3)
    view = x[MIB:]
    memory.see([x, view])
    assert memory.current_bytes == 3 * MIB
    del x
    assert memory.current_bytes == 3 * MIB
    del view
    assert (memory.current_bytes, memory.peak_bytes) == (0, 3 * MIB)


def test_resized_storage_counts_with_its_new_size() -> None:
    memory, x = LiveMemory(HostMemory()), mib(4)
    memory.see([x])
    with memory.following_resizes():
        x.untyped_storage().resize_(0)
        assert memory.current_bytes == 0
        x.untyped_storage().resize_(5 * MIB)
    assert (memory.current_bytes, memory.peak_bytes) == (5 * MIB, 5 * MIB)


def test_offloaded_storage_counts_on_the_host() -> None:
    host = HostMemory()
    memory, x = LiveMemory(host), mib(4)
    memory.see([x])
    memory.offload([x])
    memory.label([x], PARAMETERS)  # not of the device
    assert (memory.current_bytes, memory.peak_bytes, host.current_bytes) == (0, 4 * MIB, 4 * MIB)
    del x
    assert (memory.current_bytes, host.current_bytes, host.peak_bytes) == (0, 0, 4 * MIB)


def test_shapes_on_the_meta_device_have_no_memory() -> None:
    with FakeTensorMode(), StepMeter(HostMemory()) as meter:
        shape, x = torch.empty(MIB, device="meta"), torch.empty(MIB)
        kept = (shape, torch.empty_like(x, device="meta"), x)
        assert (meter.memory.current_bytes, meter.memory.peak_bytes) == (4 * MIB, 4 * MIB), kept


def test_the_peak_by_category_follows_later_labels() -> None:
    memory = LiveMemory(HostMemory())
    kept, before = mib(2), memory.now
    memory.see([kept])
    gone = mib(7)
    memory.see([gone])
    del gone
    later = mib(1)
    memory.see([later])
    memory.label([kept], PARAMETERS)
    memory.label_since(before, ACTIVATIONS)  # does not change earlier labels
    assert {name: nbytes for name, nbytes in memory.at_peak.items() if nbytes} == {
        PARAMETERS: 2 * MIB,
        TRANSIENT: 7 * MIB,
    }
    memory.restart()
    assert memory.peak_bytes == 3 * MIB and memory.at_peak[ACTIVATIONS] == MIB


def test_pairs_in_a_band() -> None:
    for rows, columns, left, right in itertools.product(range(1, 6), range(1, 6), range(-1, 6), range(-1, 6)):
        corner = columns - rows
        seen = [
            (left < 0 or i + corner - left <= j) and (right < 0 or j <= i + corner + right)
            for i in range(rows)
            for j in range(columns)
        ]
        limits = None if right < 0 else -right, None if left < 0 else left
        assert band_pairs(rows, columns, corner, *limits) == sum(seen)


def test_integers_and_scalars_are_known_if_their_inputs_are() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), StepMeter(HostMemory()):
        boundaries = torch.tensor([[0, 3, 7]])
        assert boundaries.diff().tolist() == [[3, 4]]
        assert (torch.arange(6) % 2 == 1).nonzero().flatten().tolist() == [1, 3, 5]
        steps = torch.zeros(())
        steps += 1
        assert steps.item() == 1.0
        weights = torch.randn(1000)
        assert weights.norm().item() == 1.0  # unknown
        steps += weights.sum()
        assert (steps * 5).item() == 1.0
        with pytest.raises(NotImplementedError, match="control flow depends on a data-dependent value"):
            bool((weights > 0).any())
        with pytest.raises(NotImplementedError, match=r"nonzero.* depends on a data-dependent value"):
            (weights > 0).nonzero()


def test_experts_are_chosen_evenly() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), StepMeter(HostMemory()):
        _, chosen = torch.rand(6, 8).topk(2, dim=-1)
        assert chosen[:2].tolist() == [[0, 1], [2, 3]]
        assert torch.bincount(chosen.flatten(), minlength=8).tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
