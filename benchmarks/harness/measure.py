"""Measurements: alternating timings of systems on the same ranks, bytes sent, peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.memory import track_memory
from usp.attention import Exposed
from usp.parallel.wire import SentBytes
from usp.predict.calibrate import Plan, contents, measure

T = TypeVar("T")


@dataclass(frozen=True)
class Runner:
    """One system on one rank: its attention, its shards of q, k, v and dout, and how it shards a global tensor."""

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
        """Run forward and backward; return out, dq, dk, dv."""
        self.free_gradients()
        out = self.attention(*self.inputs, causal=True)
        out.backward(self.dout)
        return [out.detach(), *(x.grad for x in self.inputs if x.grad is not None)]


Spans = list[tuple[int, int]]  # (start, end) of each timed call in ns


def calibrated(plan: Plan, name: str, attempts: int = 4) -> dict[str, Any]:
    """Return a hardware file's values, measured again where other work disturbs it, which every rank finds alike.

    Raises:
        ValueError: as `contents`, if it disturbs every attempt.
    """
    for _ in range(attempts - 1):
        try:
            return contents(plan, name, measure(plan))
        except ValueError as error:
            if dist.get_rank() == 0:
                print(f"{error}: again", flush=True)
    return contents(plan, name, measure(plan))


def in_turns(names: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, name) for every name in every round, each round starting with another name."""
    for round_ in range(rounds):
        first = round_ % len(names)
        yield from ((round_, name) for name in (*names[first:], *names[:first]))


def time_in_turns(
    runners: dict[str, Runner | None], warmups: int, iterations: int, exposed: Mapping[str, Exposed]
) -> dict[str, dict[str, Any]]:
    """Return the spans of all timed calls, by system and kind, and as `exposed` the milliseconds in which each step
    waited for messages, of the systems that measure them. Ranks without a runner wait for those that have one."""
    spans: dict[str, dict[str, Any]] = {name: {"forward": [], "step": [], "exposed": []} for name in runners}
    for round_, name in in_turns(sorted(runners), warmups + iterations):
        runner = runners[name]
        for kind in ("forward", "step"):
            dist.barrier()
            if runner is None:
                continue
            torch.set_num_threads(runner.threads)
            start = time.perf_counter_ns()  # all processes of a machine share this clock
            getattr(runner, kind)()
            end = time.perf_counter_ns()
            torch.set_num_threads(1)
            waited = exposed[name].take() if name in exposed else 0.0
            if round_ >= warmups and kind == "step":
                spans[name]["exposed"].append(waited * 1e3)
            if round_ >= warmups:
                spans[name][kind].append((start, end))
    dist.barrier()
    return spans


def median_milliseconds(spans_by_rank: Iterable[Spans]) -> float:
    """Return the median time of a call, from the first rank's start to the last rank's end."""
    calls = zip(*spans_by_rank, strict=True)
    return statistics.median(max(end for _, end in call) - min(start for start, _ in call) for call in calls) / 1e6


def sent_bytes(runner: Runner) -> dict[str, int]:
    """Return the bytes that this rank sends to others, counted below the libraries."""
    with SentBytes() as forward:
        runner.forward()
    with SentBytes() as step:
        runner.step()
    return {"forward": forward.total, "step": step.total}


def peak_bytes(runner: Runner) -> int:
    """Return the peak of the memory allocated during a step."""
    runner.free_gradients()
    with track_memory() as use:
        runner.step()
    return use.peak_bytes
