"""The benchmark of GRPO steps: what it counts, and our side of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.rlhf import grpo_step
from benchmarks.rlhf.grpo_systems import ENGINE, PHASES, TOKENS, Job, Phases


def test_a_phase_does_not_count_those_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "process_time", lambda: now)
    phases = Phases()

    def work(seconds: float) -> str:
        nonlocal now
        now += seconds
        return "abc"

    generate = phases.counted("generate", work, len)
    for seconds in (1.0, 2.0):
        with phases.phase("inference"):
            work(4 * seconds)
            generate(8 * seconds)
        work(seconds)
        phases.end_step()
    first, second = phases.steps
    assert first == {**dict(zip(PHASES, (8.0, 0.0, 4.0, 1.0), strict=True)), TOKENS: 3}
    assert second == {**dict(zip(PHASES, (16.0, 0.0, 8.0, 2.0), strict=True)), TOKENS: 3}
    rows = list(grpo_step.rows_of(1, {"ours": [first], "trl": [second]}))
    assert rows[-1] == ("1", "step", "13.00", "26.00", "0.50") and len(rows) == 4


def test_without_trl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_step, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["grpo_step"])
    with pytest.raises(SystemExit, match="TRL, which is not installed: pip install trl"):
        grpo_step.main()


@pytest.mark.exhaustive
def test_our_steps_are_counted(tmp_path: Path) -> None:
    grpo_step.prepare(tmp_path, prompts=8)
    (step,) = grpo_step.run("ours", Job(str(tmp_path), "small", 2, ranks=1, prompts=2, group_size=2, new_tokens=4))
    assert all((step[phase] > 0) == (phase != ENGINE) for phase in PHASES) and 4 <= step[TOKENS] <= 16
