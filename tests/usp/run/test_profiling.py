"""Which steps are traced, and what the traces hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankPool
from usp.run.metrics import StepProfiler, parse_steps


@pytest.mark.parametrize(
    ("text", "steps"), [("", []), ("3", [3]), ("5:8", [5, 6, 7, 8]), ("2:2", [2])], ids=["none", "one", "some", "same"]
)
def test_steps_are_read(text: str, steps: list[int]) -> None:
    assert list(parse_steps(text, 8)) == steps


@pytest.mark.parametrize("text", ["0", "8:5", "1:2:3", "a", "3:", ":3", "-1", "1.5", " ", "²"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--profile .* must be a step, such as 3, or a range of steps, such as 5:8"):
        parse_steps(text, 8)


@pytest.mark.parametrize("text", ["50", "3:4"])
def test_steps_behind_the_last_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"--profile {text} names step \d+, but the run ends at step 3"):
        parse_steps(text, 3)


def trace(steps: range, begin: int, end: int, folder: Path) -> None:
    rank = dist.get_rank()
    profiler = StepProfiler(steps, folder, rank, torch.device("cpu"))
    for number in range(begin, end):
        with profiler.step(number):
            dist.all_reduce(torch.ones(4))


def names(file: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]


def test_every_rank_traces_its_steps(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(trace, 2, range(2, 4), 1, 6, tmp_path)
    for rank in range(2):
        found = names(tmp_path / "profile" / f"rank-{rank}.json.gz")
        assert [name for name in dict.fromkeys(found) if name.startswith("step ")] == ["step 2", "step 3"]
        assert any("all_reduce" in name or "allreduce" in name for name in found)


def test_a_resumed_run_traces_the_rest_of_the_steps(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(trace, 1, range(2, 6), 4, 7, tmp_path)  # continued after step 3
    found = set(names(tmp_path / "profile" / "rank-0.json.gz"))
    assert {name for name in found if name.startswith("step ")} == {"step 4", "step 5"}
    ranks.run(trace, 1, range(8, 9), 1, 3, tmp_path / "none")
    assert not (tmp_path / "none").exists()
