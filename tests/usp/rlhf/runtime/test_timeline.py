"""A timeline is written, read, and shown as a table, a trace and a plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from usp.__main__ import main
from usp.rlhf.runtime.timeline import Event, Timeline, read_events
from usp.rlhf.runtime.trace import plot, totals

CALLS = (  # kind, name, ranks, start, end, bytes, minimum
    ("reallocate", "actor", range(8), 0.0, 0.4, 4000, 4000),
    ("generate", "actor_generate", range(8), 0.4, 3.0, 0, 0),
    ("announce", "lengths", range(8), 3.0, 3.05, 0, 0),
    ("transfer", "actor_generate to ref_inference, reward_inference, critic_inference", range(8), 3.05, 3.2, 900, 900),
    ("inference", "ref_inference", range(4), 3.2, 4.4, 0, 0),
    ("inference", "reward_inference", range(4, 6), 3.2, 4.9, 0, 0),
    ("inference", "critic_inference", range(6, 8), 3.2, 4.0, 0, 0),
    ("transfer", "ref_inference to advantages", range(8), 4.4, 5.0, 300, 200),
    ("wait", "advantages", range(4), 4.4, 5.0, 0, 0),
    ("compute", "advantages", range(8), 5.0, 5.05, 0, 0),
    ("train_step", "actor_train", range(4), 5.05, 8.0, 0, 0),
    ("train_step", "critic_train", range(4, 8), 5.05, 7.0, 0, 0),
)


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


def test_the_command_prints_a_table_and_writes_a_trace_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    write(tmp_path, 1, 2)
    out = tmp_path / "plot.png"
    assert main(["rlhf-trace", str(tmp_path), "--step", "2", "--out", str(out)], {}) == 0
    printed = capsys.readouterr().out
    assert "step 2, 8 ranks" in printed
    (row,) = (line for line in printed.splitlines() if "ref_inference to advantages" in line)
    assert [cell.strip() for cell in row.split("│")[3:8]] == ["0.600", "7.5%", "2,400", "1,600", "1.500"]
    assert out.read_bytes().startswith(b"\x89PNG")
    records = json.loads(out.with_suffix(".json").read_text())["traceEvents"]
    assert sum(record["ph"] == "X" for record in records) == len(events(2))
    assert main(["rlhf-trace", str(tmp_path)], {}) == 0
    assert (tmp_path / "timeline" / "timeline.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a run folder"),
        (["empty"], "empty has no timeline: timeline/rank-N.jsonl does not exist"),
        (["run", "--step", "7"], "step 7 is not in the timeline of run, which has steps 1 to 2"),
        (["run", "--out", "plot.pdf"], "--out plot.pdf must end in .png"),
        (["run", "--out", "nowhere/plot.png"], "--out nowhere/plot.png: nowhere is not a directory"),
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


def test_a_plot_of_one_instant(tmp_path: Path) -> None:
    plot([Event(1, 0, "generate", "actor_generate", 1.0, 1.0)], tmp_path / "plot.png")
