"""Hangs on real ranks and their reports, torchrun's store, and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.e2e.processes import Run
from usp.run.failures import HUNG, Ending, Stopped, end, ending_of
from usp.run.launch import TICK_SECONDS, Launch, RanksMissing, StopRequest, all_ready, meet, named
from usp.run.watchdog import RankLocation, Watchdog, describe, unfinished_on_gpu, whereabouts

HANGS = """
import os, signal, sys, time
import torch, torch.distributed as dist
from usp.run.launch import TICK_SECONDS, Launch, meet, outlast, process_group
from usp.run.watchdog import Watchdog

def load_data(): time.sleep(1000)
def sum_of_loss(x): dist.all_reduce(x)
def exchange(x): dist.all_to_all_single(torch.empty_like(x), x)

launch = meet(Launch.from_environment(os.environ))
attempt, rank = launch.attempt, launch.rank
if rank == 0 and attempt == 0:
    launch.remember("folder", "kept")
with process_group(launch, torch.device("cpu"), 3.0), Watchdog(launch, 3.0) as watchdog:
    outlast(3.0)
    x = torch.ones(3)
    dist.all_reduce(x)
    watchdog.progress(1, "data")
    if attempt == 0 and rank == 1:
        load_data()
    watchdog.progress(1, "step")
    if attempt == 0 and rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    if attempt != 1 or rank != 2:
        exchange(x)
    sum_of_loss(x)
    print(f"rank {rank} done, folder {launch.recall('folder')}", flush=True)
