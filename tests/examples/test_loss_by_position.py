"""The table and the plot of held-out losses by position."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.loss_by_position import chosen_curves, main, plot_positions
from usp.run.metrics import METRICS_FILE


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with twelve evaluations in 24 steps, which is writing the next record."""
    run = tmp_path / "run"
    run.mkdir()
    records = []
    for step in range(1, 25):
        loss = 4 - step / 12
        by_position = {"eval_loss_by_position/16": loss, "eval_loss_by_position/2048": loss - 1}
        records.append({"step": step, "loss": 5.0, "eval_loss": None})
        if step % 2 == 0:
            records[-1] |= {"eval_loss": loss, **by_position}
    (run / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 25, "lo')
    return run


@pytest.mark.slow
def test_one_run_is_shown_from_its_first_to_its_last_evaluation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = chosen_curves([run])
    assert [curve.step for curve in curves] == [2, 6, 10, 15 + 1, 20, 24]
    assert curves[-1].by_position == {16: 2.0, 2048: 1.0}
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert (
        "to 2K" in shown and "2.8333" in shown and "seq len" not in shown and str(run / "loss-by-position.png") in shown
    )
    assert (run / "loss-by-position.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_rows_of_several_lengths_are_told_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()[:-1]]
    stages = [record | {"seq_len": 1024 if record["step"] <= 12 else 2048} for record in records]
    (run / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in stages))
    curves = chosen_curves([run])
    assert main([str(run)]) == 0
    assert "seq len" in capsys.readouterr().out
    labels = [str(line.get_label()) for line in plot_positions(curves).axes[0].lines]
    assert labels[2:4] == ["step 10, rows of 1K", "step 16, rows of 2K"]


@pytest.mark.slow
def test_all_held_out_sets_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()[:-1]]
    for record in records:
        if record["eval_loss"] is not None:
            for name, more in (("web", 0.0), ("books/old", 0.25)):
                record |= {f"eval_loss/{name}": record["eval_loss"] + more}
                record |= {f"eval_loss_by_position/{name}/16": record["eval_loss"] + more}
    (run / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
    curves = chosen_curves([run])
    assert [(curve.step, curve.held_out) for curve in curves[-2:]] == [(24, "web"), (24, "books/old")]
    assert len(curves) == 12 and curves[-1].by_position == {16: 2.25} and curves[-1].loss == 2.25
    assert len(chosen_curves([run, run])) == 4
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "held out" in shown and "books/old" in shown and "2.2500" in shown
    labels = [str(line.get_label()) for line in plot_positions(curves).axes[0].lines]
    assert labels[-1] == "books/old, step 24"


def test_of_several_runs_the_last_evaluations_are_shown(run: Path, tmp_path: Path) -> None:
    assert [curve.step for curve in chosen_curves([run, run])] == [24, 24]
    assert main([str(run), str(run), "--out", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").exists()


def test_runs_without_evaluations_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / METRICS_FILE).write_text('{"step": 1, "eval_loss": null}\n')
    for argv, said in (
        ([str(run)], "records no evaluation: train with --eval-data"),
        ([str(tmp_path)], "has no metrics.jsonl: give the output folder of a run of train.py"),
        ([], "RUN"),
    ):
        try:
            assert main([*argv]) == 1
        except SystemExit as stop:
            assert stop.code
        captured = capsys.readouterr()
        assert said in captured.out + captured.err
