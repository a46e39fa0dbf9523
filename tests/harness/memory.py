"""Measurement of the memory that a block of code allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


@dataclass
class MemoryUse:
    """Bytes of tensor storage allocated since the start of the block; set when the block ends.

    Attributes:
        peak_bytes: maximum at any time.
        current_bytes: amount at the end.
        largest_bytes: largest single allocation; None on CUDA, whose allocator does not report it.
    """

    peak_bytes: int = 0
    current_bytes: int = 0
    largest_bytes: int | None = None


@contextmanager
def track_memory(device: torch.device | str = "cpu") -> Iterator[MemoryUse]:
    """Measure all allocations on `device` inside the block.

        with track_memory() as memory:
            step()
        print(memory.peak_bytes)

    On the CPU, torch's profiler records the allocations of this thread and of the backward passes it starts, including
    temporaries inside operators and resized storages; freeing storage allocated before the block is ignored. On CUDA,
    the caching allocator's statistics are used: its peak is reset, and freeing earlier storage does count.
    """
    use = MemoryUse()
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield use
        use.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        use.current_bytes = torch.cuda.memory_allocated(device) - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield use
    assert profiler.profiler is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    use.peak_bytes, use.current_bytes, use.largest_bytes = _replay(_allocations(roots))


def least_peak(prepared: Callable[[], Callable[[], object]], enough: list[float]) -> int:
    """Return the least peak of up to ten runs of what `prepared` returns each time. Collective over all ranks.

    gloo's threads let go of what they have sent some time after it has arrived, at times so late that a run's peak
    holds it. Once no rank is above its entry of `enough`, there are no more runs.
    """
    peaks: list[int] = []
    for _ in range(10):
        run = prepared()
        with track_memory() as memory:
            run()
        peaks.append(memory.peak_bytes)
        above = torch.tensor(float(min(peaks) > enough[dist.get_rank()]))
        dist.all_reduce(above)
        if not above:
            break
    return min(peaks)


def _allocations(roots: Iterable) -> list[tuple[int, int]]:
    """Return (address, bytes) of every CPU allocation in order of time; releases have negative bytes."""
    found, events = [], list(reversed(list(roots)))
    while events:
        event = events.pop()
        events += reversed(event.children)  # in call order, for events with equal timestamps
        fields = event.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation) and fields.device.type == "cpu":
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda item: item[0])]


def _replay(allocations: Iterable[tuple[int, int]]) -> tuple[int, int, int]:
    """Return peak, final and largest bytes, ignoring releases of addresses that were not allocated inside."""
    live: dict[int, int] = {}
    current = peak = largest = 0
    for address, nbytes in allocations:
        if nbytes > 0:
            live[address] = nbytes
            current += nbytes
            peak, largest = max(peak, current), max(largest, nbytes)
        else:
            current -= live.pop(address, 0)
    return peak, current, largest
