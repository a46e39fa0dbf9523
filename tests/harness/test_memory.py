"""Memory tracking is exact, and includes autograd and resized storages."""

from __future__ import annotations

import torch

from tests.harness.memory import MemoryUse, track_memory


def test_a_program_with_known_allocations() -> None:
    before = torch.empty(1000)
    with track_memory() as use:
        first = torch.empty(1000)  # 4,000 bytes
        second = torch.empty(500, dtype=torch.float64)  # 8,000 in all: the peak
        del first, before  # storage allocated before the block does not count
        second.untyped_storage().resize_(0)
        second.untyped_storage().resize_(16)
        x = torch.ones(10, 10, requires_grad=True)  # 400, and as much for its gradient
        x.square().sum().backward()
    assert use == MemoryUse(peak_bytes=8000, current_bytes=16 + 400 + 400, largest_bytes=4000)


def test_activations_saved_by_autograd_are_counted() -> None:
    def peak(layers: int) -> int:
        with track_memory() as use:
            x = torch.ones(1000, requires_grad=True)
            for _ in range(layers):
                x = x.sin()  # saves its input
        del x
        return use.peak_bytes

    assert peak(9) - peak(5) == 4 * 4000


def test_consecutive_blocks_are_independent() -> None:
    with track_memory():
        kept = torch.empty(1000)
    del kept
    reused = torch.empty(1000)  # probably at the same address
    with track_memory() as use:
        del reused
    assert use == MemoryUse(peak_bytes=0, current_bytes=0, largest_bytes=0)
