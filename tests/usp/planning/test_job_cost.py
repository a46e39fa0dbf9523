"""Hours and money of a whole job."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from usp.__main__ import main
from usp.planning.job_cost import FAILURES, JobCost, Terms, job_cost, job_grid, verdicts


def test_a_job_takes_its_steps_and_what_failures_lose() -> None:
    terms = Terms(tokens=10**9, prices={"h100": 2.0}, checkpoint_minutes=30, restart_minutes=15)
    alone = job_cost(Terms(tokens=10**9, failures=0.0), "H100", 8, step_seconds=3.6, step_tokens=10**6)
    assert (alone.hours, alone.lost, alone.device_hours, alone.money) == (1.0, 0.0, 8.0, None)
    found = job_cost(terms, "H100", 8, step_seconds=3.6, step_tokens=10**6)
    per_hour = FAILURES * 8
    assert found.lost == pytest.approx(per_hour * 0.5)  # half an interval, and a restart
    assert found.hours == pytest.approx(1 + per_hour * found.hours * 0.5)
    assert found.money == pytest.approx(2 * 8 * found.hours)
    # Llama 3: 419 interruptions in 54 days of 16,384 devices
    assert pytest.approx(419) == FAILURES * 16384 * 54 * 24
    lost = job_cost(Terms(failures=0.01), "H100", 1024, 1.0, 1000)
    assert math.isinf(lost.hours) and job_grid(Terms(), [("a", lost)]).rows[0][1] == "never ends"


def test_the_cheapest_and_the_fastest_keep_the_deadline_and_no_price_is_guessed() -> None:
    def job(hours: float, money: float | None, devices: int = 8) -> JobCost:
        return JobCost(hours, 0.0, devices * hours, money)

    jobs = [("slow", job(10, 50.0)), ("fast", job(2, 90.0)), ("worse", job(3, 95.0))]
    assert verdicts(Terms(), jobs) == ["fastest: fast, 2.00 h", "cheapest: slow, 50.00"]
    assert verdicts(Terms(deadline=5), jobs) == ["fastest: fast, 2.00 h", "cheapest: fast, 90.00"]
    assert verdicts(Terms(deadline=1), jobs)[0] == "no plan keeps the deadline of 1.00 h"
    unknown = [*jobs, ("other", job(1, None))]
    assert verdicts(Terms(), unknown)[-1] == "cost unknown: no --price for other"
    assert job_grid(Terms(), unknown).rows[-1][4] == "no price"
    assert Terms(prices={"h100": 2.0}).price("A100") is None and Terms(prices={"": 3.0}).price("A100") == 3.0


@pytest.mark.slow
def test_kinds_and_numbers_of_devices_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("h100: 2.5\n")
    flags = ["--model", "llama3-8b", "--seq-len", "8K", "--global-batch-size", "16", "--train-tokens", "1.5T"]
    several = ["--hardware", "h100,a100", "--world-size", "2,16", "--price", str(prices)]
    assert main(["plan", *flags, *several]) == 0
    shown = capsys.readouterr().out
    assert "The whole job: 1,500B tokens" in shown and "fastest: 16 x H100" in shown and "cheapest: " in shown
    assert "A100" in shown.split("cost unknown: no --price for")[1]
    assert main(["plan", *flags, *several, "--out", str(tmp_path / "plan.yaml")]) == 1
    assert "--out needs one plan" in capsys.readouterr().err
    assert main(["plan", *flags, "--world-size", "8", "--price", "cheap"]) == 1
    assert "--price cheap must be a price" in capsys.readouterr().err
