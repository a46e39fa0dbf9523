"""The events of every rank on one clock: RUN/timeline/rank-N.jsonl, one event per line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

from usp.run.output import LineFile

FOLDER = "timeline"
_ROUNDS = 5  # of the clock measurement, because ranks may be late for some


@dataclass(frozen=True)
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


@dataclass
class BytesMoved:
    """Bytes that an operation moves on this rank, and its group, filled in while it runs: see `Event`."""

    sent: int = 0
    received: int = 0
    minimum: int = 0
    group: int = 0
    crossed: int = 0
    host_minimum: int = 0


def clock_offset(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> float:
    """Return what to subtract from `time.perf_counter()` to get seconds since this call on rank 0. Collective.

    Rank 0 reads its clock after this rank has begun a round, and before it ends it: that bounds how far the two clocks
    are apart. Where they may be one, as on a host, they are; otherwise the middle of the bounds is taken.
    """
    begin, least, most = 0.0, -math.inf, math.inf
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        together = torch.zeros(1, device=device)
        dist.all_reduce(together, group=group)
        together.item()  # synchronizes the device
        clock = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
        dist.broadcast(clock, group_src=0, group=group)
        first = clock.item()
        begin = begin or first
        least, most = max(least, started - first), min(most, time.perf_counter() - first)
    return begin if least <= 0 <= most else begin + (least + most) / 2


class Timeline:
    """Records the events of this rank; `take` returns those of a step and appends them to the run's file."""

    def __init__(self, rank: int, offset: float, device: torch.device, folder: Path | None = None) -> None:
        self._rank, self._offset, self._device = rank, offset, device
        self.file = LineFile(folder / FOLDER / f"rank-{rank}.jsonl") if folder else None
        self._events: list[Event] = []
        self.step = 0

    def now(self) -> float:
        """Return seconds since the run began, after synchronizing the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._offset

    @contextmanager
    def record(self, kind: str, name: str) -> Iterator[BytesMoved]:
        """Record the operation in the `with` block, which may fill in the bytes and the group."""
        start, moved = self.now(), BytesMoved()
        yield moved
        self.add(kind, name, start, moved)

    def add(self, kind: str, name: str, start: float, moved: BytesMoved) -> None:
        """Record an operation that began at `start` and ends now."""
        self._events.append(Event(self.step, self._rank, kind, name, start, self.now(), **asdict(moved)))

    def take(self) -> tuple[Event, ...]:
        """Return the events since the last call, in the order of their ends."""
        events, self._events = tuple(self._events), []
        if self.file is not None:
            self.file.append(self.step, (json.dumps(asdict(event)) for event in events))
        return events


def read_events(run: Path, step: int | None = None) -> list[Event]:
    """Read the events of a run, for one step or all.

    For a step that ran twice, because the run resumed from an earlier checkpoint, only the last time counts.

    Raises:
        ValueError: if the run or its timeline does not exist, a line is not a valid event, or the step has no events.
    """
    if not run.is_dir():
        raise ValueError(f"{run} is not a run folder")
    paths = sorted((run / FOLDER).glob("rank-*.jsonl"))
    if not paths:
        raise ValueError(f"{run} has no timeline: {FOLDER}/rank-N.jsonl does not exist")
    events = [event for path in paths for event in _last_runs(list(_parse(path)))]
    chosen = [event for event in events if step in (None, event.step)]
    if not chosen:
        steps = sorted({event.step for event in events})
        found = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        raise ValueError(f"step {step} is not in the timeline of {run}, which has {found}")
    return chosen


def _parse(path: Path) -> Iterator[Event]:
    names = {field.name for field in fields(Event)}
    needed = {field.name for field in fields(Event) if field.default is MISSING}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # the run was killed while writing
                return
            raise ValueError(f"{path}, line {number} is not an event: {error}") from None
        if not isinstance(values, dict) or not needed <= values.keys() <= names:
            raise ValueError(f"{path}, line {number} is not an event: expected the keys {', '.join(sorted(names))}")
        yield Event(**values)


def _last_runs(events: list[Event]) -> list[Event]:
    """Drop the events of steps that ran again later: when the step number falls, the run has resumed."""
    kept: list[Event] = []
    for event in events:
        if kept and event.step < kept[-1].step:
            kept = [earlier for earlier in kept if earlier.step < event.step]
        kept.append(event)
    return kept