"""


def processes(run: Run, state: str) -> list[int]:
    """Return the ranks of a run that are in `state` (T is stopped)."""
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in run.workers()}
    return [pid for pid, path in stats.items() if path.exists() and path.read_text().rpartition(") ")[2][0] == state]


@pytest.mark.slow
def test_what_a_process_does_is_told_while_it_could_be_killed_there(tmp_path: Path) -> None:
    """Anew again and again, because torchrun takes the oldest message for the cause."""
    file = tmp_path / "error.json"
    with Watchdog(Launch(), 100.0, str(file)) as watchdog:
        with watchdog.naming("decoding"):
            first = file.read_text()
            while file.read_text() == first:
                time.sleep(0.05)
            assert json.loads(file.read_text())["message"]["message"] == "decoding"
        assert not file.exists()
    with Watchdog(Launch(), 0, str(file)) as watchdog, watchdog.naming("decoding"):
        assert not file.exists(), "nobody renews it"


@pytest.mark.slow
def test_every_hang_is_reported_and_the_ranks_restart(launch: Callable[..., Run], tmp_path: Path) -> None:
    """In one launch: a rank stuck loading data beside one that is stopped, one that skips a collective, then none."""
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    with launch([], tmp_path, ranks=3, script=script, torchrun=("--standalone", "--max-restarts", "2")) as run:
        run.wait_for(lambda: "no answer" in run.err.read_text())
        for pid in processes(run, "T"):
            os.kill(pid, signal.SIGKILL)
        ended = run.end()
    assert ended.exit_code == 0, ended.err
    # The ranks share one pipe, so a line's end may come after the next line.
    assert sorted(re.findall(r"rank \d done, folder kept", ended.out)) == [
        f"rank {rank} done, folder kept" for rank in range(3)
    ]
    said = re.findall(r"error: no progress for 3 seconds[^\n]*\n(?:  ranks? [^\n]*\n)+look first at [^\n]*", ended.err)
    stuck, skips = said  # one message for each attempt
    assert re.search(r"rank 2: in all_to_all_single \(step 1, step\), at \S*hangs.py:\d+ exchange < ", stuck)
    assert re.search(r"rank 1: in no collective \(step 1, data\), at \S*hangs.py:\d+ load_data < ", stuck)
    assert "rank 0: no answer" in stuck and stuck.endswith("look first at ranks 0-1")
    assert "ranks 0-1: in all_to_all_single" in skips and "rank 2: in all_reduce" in skips
    assert re.search(r"hangs.py:\d+ sum_of_loss", skips) and skips.endswith("look first at rank 2")


class Clock:
    """A clock that a test moves. The watchdog looks at it at every tick."""

    def __init__(self) -> None:
        self.now, self._looks = 0.0, threading.Semaphore(0)

    def monotonic(self) -> float:
        self._looks.release()
        return self.now

    def move(self, seconds: float) -> None:
        """Let `seconds` pass between two ticks, and return after the second."""
        for passed in (0.0, seconds):
            self.now += passed
            while self._looks.acquire(blocking=False):
                pass
            for _ in range(2):  # the first may be one of before
                self._looks.acquire()


def test_no_report_while_there_is_progress_or_after_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    clock = Clock()
    monkeypatch.setattr("usp.run.watchdog.time", clock)
    with Watchdog(Launch(), 0.04, leave=left.append) as watchdog:
        for step in range(6):
            watchdog.progress(step, "step")
            clock.move(0.03)
        watchdog.progress(6, "checkpoint", long=True)
        clock.move(0.1)
    with Watchdog(Launch(), 0.0, leave=left.append):
        pass
    assert left == [] and capsys.readouterr().err == ""


def test_without_a_store_a_rank_reports_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    error_file = tmp_path / "error.json"
    with Watchdog(Launch(rank=3, world_size=8), 0.1, str(error_file), leave) as watchdog:
        watchdog.progress(7, "data")
        assert left.wait(60)
    said = capsys.readouterr().err
    assert codes == [HUNG] and "rank 3: in no collective (step 7, data), at " in said
    assert "test_without_a_store_a_rank_reports_only_itself" in said and "look first" not in said
    assert "rank 3" in error_file.read_text()


def test_a_thread_that_the_main_thread_waits_for_is_located() -> None:
    message = torch.futures.Future()  # its wait() is a call into C++, as that of a collective
    idents: list[int] = []

    def backward() -> None:
        idents.append(threading.get_ident())
        message.wait()

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(backward)
        main = pool.submit(lambda: (idents.append(threading.get_ident()), waiting.result()))
        while True:
            seen = [whereabouts(sys._current_frames(), ident) for ident in (*idents[1:], threading.get_ident())]
            if len(seen) == 2 and seen[0][0]:
                break
            time.sleep(0.01)
        message.set_result(None)
        main.result()
    assert seen[0][0] == "wait" and "backward" in seen[0][1]  # the main thread waits for another one
    assert seen[1][0] == ""  # it is busy itself


def test_the_oldest_unfinished_gpu_collective_is_named() -> None:
    record = """{"entries": [
        {"profiling_name": "nccl:broadcast", "state": "completed", "retired": true, "input_sizes": [[1]],
         "process_group": ["0", "default_pg"]},
        {"profiling_name": "nccl:all_to_all", "state": "started", "retired": false, "input_sizes": [[64]],
         "process_group": ["5", "mesh_ulysses"]},
        {"profiling_name": "nccl:all_reduce", "state": "scheduled", "retired": false, "input_sizes": [[2]],
         "process_group": ["0", "default_pg"]}]}"""
    assert unfinished_on_gpu(record.encode()) == "nccl:all_to_all of [[64]] in group mesh_ulysses"
    assert unfinished_on_gpu(b"") == ""


@pytest.mark.parametrize(
    ("places", "suspects"),
    [
        (["a", "a", "a", ""], "rank 3"),
        (["a", "b", "a", "a"], "rank 1"),
        (["a", "", None, "a"], "ranks 1-2"),
        (["a", "a", "b", "b"], None),
        (["a", "a", "a", "a"], None),
    ],
)
def test_which_ranks_to_look_at_first(places: list[str | None], suspects: str | None) -> None:
    answers = {rank: RankLocation(2, "step", c, f"x.py:1 {c}") for rank, c in enumerate(places) if c is not None}
    message = describe(answers, 4, 60.0)
    assert message.partition("look first at ")[2] == (suspects or "")


def test_consecutive_ranks_are_abbreviated() -> None:
    assert [named(ranks) for ranks in ([3], [0, 1], [0, 1, 2, 5, 7, 8])] == ["rank 3", "ranks 0-1", "ranks 0-2, 5, 7-8"]


def test_ranks_agree_on_the_attempt_whatever_torchrun_counts() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def launch(rank: int, attempt: int) -> Launch:
        return Launch(rank, 3, agent_store=("localhost", store.port), run_id="run", attempt=attempt)

    dead = launch(2, 0).store()
    assert dead is not None
    dead.add("tickets", 1)  # a rank that was killed before rank 0 came
    with ThreadPoolExecutor(3) as pool:
        for start, counted in enumerate(((0, 0, 0), (1, 0, 0), (1, 1, 0))):
            met = list(pool.map(meet, (launch(rank, attempt) for rank, attempt in enumerate(counted))))
            assert [one.attempt for one in met] == [start] * 3
    launch(1, 0).remember("folder", "runs/a")
    assert launch(2, 5).recall("folder") == "runs/a" and launch(0, 0).recall("other") is None
    other = Launch(0, 1, agent_store=("localhost", store.port), run_id="another")
    assert other.recall("folder") is None and meet(other).attempt == 0
    assert Launch().recall("folder") is None and meet(Launch()) == Launch()


@pytest.mark.parametrize("missing", [(2,), (0,), (0, 3), (1, 2)])
@pytest.mark.slow
def test_ranks_that_never_come_are_named_by_every_other_one(missing: tuple[int, ...]) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    launches = [Launch(rank, 4, agent_store=("localhost", store.port), run_id="run") for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert [one.attempt for one in pool.map(meet, launches)] == [0] * 4, "an attempt to which all came"
        came = [pool.submit(meet, launch, 1.0) for launch in launches if launch.rank not in missing]
        errors = [future.exception() for future in came]
        assert all(isinstance(error, RanksMissing) for error in errors), errors
        expected = f"{named(list(missing))} not there 1 seconds (--hang-timeout) after the start of rank "
        assert all(str(error).startswith(expected) for error in errors)
        again = list(pool.map(meet, launches))
    assert [one.attempt for one in again] == [1 if 0 in missing else 2] * 4


def test_a_lost_connection_gives_the_thread_time_that_sees_torchrun_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose store is gone waits before it blames another one: see `end_with_launcher`."""
    waited = list[float]()
    monkeypatch.setattr("usp.run.failures.wait_for_key", lambda store, key, seconds: waited.append(seconds))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    launch = Launch(0, 2, agent_store=("localhost", store.port), run_id="run")
    del store
    assert end(Ending("lost its connection", 1, consequence=True), launch, None) == 1
    assert len(waited) == 1 and waited[0] > TICK_SECONDS


