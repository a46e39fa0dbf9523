"""Simulated steps of ranks that share processors: calls on other ranks at once take longer than each alone.

A rank that waits for another leaves the processors to the rest, and one that computes gets its share of them. So calls
that run at once divide the processors in proportion to their ranks, but none gets more than it uses alone; a call
proceeds at the part of that which it gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

from .simulator import Simulation, Simulator, Span


@dataclass(frozen=True)
class Task:
    """Work that begins once others have ended.

    Attributes:
        seconds: alone. used: processors that it keeps busy meanwhile. ranks: that it runs on.
        after: the indices of earlier tasks.
    """

    seconds: float
    used: float
    ranks: int
    after: tuple[int, ...]


def run_tasks(tasks: Sequence[Task], processors: float) -> list[tuple[float, float]]:
    """Return when each task begins and ends."""
    left = [task.seconds for task in tasks]
    begins, ends = [inf] * len(tasks), [inf] * len(tasks)
    now = 0.0
    while inf in ends:
        ready = True
        while ready:  # tasks that take no time end at once
            ready = False
            for index, task in enumerate(tasks):
                if begins[index] == inf and all(ends[other] <= now for other in task.after):
                    begins[index] = now
                    if not left[index]:
                        ends[index], ready = now, True
        running = [index for index in range(len(tasks)) if begins[index] <= now < ends[index]]
        speeds = dict(zip(running, _speeds([tasks[index] for index in running], processors), strict=True))
        step = min(left[index] / speed for index, speed in speeds.items())
        now += step
        for index, speed in speeds.items():
            left[index] -= step * speed
            if left[index] <= 1e-12 * tasks[index].seconds:
                ends[index] = now
    return list(zip(begins, ends, strict=True))


def _speeds(tasks: Sequence[Task], processors: float) -> list[float]:
    """Return the speed of tasks that run at once, relative to each alone."""
    found = [1.0] * len(tasks)
    left, ranks = processors, sum(task.ranks for task in tasks)
    for index in sorted(range(len(tasks)), key=lambda index: tasks[index].used / tasks[index].ranks):
        task = tasks[index]
        share = left * task.ranks / ranks
        found[index] = min(1.0, share / task.used) if task.used else 1.0
        left, ranks = left - min(share, task.used), ranks - task.ranks
    return found


@dataclass(frozen=True)
class SharedSimulator(Simulator):
    """A simulator whose calls share processors.

    Attributes:
        processors: that all ranks share; 0: each has a device.
    """

    processors: float = 0.0

    def run(self, plan: ExecutionPlan) -> Simulation:
        found = super().run(plan)
        if not self.processors:
            return found
        spans = tuple(self._shared(found.spans, plan))
        seconds = max(span.end for span in spans) / self.steps
        busy = [0.0] * self.world_size
        for span in spans:
            for rank in span.ranks:
                busy[rank] += (span.end - span.start) / self.steps
        return replace(found, seconds=seconds, spans=spans, idle=tuple(seconds - one for one in busy))

    def measure(self, plan: ExecutionPlan) -> tuple[float, float]:
        if not self.processors:
            return super().measure(plan)
        found = self.run(plan)
        return found.seconds, found.peak_bytes

    def used(self, call: str, layout: CallLayout) -> float:
        """Return the processors that a call keeps busy when it runs alone."""
        return min(len(layout.ranks), self.processors)

    def _shared(self, spans: Sequence[Span], plan: ExecutionPlan) -> Iterator[Span]:
        """Yield the spans, when calls share processors."""
        last: dict[int, int] = {}  # by rank: what it did last
        made: dict[str, int] = {}  # by call
        tasks, first = [], 0
        for index, span in enumerate(spans):
            if self.barrier and index and spans[index - 1].step < span.step:
                first = index
            after = {last[rank] for rank in span.ranks if rank in last} | set(range(first))
            used = min(len(span.ranks), self.processors)
            if span.name in plan.calls:
                call = self.graph[span.name]
                after |= {made[name] for name in self.graph.before(span.name) if name in made}
                made[span.name] = index
                used = self.used(call.name, plan[call.name])
            last |= dict.fromkeys(span.ranks, index)
            tasks.append(Task(span.end - span.start, used, len(span.ranks), tuple(after)))
        for span, (start, end) in zip(spans, run_tasks(tasks, self.processors), strict=True):
            yield replace(span, start=start, end=end)
