"""The GPU benchmark runs on toy sizes without a GPU, and refuses full sizes there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.harness.checks import Check, Log


def test_every_measurement_runs_on_toy_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", "--tiny"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    for what in (
        "error of out, dq, dk and dv",
        "torch SDPA",
        "one block without a mask",
        "rates for a node file: {",
        "rank 0 of a ring of 4",
        "step of 2 layers, 256 tokens",
        "of the dry run's",
        "merge of a hop",
        "a layer and token",
        "in both directions at once",
        "step with torch.compile",
        "a group of one rank",
    ):
        assert what in printed


def test_it_refuses_to_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        gpu.resolve_device("cuda", tiny=False)
    with pytest.raises(SystemExit, match="add --tiny"):
        gpu.resolve_device("cpu", tiny=False)


def test_a_log_goes_on_where_a_run_ended(tmp_path: Path) -> None:
    def checks(value: float) -> Iterator[Check]:
        yield Check("time", value, "ms", 10.0, 0.8, 1.2)
        if value < 0:
            raise ValueError("no such kernel")

    path = tmp_path / "gpu.jsonl"
    first = Log(path)
    assert len(list(first.run({"a": lambda: checks(11.0)}))) == 1 and first.right
    again = Log(path)
    later = list(again.run({"a": lambda: checks(0.0), "b": lambda: checks(13.0), "c": lambda: checks(-1.0)}))
    assert [(section, check.right) for section, check in later] == [("b", False), ("c", False), ("c", False)]
    assert [check.value for _, check in again.checks[:2]] == [11.0, 13.0] and not again.right
    assert "no such kernel" in again.checks[-1][1].what
