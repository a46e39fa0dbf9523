"""What a whole training job takes: device-hours, wall-clock time with restarts, and money. Pure.

A failure stops all devices. The work since the last checkpoint, half an interval on average, is done again after the
restart (Young, 1974, "A first order approximation to the optimum checkpoint interval"); saving itself is taken to
overlap with training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from usp.run.tables import Grid

# Llama 3 405B: 419 unexpected interruptions in 54 days of 16,384 H100 (arXiv 2407.21783, section 3.3.4).
FAILURES = 419 / (54 * 24 * 16384)  # per device-hour
BILLION = 10**9


@dataclass(frozen=True)
class Terms:
    """What is asked of a job.

    Attributes:
        tokens: to train on; 0: not asked.
        prices: of a device-hour by hardware name in lower case; "" is that of any hardware.
        deadline: hours of wall-clock time; inf: none.
        failures: of a device in an hour.
        checkpoint_minutes: between checkpoints.
        restart_minutes: from a failure to the next step.
    """

    tokens: int = 0
    prices: Mapping[str, float] = field(default_factory=dict)
    deadline: float = math.inf
    failures: float = FAILURES
    checkpoint_minutes: float = 30.0
    restart_minutes: float = 15.0

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


def job_cost(terms: Terms, hardware: str, devices: int, step_seconds: float, step_tokens: int) -> JobCost:
    """Return what a job of steps of so many seconds and tokens takes."""
    lost = terms.failures * devices * (terms.checkpoint_minutes / 2 + terms.restart_minutes) / 60
    working = terms.trained / step_tokens * step_seconds / 3600
    hours = working / (1 - lost) if lost < 1 else math.inf
    price = terms.price(hardware)
    return JobCost(hours, min(1.0, lost), devices * hours, None if price is None else devices * hours * price)


def job_grid(terms: Terms, jobs: Sequence[tuple[str, JobCost]], title: str = "") -> Grid:
    """Return the table of jobs, each with the text that names it."""
    rows = [(name, *_cells(job, terms)) for name, job in jobs]
    tokens = f"{terms.trained / BILLION:,g}B tokens"
    heading = (
        f"{title}{'The whole job' if terms.tokens else 'Each job'}: {tokens}, {1000 * terms.failures:.3g} failures in "
        f"1,000 device-hours, a checkpoint every {terms.checkpoint_minutes:g} and restarts of "
        f"{terms.restart_minutes:g} minutes"
        f"{'; cost in the unit of --price' if terms.prices else ''}"
    )
    return Grid(heading, ("", "wall-clock", "device-hours", "lost to failures", "cost", "deadline"), tuple(rows))


def _cells(job: JobCost, terms: Terms) -> tuple[str, ...]:
    if math.isinf(job.hours):
        return "never ends", "", "100%", "", "missed"
    money = "no price" if job.money is None else money_text(job.money)
    deadline = "" if math.isinf(terms.deadline) else "missed" if job.late(terms) else "kept"
    return hours_text(job.hours), f"{job.device_hours:,.1f}", f"{job.lost:.1%}", money, deadline


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


def verdicts(terms: Terms, jobs: Sequence[tuple[str, JobCost]]) -> list[str]:
    """Return which job is the fastest and which the cheapest, of those that keep the deadline if any does, and what
    has no price."""
    kept = [pair for pair in jobs if not pair[1].late(terms) and pair[1].hours < math.inf]
    among = kept or list(jobs)
    name, job = min(among, key=lambda pair: pair[1].hours)
    lines = [] if kept else [f"no plan keeps the deadline of {hours_text(terms.deadline)}"]
    lines.append(f"fastest: {name}, {hours_text(job.hours)}")
    if priced := [(name, job.money) for name, job in among if job.money is not None]:
        name, money = min(priced, key=lambda pair: pair[1])
        lines.append(f"cheapest: {name}, {money_text(money)}")
    return lines + missing_prices(jobs)


def missing_prices(jobs: Sequence[tuple[str, JobCost]]) -> list[str]:
    """Return the line that names the jobs whose price is not stated, if any."""
    missing = [name for name, job in jobs if job.money is None]
    return [f"cost unknown: no --price for {'; '.join(missing)}"] if missing else []


def pareto(jobs: Sequence[tuple[str, JobCost]]) -> list[int]:
    """Return the places of the jobs that no other beats in both time and cost, the fastest first; where a price is
    missing, the cost is device-hours."""
    order = sorted(range(len(jobs)), key=lambda place: (jobs[place][1].hours, _cost(jobs, place)))
    best, front = math.inf, []
    for place in order:
        if _cost(jobs, place) < best:
            best = _cost(jobs, place)
            front.append(place)
    return front


def _cost(jobs: Sequence[tuple[str, JobCost]], place: int) -> float:
    known = all(job.money is not None for _, job in jobs)
    money = jobs[place][1].money
    return money if known and money is not None else jobs[place][1].device_hours


def plot(terms: Terms, jobs: Sequence[tuple[str, JobCost]]) -> Any:
    """Return a matplotlib figure: time and cost of each job, and the line of those that no other beats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes, front = figure.subplots(), pareto(jobs)
    places = [(jobs[place][1].hours, _cost(jobs, place)) for place in range(len(jobs))]
    unit = 24 if min(hours for hours, _ in places) >= 48 else 1
    axes.plot([places[p][0] / unit for p in front], [places[p][1] for p in front], "-", color="0.6", zorder=1)
    for place, (hours, cost) in enumerate(places):
        on_front = place in front
        axes.scatter(hours / unit, cost, color="tab:blue" if on_front else "0.5", zorder=2)
        offset = (6, -12 if on_front else 5)
        axes.annotate(jobs[place][0], (hours / unit, cost), textcoords="offset points", xytext=offset, fontsize="small")
    if terms.deadline < math.inf:
        axes.axvline(terms.deadline / unit, color="tab:red", linestyle="--", linewidth=1, label="deadline")
        axes.legend(frameon=False)
    known = all(job.money is not None for _, job in jobs)
    axes.set_xlabel(f"{'days' if unit == 24 else 'hours'} of wall-clock time, restarts included")
    axes.set_ylabel("cost, in the unit of --price" if known else "device-hours (a price is missing)")
    axes.set_title(f"{terms.trained / BILLION:,g}B tokens; the line joins plans that no other beats", fontsize="medium")
    axes.margins(x=0.2)
    axes.set_ylim(0, 1.15 * max((cost for _, cost in places if cost < math.inf), default=1.0))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return figure
