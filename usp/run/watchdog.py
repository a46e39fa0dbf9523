"""The watchdog: ends a hung run and names the ranks and the collective in which they wait."""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from .failures import HUNG, reachable_store, tell_launcher, wait_for_key
from .launch import LONG_PHASE, Launch, named

ROOT = Path(__file__).parents[2]
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
IDLE = ("threading.py", "concurrent/futures/_base.py", "torch/autograd/graph.py")  # a thread in these waits for another
CALLERS = 3
TICK_SECONDS = 0.5
ANSWER_SECONDS = 5.0


def whereabouts(frames: Mapping[int, FrameType], main: int) -> tuple[str, str]:
    """Return the collective in which a process waits, or an empty string, and its innermost calls outside of torch.

    Its threads are at `frames` (sys._current_frames), its main thread is `main`. If that waits for another thread, the
    other one counts: a backward on CUDA runs in a separate thread.
    """
    collective, at = _of_thread(frames[main])
    if not collective and _short(frames[main].f_code.co_filename).endswith(IDLE):
        others = (_of_thread(frame) for thread, frame in frames.items() if thread != main)
        collective, at = next((other for other in others if other[0]), (collective, at))
    if collective:
        return collective, at
    backends = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    dump = getattr(backends, "_dump_nccl_trace_json", None)  # of torch's flight recorder
    return unfinished_on_gpu(dump(True, False) if dump is not None else b""), at


def unfinished_on_gpu(record: bytes) -> str:
    """Describe the oldest unfinished NCCL collective of a flight record; empty if there is none."""
    entries = json.loads(record).get("entries", []) if record else []
    for entry in entries:
        if entry["profiling_name"].startswith("nccl:") and entry["state"] != "completed" and not entry["retired"]:
            return f"{entry['profiling_name']} of {entry['input_sizes']} in group {entry['process_group'][-1]}"
    return ""


def _of_thread(frame: FrameType) -> tuple[str, str]:
    stack = traceback.walk_stack(frame)  # innermost first
    calls = [(_short(each.f_code.co_filename), line, each.f_code.co_name) for each, line in stack]
    collective = ""
    outside = len(calls)
    for index, (file, _, function) in enumerate(calls):
        if not file.startswith("torch/"):
            outside = index
            break
        if file in COLLECTIVES and not function.startswith("_"):
            collective = function  # ends as the outermost one: what our code called
    if not collective and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        collective = "wait"  # torch.distributed's Work.wait has no Python frame
    callers = calls[outside : outside + CALLERS] or calls[:CALLERS]
    return collective, " < ".join(f"{file}:{line} {function}" for file, line, function in callers)


def _short(file: str) -> str:
    """Shorten `file` to its path in site-packages or in this project, else to its last two parts."""
    path = Path(file)
    if "site-packages/" in path.as_posix():
        return path.as_posix().rpartition("site-packages/")[2]
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else "/".join(path.parts[-2:])


@dataclass(frozen=True)
class RankLocation:
    """Location of one rank: step, phase, and what `whereabouts` returns."""

    step: int
    phase: str
    collective: str
    at: str


class Watchdog:
    """Watchdog of this process inside a `with` block. `seconds`: longest time without progress; 0 disables it.
    error_file: file that torchrun's summary reads. leave: ends the process with an exit code."""

    def __init__(
        self, launch: Launch, seconds: float, error_file: str | None = None, leave: Callable[[int], object] = os._exit
    ) -> None:
        self._launch, self._seconds, self._error_file, self._leave = launch, seconds, error_file, leave
        self._main, self._named, self._lock = threading.get_ident(), "", threading.Lock()
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

    @property
    def phase(self) -> str:
        """What this rank is doing."""
        return self._now[1]

    @contextmanager
    def naming(self, words: str) -> Iterator[None]:
        """Have torchrun's summary say `words` if this process is killed in the block: nobody else could tell.

        Of several ranks that are killed, torchrun names the one whose file is oldest, so the others' are renewed.
        """
        self._name(words)
        try:
            yield
        finally:
            self._name("")

    def _name(self, words: str | None = None) -> None:
        with self._lock:
            before, self._named = self._named, self._named if words is None else words
            if self._error_file is None or not self._seconds:
                return
            if self._named:
                tell_launcher(self._named, self._error_file)
            elif before:
                Path(self._error_file).unlink(missing_ok=True)

    def _watch(self) -> None:
        store = reachable_store(self._launch)
        alarm = f"hang/{self._launch.attempt}/alarm"
        before, idle, last = time.monotonic(), 0.0, self._now
        while not self._done.wait(min(TICK_SECONDS, self._seconds / 4)):
            self._name()
            now, reached = time.monotonic(), self._now
            # A longer gap: the process was stopped.
            idle = idle + min(now - before, 2 * TICK_SECONDS) if reached is last else 0.0
            before, last = now, reached
            step, phase, long = reached
            try:
                late = idle > self._seconds * (LONG_PHASE if long else 1)
                if late or (store is not None and store.check([alarm])):
                    watcher = threading.get_ident()
                    frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != watcher}
                    self._report(store, RankLocation(step, phase, *whereabouts(frames, self._main)))
                    return
            except dist.DistError:  # torchrun has exited
                store = None

    def _report(self, store: dist.Store | None, own: RankLocation) -> None:
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

    def _answers(self, store: dist.Store, key: str) -> dict[int, RankLocation]:
        """Return the answers by rank, once all ranks have answered or ANSWER_SECONDS have passed."""
        answers: dict[int, RankLocation] = {}
        end = time.monotonic() + ANSWER_SECONDS
        while len(answers) < self._launch.world_size and time.monotonic() < end:
            for rank in range(self._launch.world_size):
                if rank not in answers and store.check([f"{key}/{rank}"]):
                    answers[rank] = RankLocation(**json.loads(store.get(f"{key}/{rank}")))
            time.sleep(0.05)
        return answers

    def _print(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)
        if self._error_file is not None:
            tell_launcher(message, self._error_file)


def describe(answers: Mapping[int, RankLocation], world_size: int, seconds: float, others: bool = True) -> str:
    """Return the message about a hang: where ranks wait, which are silent, and which to look at first. Of `world_size`
    ranks, those without an answer are silent. others: whether the other ranks were asked."""
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


def _suspects(answers: Mapping[int, RankLocation], silent: list[int]) -> list[int]:
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
