"""python -m usp time: the parts of a step, both MFUs, and a run beside the prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.usp.hf.test_every_model import tiny_config
from usp.__main__ import main
from usp.config import TrainConfig
from usp.parallel import load_hardware
from usp.planning.step_report import StepReport
from usp.train.dry_run import dry_run
from usp.train.resolve import job_of, trained_model

ASKED = ["time", "--model", "llama3-8b", "--seq-len", "131072"]
ASKED += ["--sp-ulysses", "8", "--world-size", "64", "--ac", "full"]


def report(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*ASKED, "--json", *more]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    found: dict[str, Any] = json.loads(shown.out)
    return found


def test_parts_add_up_and_both_mfus_are_those_of_their_papers(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert sum(found["memory_parts"].values()) == found["memory_bytes"] < found["memory_limit_bytes"]
    # PaLM's appendix B: 6N + 12 LHQT per token; N without the embedding, which multiplies nothing.
    layers, heads, head_dim, hidden, mlp, kv_heads, vocabulary = 32, 32, 128, 4096, 14336, 8, 128256
    weights = layers * (2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * mlp) + hidden * vocabulary
    per_token = 6 * weights + 12 * layers * heads * head_dim * 131072
    assert found["tokens"] == 8 * 131072
    mfu = per_token * found["tokens"] / found["seconds"] / (64 * 989.4e12)
    assert found["unmasked_mfu"] == pytest.approx(mfu, rel=1e-3)
    assert found["unmasked_mfu"] > 1.5 * found["mfu"]
    compiled, part = report(capsys, "--compile"), "memory-bound operators"
    assert compiled["parts"][part] < 0.6 * found["parts"][part] and compiled["seconds"] < found["seconds"]


SHORT: dict[str, Any] = {"seq_len": 64, "batch_size": 8, "micro_batches": 8}  # most is read and written of weights


@pytest.mark.parametrize(
    ("flags", "axes", "world"),
    [
        ({"model": "tiny", "seq_len": 2048, "ac": "full", "sp_ulysses": 2}, ["ulysses"], 4),
        ({"model": "tiny", **SHORT, "zero": 3}, [], 4),
        ({"model": "tiny", **SHORT, "zero": 1}, [], 4),
        ({"model": "tiny", **SHORT, "zero": 3}, [], 1),
        ({"model": "qwen3-moe-tiny", **SHORT, "ep": 2}, ["ep"], 4),
    ],
    ids=str,
)
@pytest.mark.slow(full=2)
def test_a_dry_run_takes_the_compute_of_the_formulas(flags: dict[str, Any], axes: list[str], world: int) -> None:
    """Formulas leave out memory-bound operators that a dry run counts, such as casts of rotary tables."""
    config, hardware = TrainConfig(dtype="bfloat16", **flags), "h100"
    job = job_of(config, trained_model(config, weights=False), world)
    formula = StepReport(job, load_hardware(hardware))
    counted = replace(formula, runs=(dry_run(config, world, world - 1),))
    ours, theirs = counted.time, formula.time
    assert ours.compute.matmul == pytest.approx(theirs.compute.matmul, rel=1e-6)
    assert ours.compute.attention == pytest.approx(theirs.compute.attention, rel=1e-6)
    assert 1 < ours.compute.memory / theirs.compute.memory < 1.3
    assert ours.causal_flops == theirs.causal_flops
    for axis in axes:
        assert ours.communication[axis].exposed == pytest.approx(theirs.communication[axis].exposed, rel=0.01)
    assert counted.memory.peak.total == pytest.approx(formula.memory.peak.total, rel=0.05)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("falcon_h1", ["--sp-ulysses", "2"]),
        pytest.param(
            *("deepseek_v3", ["--pp", "2", "--batch-size", "2", "--micro-batches", "2"]), marks=pytest.mark.exhaustive
        ),
        ("llama", ["--lora-rank", "4"]),
    ],
)
@pytest.mark.slow
def test_models_without_formulas_are_counted(
    family: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    assert main(["time", "--model", str(tmp_path), "--seq-len", "64", "--world-size", "2", *flags, "--json"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown[shown.index("{") :])  # after what optional packages print
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"]) and found["fits"]
    assert sum(found["memory_parts"].values()) == found["memory_bytes"] > 0 < found["mfu"]
