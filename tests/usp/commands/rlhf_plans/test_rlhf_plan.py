"""python -m usp rlhf-plan: what it prints and writes, and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from usp.__main__ import main
from usp.rlhf.plan.plan import from_mapping
from usp.rlhf.runtime.measure import LENGTHS_FILE, StepLengths

PLAN = ["rlhf-plan", "--actor", "llama3-8b", "--world-size", "8", "--max-sp", "1", "--budget", "0", "--repeatable"]
SMALL = [*PLAN, "--prompts", "16", "--prompt-tokens", "128", "--response-tokens", "32,128"]


@pytest.mark.slow
def test_the_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, trace = tmp_path / "plan.yaml", tmp_path / "step.json"
    files = ["--out", str(out), "--trace", str(trace), "--options", "mini_batches=1", "--price", "2"]
    assert main([*SMALL, *files, "--algorithm", "grpo", "--reward", "function"], {}) == 0
    printed = capsys.readouterr().out
    assert "heuristic" in printed and re.search(r"a step costs [\d.]+, a sample [\d.e-]+, in the unit of", printed)
    plan = from_mapping(yaml.safe_load(out.read_text()))
    assert set(plan.calls) >= {"actor_generate", "actor_train"}
    slices = json.loads(trace.read_text())["traceEvents"]
    assert set(plan.calls) <= {each["name"] for each in slices}


@pytest.mark.slow
def test_a_plan_for_the_lengths_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*flags: str) -> str:
        assert main([*PLAN, *flags], {}) == 0
        return re.sub(r"simulated in [\d.]+ s", "", capsys.readouterr().out)

    file = tmp_path / LENGTHS_FILE
    file.parent.mkdir()
    lengths = {step: StepLengths((64,) * 16, (tokens,) * 16, 1) for step, tokens in ((1, 32), (2, 256))}
    steps = [json.dumps({"step": step, **asdict(of_step)}) for step, of_step in lengths.items()]
    file.write_text("\n".join([*steps, '{"step": 3, "pro']))  # killed while it wrote step 3
    flags = ("--prompts", "16", "--prompt-tokens", "64", "--response-tokens")
    assert planned("--workload", str(tmp_path)) == planned(*flags, "256") != planned(*flags, "32")
    for wrong, said in (
        (["--workload", str(tmp_path), "--prompts", "16"], "--prompts and --workload exclude each other"),
        (["--workload", str(tmp_path / "no")], "is not the folder of an RLHF run that generates"),
    ):
        assert main([*PLAN, *wrong], {}) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--world-size", "0"], "--world-size = 0 must be at least 1"),
        (["--response-tokens", "9,3"], "--response-tokens = 9,3 must be positive and ascending"),
        (["--algorithm", "dpo"], "--algorithm = 'dpo' must be one of ppo, grpo,"),
        (["--options", "mini_batch=2"], "--options = mini_batch=2: unknown 'mini_batch'"),
        (["--hardware", "h1000"], "h1000"),
        (["--out", "plan.txt"], "--out"),
        (["--actor", "llama2-70b", "--world-size", "4", "--hardware", "l20"], "The nearest: actor_train needs"),
        (["--world-size", "1"], "Use more ranks, devices with more memory, "),
        (["--world-size", "16", "--max-sp", "8", "--response-tokens", "1M"], "fewer --slots"),
    ],
)
@pytest.mark.slow(but=6)
def test_bad_input_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *flags], {}) == 1
    assert said in capsys.readouterr().err
