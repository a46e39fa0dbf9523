"""A watchdog on every rank: it ends a run that hangs, and says which rank hangs and where the others wait for it.

    progress(step, phase)         the trainer, at every step and phase
        | none for --hang-timeout seconds, on some rank
    alarm                         on torchrun's board; every watchdog that runs answers with where its process is
        | all have answered, or ANSWER_SECONDS are over
    one message                   from the first to claim it: who waits where, who is elsewhere, who is silent
        |
    exit code 124 on every rank   torchrun starts the ranks again (--max-restarts)

Only a phase's own time counts, not the step's: loading data, a step, a checkpoint each have --hang-timeout, and a
`long` one (the first step compiles; a checkpoint writes to a slow disk) LONG_PHASE times that. Time in which the whole
process was stopped is not counted. A thread watches, because a rank that hangs is stuck inside a library.
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

from .failures import HUNG, reachable_board, tell_launcher, wait_for_key
from .launch import LONG_PHASE, Launch
from .stacks import whereabouts

TICK_SECONDS = 0.5
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    """Where one rank is: in which phase of which step, and what `usp.run.stacks` sees."""

    step: int
    phase: str
    collective: str
    at: str


class Watchdog:
    """Watches this process for as long as the `with` block runs. `seconds` 0 watches nothing.

    error_file: where torchrun reads what its summary repeats. leave: ends the process with an exit code.
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
        """This rank has come to `phase` of `step`; the next call must follow within the limit."""
        self._now = (step, phase, long)
        self._idle = 0.0

    def _watch(self) -> None:
        board = reachable_board(self._launch)
        alarm = f"hang/{self._launch.attempt}/alarm"
        before = time.monotonic()
        while not self._done.wait(min(TICK_SECONDS, self._seconds / 4)):
            now = time.monotonic()
            self._idle += min(now - before, 2 * TICK_SECONDS)  # more has passed when this process was stopped
            before = now
            step, phase, long = self._now
            try:
                late = self._idle > self._seconds * (LONG_PHASE if long else 1)
                if late or (board is not None and board.check([alarm])):
                    self._tell(board, Answer(step, phase, *self._whereabouts()))
                    return
            except dist.DistError:  # torchrun is gone
                board = None

    def _whereabouts(self) -> tuple[str, str]:
        frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()}
        found = whereabouts(frames, self._main)
        return found.collective, found.at

    def _tell(self, board: dist.Store | None, own: Answer) -> None:
        """Give this rank's answer, see that all answers are told once, and end the process."""
        if board is None:
            self._say(describe({self._launch.rank: own}, self._launch.rank + 1, self._seconds, others=False))
            self._leave(HUNG)
            return
        key = f"hang/{self._launch.attempt}"
        board.set(f"{key}/{self._launch.rank}", json.dumps(asdict(own)))
        board.set(f"{key}/alarm", "")
        if board.add(f"{key}/claims", 1) == 1:
            self._say(describe(self._answers(board, key), self._launch.world_size, self._seconds))
            board.set(f"{key}/told", "")
        wait_for_key(board, f"{key}/told", 2 * ANSWER_SECONDS)
        self._leave(HUNG)

    def _answers(self, board: dist.Store, key: str) -> dict[int, Answer]:
        """By rank, as soon as all have answered; after ANSWER_SECONDS those that have."""
        found: dict[int, Answer] = {}
        end = time.monotonic() + ANSWER_SECONDS
        while len(found) < self._launch.world_size and time.monotonic() < end:
            for rank in range(self._launch.world_size):
                if rank not in found and board.check([f"{key}/{rank}"]):
                    found[rank] = Answer(**json.loads(board.get(f"{key}/{rank}")))
            time.sleep(0.05)
        return found

    def _say(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)
        if self._error_file is not None:
            tell_launcher(message, self._error_file)


def describe(answers: Mapping[int, Answer], world_size: int, seconds: float, others: bool = True) -> str:
    """The message about a hang: who waits where, who does not come, and whom to look at first.

    Of `world_size` ranks those without an answer are silent. others: False for one rank that cannot ask the rest.
    """
    lines = [f"error: no progress for {seconds:g} seconds (--hang-timeout), so the run ends"]
    places: dict[tuple[str, str, str], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        doing = f"in {answer.collective}" if answer.collective else "in no collective"
        places.setdefault((doing, answer.at, f"step {answer.step}, {answer.phase}"), []).append(rank)
    for (doing, at, when), ranks in sorted(places.items(), key=lambda place: (-len(place[1]), place[1])):
        lines.append(f"  {named(ranks)}: {doing} ({when}), at {at}")
    silent = [rank for rank in range(world_size) if rank not in answers] if others else []
    if silent:
        lines.append(f"  {named(silent)}: no answer, so the process is stopped, stuck, or its host is gone")
    suspects = _suspects(answers, silent)
    if others and suspects:
        lines.append(f"look first at {named(suspects)}")
    return "\n".join(lines)


def _suspects(answers: Mapping[int, Answer], silent: list[int]) -> list[int]:
    """Ranks that are silent or in no collective; where all wait, those outside of the place where most do."""
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
    """`[0, 1, 2, 5]` as `ranks 0-2, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks, ', ')}"
