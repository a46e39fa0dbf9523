"""What train.py predicts before its first step is what the commands for it say."""

from __future__ import annotations

import time

import pytest

from usp.config import CurriculumStage, TrainConfig
from usp.parallel import load_hardware
from usp.predict.memory import largest_footprint
from usp.predict.seconds import step_seconds
from usp.run.launch import Launch
from usp.run.metrics import size
from usp.train.prepare import prepare
from usp.train.resolve import job_of, trained_model
from usp.train.summary import WIDTH, predicted_job, predicted_lines, run_summary


def test_a_run_on_known_hardware() -> None:
    config = TrainConfig(
        model="llama3-8b", seq_len=2**17, sp_ulysses=8, sp_ring=2, pp=2, ac="full", ac_offload=True, micro_batches=2,
        batch_size=2,
    )  # fmt: skip
    job, hardware = job_of(config, trained_model(config), 64), load_hardware("h100")
    begin = time.process_time()
    first, *lines = run_summary(job, 80 * 2**30, hardware)
    assert time.process_time() - begin < 0.5
    memory, text, seconds = largest_footprint(job)[0], " ".join(" ".join(lines).split()), step_seconds(job, hardware)
    assert first == "predicted:" and all(line.startswith("  ") and len(line) <= WIDTH + 2 for line in lines)
    for part in (
        "ZeRO-3 over 32 ranks", "of 8.0G parameters on a rank", f"{size(memory.peak.total)} of 80.0 GiB",
        f"{size(memory.host)} of host memory", "per step and rank: ", "fsdp", "ulysses", "ring",
        f"{seconds.total:.2f} s on ",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    "flags", [{}, {"curriculum": (CurriculumStage(1, seq_len=256), CurriculumStage(1, seq_len=512, sp_ring=2))}]
)
def test_every_stage_has_a_summary(flags: dict[str, object]) -> None:
    prepared = prepare(TrainConfig(seq_len=256, device="cpu", **flags), Launch(0, 2, 0, 2))  # type: ignore[arg-type]
    for stage in prepared.stages:
        job = predicted_job(stage.config, prepared)
        assert job is not None
        text = "\n".join(predicted_lines(job, prepared))
        assert "parameters on a rank" in text and "per step and rank" in text
        assert "\n  step" not in text  # a CPU is no known hardware


def test_on_one_rank_nothing_is_said_of_ranks() -> None:
    prepared = prepare(TrainConfig(seq_len=256, device="cpu"), Launch(0, 1, 0, 1))
    job = predicted_job(prepared.config, prepared)
    assert job is not None
    text = "\n".join(predicted_lines(job, prepared))
    assert "memory" in text and "rank" not in text
