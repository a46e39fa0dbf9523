"""How much memory a piece of a program takes, by the allocator's own account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class MemoryUse:
    """Bytes of live tensor storage beyond what was live at the start; known once the block has ended.

    Attributes:
        peak_bytes: the most at one time.
        current_bytes: at the end.
        largest_bytes: the largest single allocation; None on CUDA, whose allocator does not say.
    """

    peak_bytes: int = 0
    current_bytes: int = 0
    largest_bytes: int | None = None


@contextmanager
def track_memory(device: torch.device | str = "cpu") -> Iterator[MemoryUse]:
    """Account for every allocation on `device` inside the block, whoever makes it.

        with track_memory() as memory:
            step()
        print(memory.peak_bytes)

    On the CPU torch's profiler logs what the allocator does on this thread and in the backward passes that it starts:
    temporaries inside operators and FSDP2's resizing of storage included. Storage that was there before and is freed
    inside is not subtracted. On CUDA the caching allocator's statistics are used, and their peak is reset; there it is.
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


def _allocations(roots: Iterable) -> list[tuple[int, int]]:
    """(address, bytes) of every allocation on the CPU, negative for a release, in order of time."""
    found, events = [], list(reversed(list(roots)))
    while events:
        event = events.pop()
        events += reversed(event.children)  # in order of time, where the clock cannot tell
        fields = event.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation) and fields.device.type == "cpu":
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found, key=lambda item: item[0])]


def _replay(allocations: Iterable[tuple[int, int]]) -> tuple[int, int, int]:
    """Peak, final and largest bytes. Releases of addresses that were not allocated inside do not count."""
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
