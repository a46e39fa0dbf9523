"""A timeline is written, read, divided into waiting and work, and shown as tables and a trace."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankPool
from usp.__main__ import main
from usp.rlhf.runtime.timeline import (
    BETWEEN,
    Event,
    Timeline,
    activities,
    bounds,
    clock_offset,
    critical_path,
    read_events,
)
from usp.rlhf.runtime.trace import rank_table, totals, write_chrome_trace

CALLS = (  # kind, name, ranks, start, end, bytes, minimum
    ("reallocate", "actor", range(8), 0.0, 0.4, 4000, 4000),
    ("generate", "actor_generate", range(8), 0.4, 3.0, 0, 0),
    ("announce", "lengths", range(8), 3.0, 3.05, 0, 0),
    ("transfer", "actor_generate to ref_inference, reward_inference, critic_inference", range(8), 3.05, 3.2, 900, 900),
    ("inference", "ref_inference", range(4), 3.2, 4.4, 0, 0),
    ("inference", "reward_inference", range(4, 6), 3.2, 4.9, 0, 0),
    ("inference", "critic_inference", range(6, 8), 3.2, 4.0, 0, 0),
    ("transfer", "ref_inference to advantages", range(8), 4.4, 5.0, 300, 200),
    ("wait", "advantages", range(8), 4.4, 5.0, 0, 0),
    ("compute", "advantages", range(8), 5.0, 5.05, 0, 0),
    ("train_step", "actor_train", range(4), 5.05, 8.0, 0, 0),
    ("train_step", "critic_train", range(4, 8), 5.05, 7.0, 0, 0),
)


# A step of separation: rank 0 generates, rank 1 trains. kind, name, rank, start, end, bytes sent, bytes received
SEPARATION = (
    ("release", "actor", 0, 0.0, 0.1, 0, 0),
    ("reallocate", "actor", 0, 0.1, 4.2, 0, 900),  # rank 1 has work until 4.0: 0.2 s of moving
    ("compute", "before", 1, 0.0, 4.0, 0, 0),
    ("reallocate", "actor", 1, 4.0, 4.2, 900, 0),
    ("generate", "actor_generate", 0, 4.2, 6.0, 0, 0),
    ("announce", "lengths", 1, 4.3, 6.2, 0, 0),
    ("announce", "lengths", 0, 6.1, 6.2, 0, 0),
    ("transfer", "early to actor_train", 0, 6.2, 6.2, 10, 0),
    ("inference", "actor_inference", 0, 6.2, 8.0, 0, 0),
    ("transfer", "actor_inference to actor_train", 0, 8.0, 8.1, 50, 0),
    ("wait", "actor_train", 1, 6.4, 8.3, 0, 0),
    ("transfer", "early to actor_train", 1, 6.2, 6.5, 0, 10),
    ("transfer", "actor_inference to actor_train", 1, 6.2, 8.3, 0, 50),
    ("train_step", "actor_train", 1, 8.3, 10.0, 0, 0),
)


def separation() -> list[Event]:
    return [Event(1, rank, k, n, start, end, *moved) for k, n, rank, start, end, *moved in SEPARATION]


def test_waiting_is_not_work() -> None:
    found = {(a.event.kind, a.event.name, a.event.rank): a for a in activities(separation())}
    spent = {key: (round(a.waiting, 9), round(a.work, 9), a.last) for key, a in found.items() if a.waiting}
    assert spent == {
        ("reallocate", "actor", 0): (3.9, 0.2, 1),
        ("announce", "lengths", 1): (1.8, 0.1, 0),
        ("transfer", "actor_inference to actor_train", 1): (1.5, 0.3, 0),  # since the one before: 6.5
    }
    assert found["transfer", "early to actor_train", 1].work == pytest.approx(0.1)  # sent before rank 1 waited
    moving = next(row for row in totals(separation()) if row.kind == "reallocate")
    assert (moving.seconds, moving.share, moving.waiting) == (pytest.approx(0.2), pytest.approx(0.02), 3.9)
    assert rank_table(1, activities(separation())).rows == (
        ("0", "4.100", "3.900", "2.000", "59.0%"),
        ("1", "6.400", "3.300", "0.300", "36.0%"),
    )


def test_the_critical_path_follows_the_rank_that_was_waited_for() -> None:
    path = critical_path(activities(separation()))
    assert [(part.rank, part.name) for part in path] == [
        (1, "before"),
        (0, "actor"),
        (0, "actor_generate"),
        (0, BETWEEN),
        (0, "lengths"),
        (0, "actor_inference"),
        (1, "actor_inference to actor_train"),
        (1, "actor_train"),
    ]
    assert sum(part.seconds for part in path) == pytest.approx(10.0)
    for step in (separation(), events(1), [replace(e, start=e.end) for e in separation()]):
        found = activities(step)
        whole = critical_path(found)
        assert (whole[0].start, whole[-1].end) == bounds(found)
        assert all(before.end == after.start for before, after in pairwise(whole))


def test_ranks_of_different_groups_do_not_wait_for_each_other() -> None:
    late = [Event(1, rank, "generate", "actor_generate", 2.0 * rank, 3.0 + rank, group=rank) for rank in range(2)]
    assert [(a.waiting, a.work) for a in activities(late)] == [(0, 3), (0, 2)]
    assert totals(late)[0].seconds == 4.0
    joined = [replace(event, group=0) for event in late]
    assert [(a.waiting, a.work) for a in activities(joined)] == [(2, 1), (0, 2)]


def events(step: int) -> list[Event]:
    return [
        Event(step, rank, kind, name, start + 8 * step, end + 8 * step, moved, moved, minimum)
        for rank in range(8)
        for kind, name, ranks, start, end, moved, minimum in CALLS
        if rank in ranks
    ]


def write(run: Path, *numbers: int) -> None:
    """Write the files of a run that ran these steps, in this order."""
    (run / "timeline").mkdir(parents=True)
    for step in numbers:
        for event in events(step):
            with (run / "timeline" / f"rank-{event.rank}.jsonl").open("a") as file:
                file.write(json.dumps(vars(event)) + "\n")


def offset_of_late_rank(apart: float) -> float:
    """Return a rank's offset, if its clock is `apart` x rank ahead, and it goes on late after every all-reduce."""
    rank, clock, reduce = dist.get_rank(), time.perf_counter, dist.all_reduce

    def late(*args: Any, **kwargs: Any) -> None:
        reduce(*args, **kwargs)
        time.sleep(0.02 * rank)

    with patch.object(dist, "all_reduce", late), patch.object(time, "perf_counter", lambda: clock() + apart * rank):
        return clock_offset()


