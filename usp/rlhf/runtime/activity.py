"""Waiting and work in a timeline: how long each operation waits for its last rank, idle ranks, and the critical path.

An operation's event begins when its rank arrives. Its work begins when the last rank that it runs together with has
arrived; known afterwards, from the events of all ranks on one clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .timeline import Event

_ALONE = ("release", "load", "offload")  # every rank for itself
BETWEEN = "between operations"


@dataclass(frozen=True)
class Activity:
    """A part of a rank's step: first waiting for another rank, then work. Those of a rank do not overlap.

    Attributes:
        event: the operation; for an expected transfer, that of the transfer.
        start, begin, end: it waits from `start` to `begin`, and works from `begin` to `end`.
        last: the rank waited for, which was the last to arrive; `event.rank` if nothing was waited for.
    """

    event: Event
    start: float
    begin: float
    end: float
    last: int

    @property
    def waiting(self) -> float:
        return self.begin - self.start

    @property
    def work(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class RankTime:
    """The seconds of a rank in a step of `whole` seconds, which begins on the first rank and ends on the last."""

    rank: int
    work: float
    waiting: float
    whole: float

    @property
    def between(self) -> float:
        """Seconds outside of all operations."""
        return self.whole - self.work - self.waiting

    @property
    def idle_share(self) -> float:
        """Fraction of the step without work."""
        return 1 - self.work / self.whole if self.whole else 0.0


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path: work of a rank, its wait for a rank that is not known, or `BETWEEN` operations."""

    rank: int
    kind: str
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def activities(events: Iterable[Event]) -> list[Activity]:
    """Return the activities of all ranks, in order of their starts.

    A transfer counts where a call waits for its values, from the last sender's post on. One that has arrived before it
    is needed cost its rank nothing, and has no activity.
    """
    together: dict[tuple[object, ...], list[Event]] = defaultdict(list)
    senders: dict[tuple[int, str], list[Event]] = defaultdict(list)
    expected: dict[tuple[int, int], list[Event]] = defaultdict(list)  # step, rank -> transfers, in order of arrival
    times: Counter[tuple[object, ...]] = Counter()  # that a rank has run an operation
    found = []
    for event in sorted(events, key=lambda event: event.end):
        if event.kind == "transfer":
            if event.sent:
                senders[event.step, event.name].append(event)
            if event.received:
                expected[event.step, event.rank].append(event)
            else:
                found.append(_alone(event))
            continue
        operation = (event.step, event.kind, event.name, event.group)
        times[event.rank, operation] += 1
        together[operation, times[event.rank, operation]].append(event)
    for alike in together.values():
        for event in alike:
            if event.kind in _ALONE:
                found.append(_alone(event))
            elif event.kind == "wait":
                found += _awaited(event, expected[event.step, event.rank], senders)
            else:
                found.append(_after(event, event.start, event.end, alike))
    return sorted(found, key=lambda activity: activity.start)


def _alone(event: Event) -> Activity:
    return Activity(event, event.start, event.start, event.end, event.rank)


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


def rank_times(step: Sequence[Activity]) -> list[RankTime]:
    """Return the times of every rank, ascending, from the activities of one step."""
    begin, end = bounds(step)
    return [
        RankTime(
            rank,
            sum(activity.work for activity in step if activity.event.rank == rank),
            sum(activity.waiting for activity in step if activity.event.rank == rank),
            end - begin,
        )
        for rank in sorted({activity.event.rank for activity in step})
    ]


def critical_path(step: Sequence[Activity]) -> list[PathPart]:
    """Return the chain of operations that determined the length of a step, from its first start to its last end.

    Walks back from the last end: from work that began when another rank arrived to what that rank did before, and
    otherwise to what the same rank did before. The parts follow each other without a gap.
    """
    of_rank: dict[int, list[Activity]] = defaultdict(list)
    for activity in step:
        of_rank[activity.event.rank].append(activity)
    begin, at = bounds(step)
    rank = max(step, key=lambda activity: activity.end).event.rank
    path: list[PathPart] = []
    while at > begin:
        own = of_rank[rank]
        before = bisect_left(own, at, key=lambda activity: activity.start)
        ended = own[before - 1].end if before else begin
        if ended < at:
            path.append(PathPart(rank, "", BETWEEN, ended, at))
        if not before:
            break
        activity, at = own[before - 1], min(ended, at)
        handed_over = activity.last != rank and activity.begin < at
        start = activity.begin if handed_over else activity.start
        if start < at:
            path.append(PathPart(rank, activity.event.kind, activity.event.name, start, at))
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
