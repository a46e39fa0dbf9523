"""The events of every rank on one clock (RUN/timeline/rank-N.jsonl, one event per line), and what they say of waiting:
how long each operation waits for its last rank, idle ranks, and the critical path.

An operation's event begins when its rank arrives. Its work begins when the last rank that it runs together with has
arrived; known afterwards, from the events of all ranks on one clock.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from usp.run.output import LineFile

FOLDER = "timeline"
_ROUNDS = 5  # of the clock measurement, because ranks may be late for some
_ALONE = ("release", "load", "offload")  # every rank for itself
BETWEEN = "between operations"


@dataclass
class Event:
    """One operation of a step on one rank.

    Attributes:
        kind: of an `Operation`, with "call" replaced by the call's kind (generate, inference, train_step, compute); or
            wait, for values from other ranks; or switch, of a change of plans after the step. Transfers overlap with
            other events: on a receiving rank they last from the post to the end of the wait, on other ranks until the
            post returns.
        start, end: seconds since the run began, on rank 0's clock. An event includes the time until all of the
            operation's ranks have arrived; `activity` tells waiting from work.
        sent, received: bytes that the operation moves between ranks, without communication inside a model.
        minimum: bytes that this rank lacked, so had to receive.
        group: ranks of an operation wait only for those with the same number.
        crossed: of a reallocation, bytes received from other hosts.
        host_minimum: bytes that no rank of this host had, and this one is its first to need: summed over ranks, the
            bytes that had to cross.
    """

    step: int
    rank: int
    kind: str
    name: str
    start: float
    end: float
    sent: int = 0
    received: int = 0
    minimum: int = 0
    group: int = 0
    crossed: int = 0
    host_minimum: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


def clock_offset(device: torch.device | str = "cpu") -> float:
    """Return what to subtract from `time.perf_counter()` to get seconds since this call on rank 0. Collective.

    Rank 0 reads its clock after this rank has begun a round, and before it ends it: that bounds how far the two clocks
    are apart. Where they may be one, as on a host, they are; otherwise the middle of the bounds is taken.
    """
    begin, least, most = 0.0, -math.inf, math.inf
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        together = torch.zeros(1, device=device)
        dist.all_reduce(together)
        together.item()  # synchronizes the device
        clock = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
        dist.broadcast(clock, src=0)
        first = clock.item()
        begin = begin or first
        least, most = max(least, started - first), min(most, time.perf_counter() - first)
    return begin if least <= 0 <= most else begin + (least + most) / 2


class Timeline:
    """Recorder of the events of this rank; `take` returns those of a step and appends them to the run's file."""

    def __init__(self, rank: int, offset: float, device: torch.device, folder: Path | None = None) -> None:
        self._rank, self._offset, self._device = rank, offset, device
        self.file = LineFile(folder / FOLDER / f"rank-{rank}.jsonl") if folder else None
        self._events: list[Event] = []
        self.step = 0

    def now(self) -> float:
        """Return seconds since the run began, after the device's computations; messages that were posted go on."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter() - self._offset

    @contextmanager
    def record(self, kind: str, name: str) -> Iterator[Event]:
        """Record the operation in the `with` block, which may fill in the bytes and the group."""
        event = self.begin(kind, name)
        yield event
        self.end(event)

    def begin(self, kind: str, name: str) -> Event:
        """Return an event that begins now; it is recorded when it ends."""
        start = self.now()
        return Event(self.step, self._rank, kind, name, start, start)

    def end(self, event: Event) -> None:
        """Record an event, which ends now."""
        event.end = self.now()
        self._events.append(event)

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last call, in the order of their ends."""
        events, self._events = tuple(self._events), []
        if self.file is not None:
            self.file.append(self.step, (json.dumps(asdict(event)) for event in events))
        return events


def read_events(run: Path, step: int | None = None) -> list[Event]:
    """Read the events of a run, for one step or all.

    For a step that ran twice, because the run resumed from an earlier checkpoint, only the last time counts.

    Raises ValueError if the run or its timeline does not exist, a line is not a valid event, or the step has no events.
    """
    if not run.is_dir():
        raise ValueError(f"{run} is not a run folder")
    paths = sorted((run / FOLDER).glob("rank-*.jsonl"))
    if not paths:
        raise ValueError(f"{run} has no timeline: {FOLDER}/rank-N.jsonl does not exist")
    names = {field.name for field in fields(Event)}
    needed = {field.name for field in fields(Event) if field.default is MISSING}
    expected = f"an event: expected the keys {', '.join(sorted(names))}"
    of_ranks = [[Event(**values) for values in read_lines(path, expected, needed, names)] for path in paths]
    events = [event for of_rank in of_ranks for event in _last_runs(of_rank)]
    chosen = [event for event in events if step in (None, event.step)]
    if not chosen:
        steps = sorted({event.step for event in events})
        recorded = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        raise ValueError(f"step {step} is not in the timeline of {run}, which has {recorded}")
    return chosen


