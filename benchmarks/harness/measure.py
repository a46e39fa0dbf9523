"""Measuring: systems on the same ranks in turns, the bytes they send, their peak memory, and calls on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parallel.testing import count_sent_bytes


@dataclass(frozen=True)
class Runner:
    """One system on one rank: its attention, its part of q, k, v and dout, and how it cuts a global tensor."""

    attention: Callable[..., Tensor]
    shard: Callable[[Tensor], Tensor]
    inputs: tuple[Tensor, ...]
    dout: Tensor
    threads: int = 1

    @staticmethod
    def make(attention: Callable[..., Tensor], shard: Callable[[Tensor], Tensor], whole: Sequence[Tensor]) -> Runner:
        q, k, v, dout = (shard(x).contiguous() for x in whole)
        return Runner(attention, shard, tuple(x.requires_grad_() for x in (q, k, v)), dout)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attention(*self.inputs, causal=True)

    def free_gradients(self) -> None:
        for x in self.inputs:
            x.grad = None

    def step(self) -> list[Tensor]:
        """Forward and backward: out, dq, dk, dv."""
        self.free_gradients()
        out = self.attention(*self.inputs, causal=True)
        out.backward(self.dout)
        return [out.detach(), *(x.grad for x in self.inputs if x.grad is not None)]


def time_in_turns(
    runners: dict[str, Runner | None], warmups: int, iterations: int
) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """(start, end) in ns of every timed call, by system and kind. No system is always the first of a round."""
    spans: dict[str, dict[str, list[tuple[int, int]]]] = {name: {"forward": [], "step": []} for name in runners}
    names = sorted(runners)
    for round_ in range(warmups + iterations):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            runner = runners[name]
            for kind in ("forward", "step"):
                dist.barrier()
                if runner is None:
                    continue
                torch.set_num_threads(runner.threads)
                start = time.perf_counter_ns()  # one clock for all processes of a machine
                getattr(runner, kind)()
                end = time.perf_counter_ns()
                torch.set_num_threads(1)
                if round_ >= warmups:
                    spans[name][kind].append((start, end))
    dist.barrier()
    return spans


def sent_bytes(runner: Runner) -> dict[str, int]:
    """Bytes that this rank sends to others, counted below the libraries."""
    with count_sent_bytes() as forward:
        runner.forward()
    with count_sent_bytes() as step:
        runner.step()
    return {"forward": forward.total, "step": step.total}


def peak_bytes(runner: Runner) -> int:
    """Most bytes that were allocated at one time during a step, beyond what was there before."""
    runner.free_gradients()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        runner.step()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@dataclass(frozen=True)
class Clock:
    """Times calls on a device, until the run's time is up."""

    device: torch.device
    deadline: float

    def milliseconds(self, fn: Callable[[], Any], repeats: int = 10) -> float:
        """Median time of a call, after two that warm up."""
        times = []
        for index in range(2 + repeats):
            self.synchronize()
            start = time.perf_counter()
            fn()
            self.synchronize()
            if index >= 2:
                times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2] * 1e3

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def expired(self) -> bool:
        return time.monotonic() > self.deadline