ABSENT = """
import os, sys, time
if os.environ["RANK"] == "{absent}":
    time.sleep(1000)
from usp.commands.{program} import main
from usp.run.launch import leave
leave(main(sys.argv[1:], os.environ))
"""


@pytest.mark.parametrize(("program", "absent"), [("train", 1), ("rlhf", 0)])
@pytest.mark.slow
def test_a_run_ends_where_a_rank_never_comes(
    launch: Callable[..., Run], tmp_path: Path, program: str, absent: int
) -> None:
    script = tmp_path / "absent.py"
    script.write_text(ABSENT.format(absent=absent, program=program))
    with launch(["--hang-timeout", "1"], tmp_path, ranks=2, script=script) as run:
        ended = run.end()
    assert ended.exit_code == 1  # torchrun's
    said = re.findall(rf"^error: rank {absent} not there 1 seconds \(--hang-timeout\)", ended.err, re.MULTILINE)
    assert len(said) == 1, ended.err
    assert f"error: rank {absent} not there" in ended.err.rpartition("Root Cause")[2]


def test_who_is_still_preparing_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    launches = [Launch(rank, 3, agent_store=("localhost", store.port), run_id="run") for rank in range(3)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(all_ready, launch, 0.1) for launch in launches[:2]]
        said = ""
        while said.count("waiting for rank 2 to prepare since ") < 2:
            said += capfd.readouterr().err
            time.sleep(0.02)
        all_ready(launches[2])
        assert [future.result() for future in waiting] == [None, None]


def test_a_signal_sets_a_flag_and_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    with stop.listening():
        assert not stop.signal_number
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)  # right after the first: the same request
        assert stop.signal_number == signal.SIGUSR1
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_later_signal_exits_at_once(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int) -> None:
    left: list[int] = []
    monkeypatch.setattr("os._exit", left.append)
    monkeypatch.setattr("usp.run.launch.ECHO_SECONDS", 0.0)
    stop = StopRequest(saves=True)
    with stop.listening():
        signal.raise_signal(number)
        assert left == [] and stop.signal_number == number
        signal.raise_signal(number)
    assert left == [code]


def test_ctrl_c_interrupts_where_there_is_nothing_to_save() -> None:
    stop = StopRequest()
    with stop.listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not stop.signal_number


def test_a_stopped_run_says_how_to_resume() -> None:
    ending = ending_of(Stopped(signal.SIGTERM, 7, Path("run/checkpoints/7")), rank=0)
    assert ending.exit_code == 143
    assert ending.message == "stopped by SIGTERM after step 7; checkpoint run/checkpoints/7: continue with --resume run"
    assert ending_of(Stopped(signal.SIGUSR1, 1, None), rank=1).exit_code == 138
    assert ending_of(KeyboardInterrupt(), rank=0).exit_code == 130


def test_a_rank_that_lost_its_peer_exits_when_the_launcher_asked(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert end(Ending("lost", 1, consequence=True), Launch(1, 2), None, asked_to_stop=True) == 1
    assert capsys.readouterr().err == "" and time.monotonic() - begin < 60