def read_lines(path: Path, expected: str, needed: Set[str], known: Set[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a `LineFile`, with the keys `needed` and only `known` ones; skip a last line cut off.

    expected: what a line is, for messages.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line) if line.strip() else None
        except ValueError as error:
            if number == len(lines):  # the run was killed while writing
                return
            raise ValueError(f"{path}, line {number} is not {expected.partition(':')[0]}: {error}") from None
        if values is None:
            continue
        if not isinstance(values, dict) or not needed <= values.keys() <= (known or values.keys()):
            raise ValueError(f"{path}, line {number} is not {expected}")
        yield values


def _last_runs(events: list[Event]) -> list[Event]:
    """Drop the events of steps that ran again later: when the step number falls, the run has resumed."""
    last: list[Event] = []
    for event in events:
        if last and event.step < last[-1].step:
            last = [earlier for earlier in last if earlier.step < event.step]
        last.append(event)
    return last


@dataclass(frozen=True)
class Activity:
    """A part of a rank's step: first waiting for another rank, then work. Those of a rank do not overlap."""

    event: Event  # the operation; for an expected transfer, that of the transfer
    start: float  # when waiting begins
    begin: float  # when it ends, and work begins
    end: float
    last: int  # the rank waited for, which was the last to arrive; `event.rank` if nothing was waited for

    @property
    def waiting(self) -> float:
        return self.begin - self.start

    @property
    def work(self) -> float:
        return self.end - self.begin


def activities(events: Iterable[Event]) -> list[Activity]:
    """Return the activities of all ranks, in order of their starts.

    A transfer counts where a call waits for its values, from the last sender's post on. One that has arrived before it
    is needed cost its rank nothing, and has no activity.
    """
    together: dict[tuple[object, ...], list[Event]] = defaultdict(list)
    senders: dict[tuple[int, str], list[Event]] = defaultdict(list)
    expected: dict[tuple[int, int], list[Event]] = defaultdict(list)  # step, rank -> transfers, in order of arrival
    times: Counter[tuple[object, ...]] = Counter()  # that a rank has run an operation
    ordered = []
    for event in sorted(events, key=lambda event: event.end):
        if event.kind == "transfer":
            if event.sent:
                senders[event.step, event.name].append(event)
            if event.received:
                expected[event.step, event.rank].append(event)
            else:
                ordered.append(_after(event, event.start, event.end, ()))
            continue
        operation = (event.step, event.kind, event.name, event.group)
        times[event.rank, operation] += 1
        together[operation, times[event.rank, operation]].append(event)
    for alike in together.values():
        for event in alike:
            if event.kind == "wait":
                ordered += _awaited(event, expected[event.step, event.rank], senders)
            else:
                ordered.append(_after(event, event.start, event.end, () if event.kind in _ALONE else alike))
    return sorted(ordered, key=lambda activity: activity.start)


def _after(event: Event, start: float, end: float, others: Sequence[Event]) -> Activity:
    """Return an activity that works once the last of `others` has arrived; it cannot have waited for later ones."""
    last = max((other for other in others if other.start <= end), key=lambda other: other.start, default=event)
    if last.start <= start:
        return Activity(event, start, start, end, event.rank)
    return Activity(event, start, last.start, end, last.rank)


def _awaited(wait: Event, expected: Sequence[Event], senders: dict[tuple[int, str], list[Event]]) -> Iterator[Activity]:
    """Divide a wait into the transfers that arrived in it."""
    start = wait.start
    for transfer in expected:
        if start <= transfer.end <= wait.end:
            others = [sender for sender in senders[wait.step, transfer.name] if sender.rank != wait.rank]
            yield _after(transfer, start, transfer.end, others)
            start = transfer.end
    if start == wait.start:
        yield Activity(wait, start, wait.end, wait.end, wait.rank)


def critical_path(step: Sequence[Activity]) -> list[Event]:
    """Return the chain of operations that determined the length of a step, from its first start to its last end.

    Walks back from the last end: from work that began when another rank arrived to what that rank did before, and
    otherwise to what the same rank did before. The parts follow each other without a gap: work of a rank, its wait for
    a rank that is not known, or `BETWEEN` operations.
    """
    of_rank: dict[int, list[Activity]] = defaultdict(list)
    for activity in step:
        of_rank[activity.event.rank].append(activity)
    begin, at = bounds(step)
    number, rank = step[0].event.step, max(step, key=lambda activity: activity.end).event.rank
    path: list[Event] = []
    while at > begin:
        of_this_rank = of_rank[rank]
        before = bisect_left(of_this_rank, at, key=lambda activity: activity.start)
        ended = of_this_rank[before - 1].end if before else begin
        if ended < at:
            path.append(Event(number, rank, "", BETWEEN, ended, at))
        if not before:
            break
        activity, at = of_this_rank[before - 1], min(ended, at)
        handed_over = activity.last != rank and activity.begin < at
        start = activity.begin if handed_over else activity.start
        if start < at:
            path.append(Event(number, rank, activity.event.kind, activity.event.name, start, at))
        rank, at = activity.last if handed_over else rank, start
    return path[::-1]


def covered(activities: Iterable[Activity]) -> float:
    """Return the seconds in which at least one of the activities works."""
    total, reached = 0.0, float("-inf")
    for activity in sorted(activities, key=lambda activity: activity.begin):
        total += max(0.0, activity.end - max(activity.begin, reached))
        reached = max(reached, activity.end)
    return total


def bounds(step: Sequence[Activity]) -> tuple[float, float]:
    """Return the first start and the last end."""
    return min(activity.start for activity in step), max(activity.end for activity in step)
