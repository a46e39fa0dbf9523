"""The GPU benchmark runs on toy sizes without a GPU, and refuses full sizes there."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu
from benchmarks.training_step import LLAMA3_8B, fitting


def test_every_measurement_runs_on_toy_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", "--tiny"])
    gpu.main()
    printed = capsys.readouterr().out
    for what in (
        "torch SDPA",
        "one block without a mask",
        "rates for a node file: {",
        "rank 0 of a ring of 4",
        "training step, toy geometry, 2 layers",
    ):
        assert what in printed


def test_it_refuses_to_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        gpu.resolve_device("cuda", tiny=False)
    with pytest.raises(SystemExit, match="add --tiny"):
        gpu.resolve_device("cpu", tiny=False)


def test_layers_are_limited_by_memory() -> None:
    assert fitting(LLAMA3_8B, 1 << 40).layers == 32
    assert 1 <= fitting(LLAMA3_8B, 120 << 30).layers < 32
    with pytest.raises(RuntimeError, match="one layer of llama3-8b at 32,768 tokens does not fit 1 GiB"):
        fitting(LLAMA3_8B, 1 << 30)
