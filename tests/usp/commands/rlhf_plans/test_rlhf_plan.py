"""python -m usp rlhf-plan: what it prints and writes, and bad input."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from usp.__main__ import main
from usp.commands.flags import parse
from usp.commands.rlhf_plan import RlhfPlanConfig, _question
from usp.planning.rlhf_question import RlhfQuestion, _generation_seconds, with_fastest_slots
from usp.rlhf.plan.plan import from_mapping
from usp.rlhf.runtime.measure import LENGTHS_FILE, StepLengths

PLAN = ["rlhf-plan", "--actor", "llama3-8b", "--world-size", "8", "--max-sp", "1", "--budget", "0", "--repeatable"]
SMALL = [*PLAN, "--prompts", "16", "--prompt-tokens", "128", "--response-tokens", "32,128"]


@pytest.mark.slow
def test_the_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, trace = tmp_path / "plan.yaml", tmp_path / "step.json"
    files = ["--out", str(out), "--trace", str(trace), "--options", "mini_batches=1"]
    assert main([*SMALL, *files, "--algorithm", "grpo", "--reward", "function"], {}) == 0
    printed = capsys.readouterr().out
    for word in ("actor_generate", "heuristic", "separation"):
        assert word in printed
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
        (["--response-tokens", "many"], "--response-tokens = many: many must be a number of tokens"),
        (["--algorithm", "dpo"], "--algorithm = 'dpo' must be one of ppo, grpo,"),
        (["--options", "mini_batch=2"], "--options = mini_batch=2: unknown 'mini_batch'"),
        (["--hardware", "h1000"], "h1000"),
        (["--out", "plan.txt"], "--out"),
        (["--actor", "llama2-70b", "--world-size", "4", "--hardware", "l20"], "The nearest: actor_train needs"),
        (["--world-size", "1"], " ranks, where one fits, or devices with more memory"),
    ],
)
@pytest.mark.slow(but=7)
def test_bad_input_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *flags], {}) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_rollouts_whose_cache_is_too_large_are_told_how_many_fit(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--world-size", "16", "--max-sp", "8", "--prompts", "16", "--response-tokens", "1M"]
    assert main([*PLAN, *flags], {}) == 1
    told = capsys.readouterr().err
    assert told.startswith("reading the models") and "with which rollouts fit" in told
    slots = re.search(r"Use --slots (\d+),", told)
    assert slots and int(slots[1]) < 64


@pytest.mark.slow
def test_generation_decodes_as_many_sequences_at_a_time_as_is_fastest() -> None:
    def asked(tokens: str) -> RlhfQuestion:
        flags = [*PLAN[1:], "--world-size", "16", "--max-sp", "8", "--prompts", "16", "--response-tokens", tokens]
        return _question(parse(flags, RlhfPlanConfig))

    def seconds(slots: int) -> float:
        other = replace(long, options=replace(long.options, slots=slots))
        return _generation_seconds(other, math.inf)[0]

    long, short = asked("1M"), asked("1024")
    assert with_fastest_slots(short, math.inf) is short
    slots = with_fastest_slots(long, math.inf).options.slots
    assert 1 <= slots < 64 == long.options.slots
    assert seconds(slots) < 0.97 * seconds(2 * slots)
    assert seconds(slots) <= 1.03 * seconds(slots // 2 or 1)
    assert with_fastest_slots(long, 0.0) is long


@pytest.mark.slow
def test_steps_and_samples_have_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--price", "2"], {}) == 0
    assert re.search(r"a step costs [\d.]+, a sample [\d.e-]+, in the unit of --price", capsys.readouterr().out)
