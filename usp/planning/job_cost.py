"""What a whole training job takes: device-hours, wall-clock time with restarts, and money. Pure.

A failure stops all devices. The work since the last checkpoint, half an interval on average, is done again after the
restart (Young, 1974, "A first order approximation to the optimum checkpoint interval"); saving overlaps with steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType

from usp.run.tables import Grid

# Llama 3 405B: 419 unexpected interruptions in 54 days of 16,384 H100 (arXiv 2407.21783, section 3.3.4).
FAILURES = 419 / (54 * 24 * 16384)  # per device-hour
BILLION = 10**9


@dataclass(frozen=True)
class Terms:
    """What is asked of a job."""

    tokens: int = 0  # to train on; 0: not asked
    prices: Mapping[str, float] = field(default_factory=dict)  # of a device-hour by name in lower case; "": of any
    deadline: float = math.inf  # hours of wall-clock time
    failures: float = FAILURES  # of a device in an hour
    checkpoint_minutes: float = 30.0  # between checkpoints
    restart_minutes: float = 15.0  # from a failure to the next step

    @property
    def asked(self) -> bool:
        """Whether anything was asked of the job."""
        return bool(self.tokens or self.prices or self.deadline < math.inf)

    @property
    def trained(self) -> int:
        """The tokens that times and costs are for: a billion if none are asked."""
        return self.tokens or BILLION

    def price(self, hardware: str) -> float | None:
        """Return the price of a device-hour; None if none is stated."""
        return self.prices.get(hardware.lower(), self.prices.get(""))


@dataclass(frozen=True)
class JobCost:
    """What a job takes: wall-clock hours with restarts (inf if it never ends), the share of them that failures take,
    device-hours, and money; None without a price."""

    hours: float
    lost: float
    device_hours: float
    money: float | None

    def late(self, terms: Terms) -> bool:
        return self.hours > terms.deadline


Jobs = Sequence[tuple[str, JobCost]]  # by the texts that name them


def job_cost(terms: Terms, hardware: str, devices: int, step_seconds: float, step_tokens: int) -> JobCost:
    """Return what a job of steps of so many seconds and tokens takes."""
    lost = terms.failures * devices * (terms.checkpoint_minutes / 2 + terms.restart_minutes) / 60
    working = terms.trained / step_tokens * step_seconds / 3600
    hours = working / (1 - lost) if lost < 1 else math.inf
    price = terms.price(hardware)
    return JobCost(hours, min(1.0, lost), devices * hours, None if price is None else devices * hours * price)


def job_grid(terms: Terms, jobs: Jobs) -> Grid:
    """Return the table of jobs."""
    heading = (
        f"{'The whole job' if terms.tokens else 'Each job'}: {terms.trained / BILLION:,g}B tokens, "
        f"{1000 * terms.failures:.3g} failures in 1,000 device-hours, a checkpoint every {terms.checkpoint_minutes:g} "
        f"and restarts of {terms.restart_minutes:g} minutes{'; cost in the unit of --price' if terms.prices else ''}"
    )
    rows = []
    for name, job in jobs:
        money = "no price" if job.money is None else money_text(job.money)
        deadline = "" if math.isinf(terms.deadline) else "missed" if job.late(terms) else "kept"
        cells = (hours_text(job.hours), f"{job.device_hours:,.1f}", f"{job.lost:.1%}", money, deadline)
        rows.append((name, *(("never ends", "", "100%", "", "missed") if math.isinf(job.hours) else cells)))
    return Grid(heading, ("", "wall-clock", "device-hours", "lost to failures", "cost", "deadline"), tuple(rows))


def with_jobs(terms: Terms, jobs: Jobs, grid: Grid, lines: Sequence[str]) -> Group:
    """Return a table and lines for rich to print, and between them the jobs and what they come to, if there are any."""
    about: list[RenderableType] = [job_grid(terms, jobs).table(), *verdicts(terms, jobs)] if jobs else []
    return Group(grid.table(), *about, *lines)


def money_text(money: float) -> str:
    return f"{money:,.2f}" if money < 1000 else f"{money:,.0f}"


def hours_text(hours: float) -> str:
    """Return hours, or days from two of them on."""
    return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:.2f} h"


def step_cost_text(seconds: float, devices: int, samples: int, hardware: str, price: float | None) -> str:
    """Return what a step and each of its samples cost."""
    if price is None:
        return f"cost unknown: no --price for {hardware}"
    cost = devices * seconds / 3600 * price
    return f"a step costs {cost:,.4g}, a sample {cost / samples:,.4g}, in the unit of --price"


def verdicts(terms: Terms, jobs: Jobs) -> list[str]:
    """Return the fastest and the cheapest job, of those that keep the deadline if any does, and what has no price."""
    kept = [pair for pair in jobs if not pair[1].late(terms) and pair[1].hours < math.inf]
    among = kept or list(jobs)
    name, job = min(among, key=lambda pair: pair[1].hours)
    lines = [] if kept else [f"no plan keeps the deadline of {hours_text(terms.deadline)}"]
    lines.append(f"fastest: {name}, {hours_text(job.hours)}")
    if priced := [(name, job.money) for name, job in among if job.money is not None]:
        name, money = min(priced, key=lambda pair: pair[1])
        lines.append(f"cheapest: {name}, {money_text(money)}")
    return lines + missing_prices(jobs)


def missing_prices(jobs: Jobs) -> list[str]:
    """Return the line that names the jobs whose price is not stated, if any."""
    missing = [name for name, job in jobs if job.money is None]
    return [f"cost unknown: no --price for {'; '.join(missing)}"] if missing else []
