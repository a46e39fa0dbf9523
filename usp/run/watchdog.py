"""A watchdog on every rank: aborts a run that hangs, and reports which rank hangs and where the others wait for it.

    progress(step, phase)         called by the trainer at every step and phase
        | not called for `hang_timeout` seconds on some rank
    alarm                         set in torchrun's store; every live watchdog answers where its process is
        | all have answered, or ANSWER_SECONDS have passed
    one message                   from the first to claim it: where ranks wait, which are elsewhere, which are silent
        |
    exit code 124 on every rank   torchrun restarts the ranks (--max-restarts)

The timeout applies to a phase (loading data, a step, a checkpoint). A `long` phase (the first step compiles; a
checkpoint writes to a slow disk) gets LONG_PHASE times as much. Time in which the process was stopped does not count.
The watchdog is a thread because a rank that hangs is stuck inside a library.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from parallel import format_ranks

from .failures import HUNG, reachable_store, tell_launcher, wait_for_key
from .launch import LONG_PHASE, Launch
from .stacks import whereabouts

TICK_SECONDS = 0.5
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    """Location of one rank: step, phase, and what `usp.run.stacks` finds."""

    step: int
    phase: str
    collective: str
    at: str


class Watchdog:
    """Watchdog of this process inside a `with` block. `seconds`: longest time without progress; 0 disables it.

    error_file: file that torchrun's summary reads. leave: ends the process with an exit code.
    """

    def __init__(
        self,
        launch: Launch,
        seconds: float,
        error_file: str | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._launch, self._seconds, self._error_file, self._leave = launch, seconds, error_file, leave
        self._main = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.progress(0, "start", long=True)

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._seconds:
            self._thread.join()

    def progress(self, step: int, phase: str, long: bool = False) -> None:
        """Report that this rank has reached `phase` of `step`; the next call must follow within the timeout."""
        self._now = (step, phase, long)
        self._idle = 0.0

    def _watch(self) -> None:
        store = reachable_store(self._launch)
        alarm = f"hang/{self._launch.attempt}/alarm"
        before = time.monotonic()
        while not self._done.wait(min(TICK_SECONDS, self._seconds / 4)):
            now = time.monotonic()
            self._idle += min(now - before, 2 * TICK_SECONDS)  # a longer gap: the process was stopped
            before = now
            step, phase, long = self._now
            try:
                late = self._idle > self._seconds * (LONG_PHASE if long else 1)
                if late or (store is not None and store.check([alarm])):
                    watcher = threading.get_ident()
                    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != watcher}
                    self._report(store, Answer(step, phase, *whereabouts(frames, self._main)))
                    return
            except dist.DistError:  # torchrun has exited
                store = None

    def _report(self, store: dist.Store | None, own: Answer) -> None:
        """Store this rank's answer, report all answers unless another rank does, and end the process."""
        if store is None:
            self._print(describe({self._launch.rank: own}, self._launch.rank + 1, self._seconds, others=False))
            self._leave(HUNG)
            return
        key = f"hang/{self._launch.attempt}"
        store.set(f"{key}/{self._launch.rank}", json.dumps(asdict(own)))
        store.set(f"{key}/alarm", "")
        if store.add(f"{key}/claims", 1) == 1:
            self._print(describe(self._answers(store, key), self._launch.world_size, self._seconds))
            store.set(f"{key}/told", "")
        wait_for_key(store, f"{key}/told", 2 * ANSWER_SECONDS)
        self._leave(HUNG)

    def _answers(self, store: dist.Store, key: str) -> dict[int, Answer]:
        """Return the answers by rank, once all ranks have answered or ANSWER_SECONDS have passed."""
        found: dict[int, Answer] = {}
        end = time.monotonic() + ANSWER_SECONDS
        while len(found) < self._launch.world_size and time.monotonic() < end:
            for rank in range(self._launch.world_size):
                if rank not in found and store.check([f"{key}/{rank}"]):
                    found[rank] = Answer(**json.loads(store.get(f"{key}/{rank}")))
            time.sleep(0.05)
        return found

    def _print(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)
        if self._error_file is not None:
            tell_launcher(message, self._error_file)


def describe(answers: Mapping[int, Answer], world_size: int, seconds: float, others: bool = True) -> str:
    """Return the message about a hang: where ranks wait, which are silent, and which to look at first.

    Of `world_size` ranks, those without an answer are silent. others: whether the other ranks were asked.
    """
    lines = [f"error: no progress for {seconds:g} seconds (--hang-timeout): aborting the run"]
    places: dict[tuple[str, str, str], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        doing = f"in {answer.collective}" if answer.collective else "in no collective"
        places.setdefault((doing, answer.at, f"step {answer.step}, {answer.phase}"), []).append(rank)
    for (doing, at, when), ranks in sorted(places.items(), key=lambda place: (-len(place[1]), place[1])):
        lines.append(f"  {named(ranks)}: {doing} ({when}), at {at}")
    silent = [rank for rank in range(world_size) if rank not in answers] if others else []
    if silent:
        lines.append(f"  {named(silent)}: no answer: the process is stopped or stuck, or its host is down")
    suspects = _suspects(answers, silent)
    if others and suspects:
        lines.append(f"look first at {named(suspects)}")
    return "\n".join(lines)


def _suspects(answers: Mapping[int, Answer], silent: list[int]) -> list[int]:
    """Return the ranks that are silent or in no collective; if all wait, those that do not wait where most do."""
    away = [rank for rank, answer in answers.items() if not answer.collective]
    if away or silent:
        return sorted([*away, *silent])
    ranks_at: dict[tuple[str, str], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        ranks_at.setdefault((answer.collective, answer.at), []).append(rank)
    groups = sorted(ranks_at.values(), key=len)
    if len(groups) == 1 or len(groups[-1]) == len(groups[-2]):
        return []
    return sorted(rank for group in groups[:-1] for rank in group)


def named(ranks: list[int]) -> str:
    """Format ranks: [0, 1, 2, 5] is `ranks 0-2, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks, ', ')}"
