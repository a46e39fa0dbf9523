"""The GPU benchmark: its runner keeps what sections find whatever happens to them, and all run on toy sizes."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.expected import EXPECTED, check_of
from benchmarks.gpu.runner import LATE, ROOT, Options, fitting, last_result, run
from benchmarks.gpu.sections import SECTIONS, Job, Section
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.summary import DONE, NEVER, Result, read_entries
from benchmarks.harness.checks import Check

GIVEN = "tests.benchmarks.planted"


def planted(name: str, seconds: float = 1.0, limit: float = 0.0) -> Section:
    return Section(name, f"{GIVEN}:{name}", seconds, f"what {name} does", limit)


def options(output: Path, **changes: object) -> Options:
    return Options(**{"output": output, "device": "cpu", "tiny": True, **changes})  # type: ignore[arg-type]


def outcomes(sections: tuple[Section, ...], output: Path) -> dict[str, str]:
    return {section.name: last_result(section, output).outcome for section in sections}


def text(output: Path, name: str, attempt: int = 1) -> str:
    return (output / name / str(attempt) / "log.txt").read_text()


# What the runner does with sections that go wrong


@pytest.mark.slow
def test_each_failure_is_reported_the_rest_runs_and_a_repeat_runs_only_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = ("raises", "aborts", "exits", "hangs", "not_a_number", "wrong_kernel", "mends_itself", "fine")
    sections = tuple(planted(name, limit=1.0 if name == "hangs" else 0.0) for name in names)
    assert run(sections, options(tmp_path)) == 1
    first = outcomes(sections, tmp_path)
    assert first["raises"] == first["mends_itself"] == "failed: exit code 1"
    assert first["aborts"] == "crashed: SIGABRT" and first["exits"] == "failed: exit code 0"
    assert first["hangs"].startswith("stopped after")
    assert first["not_a_number"] == "wrong: merge: error of out"
    assert first["wrong_kernel"].startswith("wrong: sdpa, causal: error, sdpa, full: error")
    assert first["fine"] == DONE
    # whole tracebacks: of the exception, of the crash, and of where it hangs
    assert "planted.py" in text(tmp_path, "raises") and "but others" in text(tmp_path, "raises")
    assert "Fatal Python error: Aborted" in text(tmp_path, "aborts") and "in aborts" in text(tmp_path, "aborts")
    assert "in hang_here" in text(tmp_path, "hangs")
    # figures from before the failure are kept
    for name in ("raises", "aborts", "exits", "hangs"):
        assert [check.value for check in last_result(planted(name), tmp_path).checks] == [1e-9]
    shown = capsys.readouterr().out
    assert "ERROR: ValueError: no such kernel" in shown and "merge: error of out  1e-09  1e-06  0.00  ok" in shown
    table = (tmp_path / "summary.md").read_text()
    for name, outcome in first.items():
        assert f"| {name} | {outcome} |" in table
    assert "| merge: error of out | nan | 1e-06 | nan | OUT OF TOLERANCE | rounding of float32" in table
    assert last_result(planted("not_a_number"), tmp_path).entries[1]["value"] == "nan"

    assert run(sections[4:], options(tmp_path)) == 1
    again = {section.name: last_result(section, tmp_path).attempts for section in sections}
    assert {name for name, attempts in again.items() if attempts == 2} == {
        "not_a_number", "wrong_kernel", "mends_itself"
    }  # fmt: skip
    assert outcomes(sections, tmp_path)["mends_itself"] == DONE
    assert "not yet" in text(tmp_path, "mends_itself") and not (tmp_path / "fine" / "2").exists()
    assert run(sections, options(tmp_path, names=("mends_itself", "fine"))) == 0  # nothing is run
    assert run(sections, options(tmp_path, names=("fine",), again=True)) == 0
    assert (tmp_path / "fine" / "2").exists()


def test_a_measurement_that_is_out_of_tolerance_is_to_be_looked_at_and_not_repeated(tmp_path: Path) -> None:
    for _ in range(2):
        assert run((planted("slow"),), options(tmp_path, tiny=False)) == 1
    result = last_result(planted("slow"), tmp_path)
    assert result.outcome == DONE and result.attempts == 1 and not result.right


@pytest.mark.slow
def test_a_kill_leaves_what_was_there_and_takes_the_section_with_it(tmp_path: Path) -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # ignored in a shell's background
        "from pathlib import Path; from benchmarks.gpu.runner import Options, run; "
        "from benchmarks.gpu.sections import Section; "
        f"run((Section('hangs', '{GIVEN}:hangs', 1, '', 60),), Options(Path({str(tmp_path)!r}), 'cpu', True))"
    )
    for kill in (signal.SIGKILL, signal.SIGINT):
        runner = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        attempt = tmp_path / "hangs" / ("1" if kill == signal.SIGKILL else "2")
        wait_for(lambda at=attempt: len(read_entries(at / "figures.jsonl")) == 2)  # type: ignore[misc]
        (worker,) = children(runner.pid)
        runner.send_signal(kill)
        runner.wait(30)
        wait_for(lambda pid=worker: not alive(pid))  # type: ignore[misc]
        assert json.loads((attempt / "figures.jsonl").read_text().splitlines()[1])["value"] == 1e-9
        assert last_result(planted("hangs"), tmp_path).outcome == NEVER


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_minutes_pick_what_fits_and_bound_the_run(tmp_path: Path) -> None:
    sections = tuple(Section(str(seconds), f"{GIVEN}:fine", seconds, "") for seconds in (60, 90, 20, 30))
    assert [each.name for each in fitting(sections, 2.0)] == ["60", "20", "30"]
    assert fitting(sections, None) == list(sections)
    # The first takes longer than expected, so that the second has no time left: what was picked has not been run.
    pair = (planted("hangs", 1.0), planted("fine", 1.0))
    assert run(pair, options(tmp_path, minutes=2.5 / 60)) == 1
    assert outcomes(pair, tmp_path)["hangs"].startswith("stopped after")
    assert f"| fine | {LATE} |" in (tmp_path / "summary.md").read_text()
    assert run(pair, options(tmp_path, names=("fine",), minutes=0.5 / 60)) == 0  # left out


def test_an_output_belongs_to_one_device_and_size(tmp_path: Path) -> None:
    assert run((), options(tmp_path)) == 0
    with pytest.raises(ValueError, match="has results of"):
        run((), options(tmp_path, device="cuda", tiny=False))
    with pytest.raises(ValueError, match="--sections fin: no such section; there are fine"):
        run((planted("fine"),), options(tmp_path, names=("fin",)))


def test_flags(capsys: pytest.CaptureFixture) -> None:
    found = program.options_of(["--device", "cpu", "--tiny", "--sections", "kernels", "ring", "--minutes", "4"])
    assert found == Options(Path("runs/gpu-tiny"), "cpu", True, 4.0, ("kernels", "ring"))
    assert program.options_of([]) == Options(Path("runs/gpu"))
    with pytest.raises(SystemExit):
        program.options_of(["--device", "cpu"])
    assert "add --tiny" in capsys.readouterr().err


def test_it_refuses_to_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        Setup.of("cuda", False, tmp_path)


# Figures and what is expected of them


def test_a_figure_is_right_within_its_tolerance_only() -> None:
    assert Check("", 12.0, "", 10.0, 0.8, 1.2).right and not Check("", 12.1, "", 10.0, 0.8, 1.2).right
    assert Check("", 0.0, "", 0.0).right and not Check("", 1.0, "", 0.0).right
    for value in (math.nan, math.inf):
        assert not any(Check("", value, "", expected).right for expected in (0.0, 1.0, math.nan))
    assert Check("", 3.0).right


def test_times_are_not_expected_of_a_rehearsal() -> None:
    assert not check_of("copy to the host", 900.0, tiny=False).right
    assert check_of("copy to the host", 900.0, tiny=True).right
    assert check_of("sdpa, causal: error", 1e-4, tiny=False).right
    assert not check_of("sdpa, causal: error", 1e-4, tiny=True).right


def test_the_expected_seconds_fit_into_eight_minutes_and_stand_in_the_docs() -> None:
    assert sum(section.seconds for section in SECTIONS) <= 480
    document = (ROOT / "docs" / "gpu.md").read_text()
    for section in SECTIONS:
        assert f"| `{section.name}` | {section.seconds:.0f} |" in document
    assert f"| all | {sum(section.seconds for section in SECTIONS):.0f} |" in document


# The sections themselves, in this process


def cases() -> Iterator[Any]:
    for section in SECTIONS:  # what starts programs, which take long to import what they need, is exhaustive
        marks = [pytest.mark.exhaustive] * (section.name == "train.py")
        yield pytest.param(section, id=section.name, marks=marks)


@pytest.mark.parametrize("section", list(cases()))
@pytest.mark.slow(but=1)
def test_every_section_runs_on_toy_sizes(section: Section, tmp_path: Path) -> None:
    checks, notes = measured(section, tmp_path)
    assert not [check for check in checks if not check.right], notes
    # sdpa is the CPU's kernel, of which no rate is expected
    assert not [check.what for check in checks if check.what not in EXPECTED and "sdpa, " not in check.what]
    assert checks


def measured(section: Section, folder: Path) -> tuple[list[Check], list[str]]:
    module, _, function = section.run.partition(":")
    found: Iterator[Any] = getattr(importlib.import_module(module), function)(Job("cpu", True, folder))
    items = list(found)
    checks = [check_of(*item, tiny=True) for item in items if not isinstance(item, str)]
    return checks, [item for item in items if isinstance(item, str)]


@pytest.mark.exhaustive
def test_the_whole_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--output", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout
    assert "all within tolerance" in first.stdout and (tmp_path / "environment" / "1" / "environment.json").exists()
    assert all(last_result(section, tmp_path).right for section in SECTIONS)
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.stdout.count("has ended well before") == len(SECTIONS)


def test_a_result_is_right_only_if_it_ended_well() -> None:
    assert not Result(planted("fine")).right and Result(planted("fine"), DONE).right
