"""Communication over one mesh axis, with a count of the bytes sent and of the time in which a rank waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

# Before torch 2.13 they have other names, at which it warns.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Exposed:
    """The time in which a rank's computation waits for messages: on a CPU that of the calls, on a GPU that of the
    stream, between two events."""

    def __init__(self, device_type: str) -> None:
        self._on_stream, self._seconds = device_type == "cuda", 0.0
        self._events: list[tuple[Any, Any]] = []

    def wait(self, works: list[dist.Work]) -> None:
        if not self._on_stream:
            begin = time.perf_counter()
            for work in works:
                work.wait()
            self._seconds += time.perf_counter() - begin
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        for work in works:
            work.wait()
        events[1].record()
        self._events.append(events)

    def take(self) -> float:
        """Return the seconds since the last call. The stream must have been synchronized."""
        seconds = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self._seconds, self._events = 0.0, []
        return seconds


@dataclass
class Pending:
    """Messages in flight. Call `wait` before reading a received tensor or writing to a sent one."""

    works: list[dist.Work] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # send buffers must outlive the transfer
    exposed: Exposed | None = None

    def wait(self) -> None:
        if self.exposed is not None and self.works:
            self.exposed.wait(self.works)
        else:
            for work in self.works:
                work.wait()
        self.works, self.tensors = [], []


class Channel:
    """A process group of one axis, with a count of the payload bytes that this rank has sent to other ranks.

    `group` is None for a single rank, which never communicates. `exposed` counts the time of waits if it is set.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.sent_bytes = 0
        self.exposed: Exposed | None = None

    def post(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Pending:
        """Start point-to-point messages, given as (peer's rank in the group, contiguous tensor), without blocking.

        Messages between two ranks are matched in the order of posting, so all ranks must post in the same order.
        """
        if not sends and not receives:
            return Pending()
        assert self.group is not None
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        return Pending(post_messages(self.group, sends, receives), [tensor for _, tensor in sends], self.exposed)

    def post_all_to_all(self, x: Tensor, send_splits: list[int], receive_splits: list[int]) -> tuple[Tensor, Pending]:
        """Start to split flat `x` by `send_splits` (elements per rank); return where the parts sent to this rank
        arrive, in rank order."""
        received = x.new_empty(sum(receive_splits))
        work = post_exchange(self.group, received, x, receive_splits, send_splits)
        self.sent_bytes += (x.numel() - send_splits[self.rank]) * x.element_size()
        return received, Pending([work], [x], self.exposed)

    def all_to_all(self, x: Tensor, send_splits: list[int], receive_splits: list[int]) -> Tensor:
        """Do `post_all_to_all` and wait for it."""
        received, pending = self.post_all_to_all(x, send_splits, receive_splits)
        pending.wait()
        return received

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the x of all ranks, (ranks, *x.shape)."""
        assert self.group is not None
        every = gather_rows(x, self.group)
        self.sent_bytes += x.nbytes * (self.size - 1)
        return every.unflatten(0, (self.size, -1))

    def combine(self, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce the x (n, ...) of all ranks by `reduce`, (ranks, m, ...) -> (m, ...), bitwise alike on all of them.

        Each rank reduces its `combined_shares` of the n and sends the results to the others.
        """
        sizes = [share * x[0].numel() for share in combined_shares(len(x), self.size)]
        own = sizes[self.rank]
        parts = self.all_to_all(x.reshape(-1), sizes, [own] * self.size)
        reduced = reduce(parts.view(self.size, own // x[0].numel(), *x.shape[1:]))
        return self.all_to_all(reduced.reshape(-1).repeat(self.size), [own] * self.size, sizes).view_as(x)


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of x of all ranks of a group, (ranks * n, ...) of (n, ...)."""
    every = x.new_empty(group.size() * len(x), *x.shape[1:])
    all_gather(every, x.contiguous(), group=group)
    return every


def combined_shares(n: int, ranks: int) -> list[int]:
    """Return how many of n rows each rank reduces in `Channel.combine`."""
    return [n // ranks + (rank < n % ranks) for rank in range(ranks)]


def post_messages(
    group: dist.ProcessGroup, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
) -> list[dist.Work]:
    """Post messages together, as `dist.batch_isend_irecv` does, without its objects and checks for each message."""
    device = (sends or receives)[0][1].device
    together = type(group) is dist.ProcessGroup and group._get_backend(device).supports_coalescing
    if together:
        group._start_coalescing(device)
    works = [group.send([tensor], peer, 0) for peer, tensor in sends]
    works += [group.recv([tensor], peer, 0) for peer, tensor in receives]
    return [group._end_coalescing(device)] if together else works


def post_exchange(
    group: dist.ProcessGroup | None, received: Tensor, x: Tensor, receive_splits: list[int], send_splits: list[int]
) -> Any:
    """Post an all-to-all."""
    return dist.all_to_all_single(received, x, receive_splits, send_splits, group=group, async_op=True)


def named(name: str, *values: object) -> AbstractContextManager[object]:
    """Label what runs inside in profiler traces with `name`, formatted with `values`; free without a profiler."""
    return record_function(name.format(*values)) if torch.autograd._profiler_enabled() else nullcontext()
