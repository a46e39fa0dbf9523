"""What every rank did when, on one clock: RUN/timeline/rank-N.jsonl, one event a line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

_FOLDER = "timeline"
_ROUNDS = 5  # of measuring clocks: a rank may be late for one


@dataclass(frozen=True)
class Event:
    """A part of a step on one rank.

    Attributes:
        kind: an `Operation`'s, a call's (generate, inference, train_step, compute) in place of "call", or wait: for
            values that other ranks send. A transfer is beside other events: on a rank that receives it lasts from being
            posted to being waited for, on the others until it is posted.
        start, end: seconds since the run began, on rank 0's clock.
        sent, received: bytes between ranks that the operation itself moves; those within a model are not counted.
        minimum: bytes that this rank cannot do without.
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


@dataclass
class Traffic:
    """Bytes of an operation on this rank, filled in while it runs: see `Event`."""

    sent: int = 0
    received: int = 0
    minimum: int = 0


def clock_offset(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> float:
    """What to subtract from this rank's `time.perf_counter()` for seconds since now on rank 0. Collective."""
    offsets: list[float] = []
    begin = 0.0
    for _ in range(_ROUNDS):
        together = torch.zeros(1, device=device)
        dist.all_reduce(together, group=group)
        together.item()  # a device may be behind its host
        own = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
        first = own.clone()
        dist.broadcast(first, group_src=0, group=group)
        begin = begin or first.item()
        offsets.append((own - first).item())
    return begin + median(offsets)


class Timeline:
    """The events of this rank; `take` hands over those of a step, and adds them to the run's file."""

    def __init__(self, rank: int, offset: float, device: torch.device, folder: Path | None = None) -> None:
        self._rank, self._offset, self._device = rank, offset, device
        self._path = folder / _FOLDER / f"rank-{rank}.jsonl" if folder else None
        self._events: list[Event] = []
        self.step = 0

    def now(self) -> float:
        """Seconds since the run began, with the device's work done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._offset

    @contextmanager
    def record(self, kind: str, name: str) -> Iterator[Traffic]:
        """Around an operation, which may fill in its traffic."""
        start, traffic = self.now(), Traffic()
        yield traffic
        self.add(kind, name, start, traffic)

    def add(self, kind: str, name: str, start: float, traffic: Traffic) -> None:
        """An operation that began at `start` and ends now."""
        self._events.append(Event(self.step, self._rank, kind, name, start, self.now(), **asdict(traffic)))

    def take(self) -> tuple[Event, ...]:
        """The events since the last call, in the order of their ends."""
        events, self._events = tuple(self._events), []
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(event)) + "\n" for event in events)
        return events


def read_events(run: Path, step: int | None = None) -> list[Event]:
    """The events of a run, of one of its steps or of all.

    A step that was run twice, because the run continued from a checkpoint before it, counts as it ran last.

    Raises:
        ValueError: if there is no such run, it has no timeline, a line is no event, or no event is of the step.
    """
    if not run.is_dir():
        raise ValueError(f"{run} is no folder of a run")
    paths = sorted((run / _FOLDER).glob("rank-*.jsonl"))
    if not paths:
        raise ValueError(f"{run} has no timeline: there is no {_FOLDER}/rank-N.jsonl in it")
    events = [event for path in paths for event in _last_runs(list(_parse(path)))]
    chosen = [event for event in events if step in (None, event.step)]
    if not chosen:
        steps = sorted({event.step for event in events})
        held = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        raise ValueError(f"{run} has no step {step} in its timeline, which has {held}")
    return chosen


def _parse(path: Path) -> Iterator[Event]:
    names = {field.name for field in fields(Event)}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # the run was killed while it wrote
                return
            raise ValueError(f"{path}, line {number} is no event: {error}") from None
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"{path}, line {number} is no event: it needs {', '.join(sorted(names))}")
        yield Event(**values)


def _last_runs(events: list[Event]) -> list[Event]:
    """A rank's events without those of steps that it ran again later: a step number that falls begins anew."""
    kept: list[Event] = []
    for event in events:
        if kept and event.step < kept[-1].step:
            kept = [earlier for earlier in kept if earlier.step < event.step]
        kept.append(event)
    return kept
