"""What train.py predicts before its first step is what the commands for it say."""

from __future__ import annotations

import time

import pytest

from parallel import load_hardware
from usp.commands.train import prepare_run
from usp.config import TrainConfig
from usp.cost.job import job_of
from usp.cost.memory.footprint import largest_footprint
from usp.cost.run_summary import WIDTH, run_summary
from usp.cost.time.step_time import step_seconds
from usp.curriculum import CurriculumStage
from usp.run.launch import Launch
from usp.run.metrics import size
from usp.train.resolve import trained_model


def test_a_run_on_known_hardware() -> None:
    config = TrainConfig(
        model="llama3-8b", seq_len=2**17, sp_ulysses=8, sp_ring=2, pp=2, ac="full", ac_offload=True, micro_batches=2,
        batch_size=2,
    )  # fmt: skip
    job, hardware = job_of(config, trained_model(config), 64), load_hardware("h100")
    begin = time.perf_counter()
    first, *lines = run_summary(job, 80 * 2**30, hardware)
    assert time.perf_counter() - begin < 0.5
    memory, text, seconds = largest_footprint(job)[0], " ".join(" ".join(lines).split()), step_seconds(job, hardware)
    assert first == "predicted:" and all(line.startswith("  ") and len(line) <= WIDTH + 2 for line in lines)
    for part in (
        "ZeRO-3 over 32 ranks", "of 8.0G parameters on a rank", f"{size(memory.peak.total)} of 80.0 GiB",
        f"{size(memory.host)} of host memory", "per step and rank: ", "fsdp", "ulysses", "ring",
        f"{seconds.total:.2f} s on ",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ({}, 1),
        ({"curriculum": (CurriculumStage(1, seq_len=256), CurriculumStage(1, seq_len=512, sp_ring=2))}, 2),
        ({"optimizer": "muon"}, 0),
    ],
)
def test_rank_0_says_it_where_there_are_formulas(flags: dict[str, object], stages: int) -> None:
    config = TrainConfig(seq_len=256, device="cpu", **flags)  # type: ignore[arg-type]
    for rank in (0, 1):
        prepared = prepare_run(config, Launch(rank=rank, world_size=2, local_world_size=2))
        assert len(prepared.predicted) == stages
        for predicted in prepared.predicted:
            assert predicted.fsdp_bytes > 0 and bool(predicted.summary) == (rank == 0)
            assert not any(line.startswith("  step") for line in predicted.summary)  # a CPU is no known hardware
