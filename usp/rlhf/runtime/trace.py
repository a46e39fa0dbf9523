"""Views of a timeline: tables, and a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from usp.run.tables import Grid

from .timeline import Activity, Event, activities, bounds, covered, critical_path

_SHOWN = ("kind", "step", "sent", "received", "minimum", "crossed", "host_minimum")  # of an event, in a trace
_SHORT = 0.005  # of a step: shorter parts of the critical path are listed as one


@dataclass(frozen=True)
class Total:
    """Work of one kind and name in a step, averaged over steps."""

    kind: str
    name: str
    seconds: float  # in which at least one rank works on it
    deviation: float  # their standard deviation over steps
    share: float  # of the steps' seconds
    waiting: float  # seconds that its first rank waits for the last to arrive
    bytes: int  # received by all ranks
    minimum: int  # the least that they need
    crossed: int = 0  # of these bytes, received from other hosts
    host_minimum: int = 0  # the least that hosts need

    @property
    def ratio(self) -> float | None:
        """Ratio of bytes to the minimum; None if nothing needs to move."""
        return self.bytes / self.minimum if self.minimum else None


def shown(events: Sequence[Event]) -> list[Event]:
    """Return the transfers clipped to begin when the first sender does: receives are posted long before."""
    transfers = [event for event in events if event.kind == "transfer"]
    first: dict[tuple[int, str], float] = {}
    for event in transfers:
        if event.sent:
            key = (event.step, event.name)
            first[key] = min(event.start, first.get(key, event.start))
    begins = [max(event.start, first.get((event.step, event.name), event.start)) for event in transfers]
    return [replace(event, start=min(begin, event.end)) for event, begin in zip(transfers, begins, strict=True)]


def totals(events: Sequence[Event]) -> list[Total]:
    """Return a `Total` for each kind and name, ordered by first start."""
    of_step = by_step(events)
    length = sum(map(_length, of_step.values())) or 1.0
    by_start = sorted(events, key=lambda event: (event.kind == "wait", event.start))
    rows = []
    for key in dict.fromkeys((event.kind, event.name) for event in by_start):
        steps = [[a for a in step if (a.event.kind, a.event.name) == key] for step in of_step.values()]
        if key[0] == "wait" and not any(steps):  # for transfers, which have rows of their own
            continue
        alike = [event for event in events if (event.kind, event.name) == key]
        seconds = [covered(step) for step in steps]
        waits = [max((activity.waiting for activity in step), default=0.0) for step in steps]
        sizes = (
            sum(getattr(event, name) for event in alike) // len(steps)
            for name in ("received", "minimum", "crossed", "host_minimum")
        )
        rows.append(Total(*key, mean(seconds), pstdev(seconds), sum(seconds) / length, mean(waits), *sizes))
    return rows


def by_step(events: Sequence[Event]) -> dict[int, list[Activity]]:
    """Return the activities of each step."""
    of_step: dict[int, list[Activity]] = {step: [] for step in sorted({event.step for event in events})}
    for activity in activities(events):
        of_step[activity.event.step].append(activity)
    return of_step


def _length(step: Sequence[Activity]) -> float:
    begin, end = bounds(step)
    return end - begin


def summary_table(events: Sequence[Event]) -> Grid:
    """Return the totals of one or more steps as a table to print."""
    lengths = {step: _length(found) for step, found in by_step(events).items()}
    steps, average, several = list(lengths), mean(lengths.values()), len(lengths) > 1
    title = f"{len({event.rank for event in events})} ranks: {average:.3f} s"
    if several:
        title = f"mean of {len(steps)} steps, {steps[0]} to {steps[-1]}, {title}"
        title = f"{title}, standard deviation {pstdev(lengths.values()):.3f} s"
    else:
        title = f"step {steps[0]}, {title}"
    times = ("work (s)", *(("deviation",) if several else ()), "of step", "wait before (s)")
    rows = []
    for row in totals(events):
        moved = (f"{row.bytes:,}", f"{row.minimum:,}") if row.bytes or row.minimum else ("", "")
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        deviation = (f"{row.deviation:.3f}",) if several else ()
        seconds = (f"{row.seconds:.3f}", *deviation, f"{row.share:.1%}", f"{row.waiting:.3f}")
        crossed = (f"{row.crossed:,}", f"{row.host_minimum:,}") if row.crossed or row.host_minimum else ("", "")
        rows.append((row.kind, row.name, *seconds, *moved, ratio, *crossed))
    columns = ("kind", "name", *times, "bytes", "minimum", "ratio", "between hosts", "minimum")
    return Grid(title, columns, tuple(rows))


def rank_table(number: int, step: Sequence[Activity]) -> Grid:
    """Return what every rank did with the time of a step as a table to print."""
    rows, length = [], _length(step)
    for rank in sorted({each.event.rank for each in step}):
        own = [each for each in step if each.event.rank == rank]
        work, waiting = sum(each.work for each in own), sum(each.waiting for each in own)
        seconds = (f"{value:.3f}" for value in (work, waiting, length - work - waiting))
        rows.append((str(rank), *seconds, f"{1 - work / length if length else 0:.1%}"))
    columns = ("rank", "work (s)", "waiting (s)", "no operation (s)", "idle")
    return Grid(f"step {number}: each rank", columns, tuple(rows))


def path_table(number: int, step: Sequence[Activity]) -> Grid:
    """Return the critical path of a step as a table to print, in order of time."""
    length, path = _length(step), critical_path(step)
    long = [part for part in path if part.seconds >= _SHORT * length]
    lines = [(str(part.rank), part.kind, part.name, part.seconds) for part in long]
    if len(long) < len(path):
        rest = sum(part.seconds for part in path) - sum(part.seconds for part in long)
        lines.append(("", "", f"{len(path) - len(long)} parts below {_SHORT:.1%}", rest))
    rows = ((*texts, f"{took:.3f}", f"{took / length:.1%}" if length else "") for *texts, took in lines)
    return Grid(f"step {number}: critical path", ("rank", "kind", "name", "seconds", "of step"), tuple(rows))


def write_chrome_trace(events: Sequence[Event], path: Path) -> None:
    """Write a JSON trace with one process per rank; waiting is a slice of its own, transfers are a second thread."""
    records: list[dict[str, Any]] = []

    def add(event: Event, name: str, kind: str, start: float, end: float, thread: int = 0) -> None:
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6, "args": {key: getattr(event, key) for key in _SHOWN}}
        records.append({"ph": "X", "name": name, "cat": kind, "pid": event.rank, "tid": thread, **times})

    for rank in sorted({event.rank for event in events}):
        records.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(("operations", "transfers")):
            records.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for activity in activities(events):
        event, last = activity.event, activity.last
        if activity.waiting:
            name = f"wait for {event.name}" if last == event.rank else f"{event.name}: wait for rank {last}"
            add(event, name, "waiting", activity.start, activity.begin)
        if activity.work or not activity.waiting:
            add(event, event.name, event.kind, activity.begin, activity.end)
    for event in shown(events):
        add(event, event.name, event.kind, event.start, event.end, thread=1)
    path.write_text(json.dumps({"traceEvents": records}), encoding="utf-8")