@pytest.mark.slow
def test_ranks_of_a_host_have_one_clock_however_late_they_are(ranks: RankPool) -> None:
    first, *others = ranks.run(offset_of_late_rank, 3, 0.0)
    assert others == [first] * 2
    first, second = ranks.run(offset_of_late_rank, 2, 1e6)  # clocks of hosts that were started 12 days apart
    assert second - first == pytest.approx(1e6, abs=10.0)


def test_recorded_events_are_read_back(tmp_path: Path) -> None:
    timeline = Timeline(rank=1, offset=0.0, device=torch.device("cpu"), folder=tmp_path)
    taken: list[Event] = []
    for step in (1, 2):
        timeline.step = step
        with timeline.record("reallocate", "actor") as traffic:
            traffic.received = traffic.minimum = 8
        taken += timeline.take()
    assert read_events(tmp_path) == taken
    assert [(e.step, e.rank, e.kind, e.name, e.received) for e in taken] == [
        (s, 1, "reallocate", "actor", 8) for s in (1, 2)
    ]
    assert all(event.start <= event.end for event in taken)
    with (tmp_path / "timeline" / "rank-1.jsonl").open("a") as file:
        file.write('{"step": 3, "ra')  # killed while writing
    assert read_events(tmp_path) == taken


def test_a_step_that_ran_twice_counts_once(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 2)
    assert sorted({event.step for event in read_events(tmp_path)}) == [1, 2]
    assert len(read_events(tmp_path, step=2)) == len(events(2))


def test_totals_sum_over_ranks_and_average_over_steps() -> None:
    rows = {(row.kind, row.name): row for row in totals([*events(1), *events(2)])}
    moved = rows["reallocate", "actor"]
    assert (moved.bytes, moved.minimum, moved.ratio) == (8 * 4000, 8 * 4000, 1.0)
    assert rows["transfer", "ref_inference to advantages"].ratio == 1.5
    reward = rows["inference", "reward_inference"]
    assert (reward.seconds, reward.share, reward.ratio) == (pytest.approx(1.7), pytest.approx(1.7 / 8), None)


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    write(tmp_path, 1, 2)
    out = tmp_path / "trace.json"
    assert main(["rlhf-trace", str(tmp_path), "--step", "2", "--out", str(out)], {}) == 0
    printed = capsys.readouterr().out
    assert "step 2, 8 ranks: 8.000 s" in printed
    row = next(line for line in printed.splitlines() if "ref_inference to advantages" in line)
    assert "2,400" in row and "1.500" in row  # bytes, and of how many that are needed
    records = json.loads(out.read_text())["traceEvents"]
    assert {record["args"]["step"] for record in records if record["ph"] == "X"} == {2}
    assert main(["rlhf-trace", str(tmp_path)], {}) == 0
    printed = capsys.readouterr().out
    for part in ("mean of 2 steps, 1 to 2, 8 ranks: 8.000 s", "step 2: each rank", "step 2: critical path"):
        assert part in printed
    assert f"trace: {tmp_path / 'timeline' / 'trace.json'}" in printed


def test_a_trace_shows_waiting_as_slices_of_its_own(tmp_path: Path) -> None:
    write_chrome_trace(separation(), tmp_path / "trace.json")
    slices = [r for r in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if r["ph"] == "X"]
    moves = [(r["cat"], r["name"], r["dur"]) for r in slices if r["pid"] == 0 and "actor" in r["name"].split(":")[0]]
    assert ("waiting", "actor: wait for rank 1", pytest.approx(3.9e6)) in moves
    assert ("reallocate", "actor", pytest.approx(0.2e6)) in moves
    assert sum(r["tid"] == 1 for r in slices) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a run folder"),
        (["empty"], "empty has no timeline: timeline/rank-N.jsonl does not exist"),
        (["run", "--step", "7"], "step 7 is not in the timeline of run, which has steps 1 to 2"),
        (["run", "--out", "trace.png"], "--out trace.png must end in .json"),
        (["run", "--out", "nowhere/trace.json"], "--out nowhere/trace.json: nowhere is not a directory"),
        (["broken"], "line 1 is not an event: expected the keys"),
    ],
)
def test_the_command_reports_bad_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", 1, 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "timeline").mkdir(parents=True)
    (tmp_path / "broken" / "timeline" / "rank-0.jsonl").write_text("{}\n")
    assert main(["rlhf-trace", *arguments], {}) == 1
    assert message in capsys.readouterr().err
