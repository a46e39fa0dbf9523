"""A comparison as one self-contained HTML page, from which a person decides: bars of time and memory of each method,
whether it fits and why not, and the tables. `page.html` is its template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from usp.cost.grid import AND, Grid
from usp.cost.planner.advice import degrees, memory_options, parts, seconds
from usp.cost.time_report import memory_parts
from usp.run.metrics import size

from .chart import Chart
from .comparison import Compared
from .decision import Verdict

SHOWN = 5  # methods that are selected at first
# The classes of the page's bars, in their order: words of the names of a step's parts, then of the memory's.
KINDS = (
    *("attention", "products", "operators", "exposed", "offload", "bubble"),
    *("parameters", "gradients", "gathered", "optimizer", "activations", "temporary"),
)


def page(
    title: str,
    facts: Sequence[str],
    found: Sequence[Compared],
    verdicts: Sequence[Verdict],
    tables: Sequence[Grid],
    charts: Sequence[Chart],
) -> str:
    """Return the page.

    Args:
        facts: one line each, below the tables.
        verdicts: from `judge`; the first ones are selected.
        charts: from `usp.cost.compare.chart`.
    """
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template("page.html")
    bars = [_bars(verdict) for verdict in verdicts]
    names = [verdict.found.method for verdict in verdicts]
    return template.render(
        title=title,
        headline=_headline(verdicts),
        facts=facts,
        methods=bars,
        infeasible=[(one.method, one.problem) for one in found if one.problem],
        shown=SHOWN,
        kinds=KINDS,
        legends=[("Step", _legend(bars, "time")), ("Memory", _legend(bars, "memory"))],
        longest=max((sum(part[1] for part in one["time"]) for one in bars), default=1),
        largest=max((sum(part[1] for part in one["memory"]) for one in bars), default=1),
        limit=verdicts[0].step.limit if verdicts else 0,
        limit_text=size(verdicts[0].step.limit) if verdicts else "",
        tables=[(grid, [[cell.split(AND) for cell in row] for row in grid.rows]) for grid in tables],
        charts=charts,
        number={name: index for index, name in enumerate(names)},
    )


def _headline(verdicts: Sequence[Verdict]) -> str:
    """Return the decision in a sentence or two."""
    fitting = [one for one in verdicts if one.fits]
    if fitting:
        step = fitting[0].step
        words = (
            f"{fitting[0].found.method} is the fastest that fits: {seconds(step.time.total)} per step, "
            f"{step.time.mfu:.0%} MFU, {size(step.memory.peak.total)} of {size(step.limit)}."
        )
        if len(fitting) > 1:
            second = fitting[1]
            words += f" {second.found.method} takes {second.step.time.total / step.time.total - 1:.0%} longer."
        return words
    if not verdicts:
        return "None of the methods can run as asked; the reasons are below."
    if (remedy := verdicts[0].remedy) is None:
        return "None of the methods fits, whatever saves memory: use more devices or shorter sequences."
    flags, step = remedy
    return (
        f"None of the methods fits as asked. {verdicts[0].found.method} does with {flags}: "
        f"{size(step.memory.peak.total)} of {size(step.limit)}, {seconds(step.time.total)} per step."
    )


def _bars(verdict: Verdict) -> dict[str, Any]:
    step = verdict.step
    config = replace(step.job.config, dp_shard=step.job.dims.dp_shard)
    return {
        "name": verdict.found.method,
        "degrees": f"{degrees(config)}, {memory_options(config)}",
        "fits": verdict.fits,
        "reason": verdict.reason,
        "time": _parts(parts(step.time), seconds),
        "memory": _parts(memory_parts(step.memory), size),
        "sent": verdict.found.sent,
        "sent_text": size(verdict.found.sent),
        "step": seconds(step.time.total),
        "seconds": step.time.total,
        "peak": size(step.memory.peak.total),
        "bytes": step.memory.peak.total,
        "moment": step.memory.peak.name,
        "host": size(step.memory.host) if step.memory.host else "",
        "rate": f"{step.tokens_per_second:,.0f}",
        "mfu": f"{step.time.mfu:.1%}",
        "kernels": ", ".join(step.time.kernels),
    }


def _parts(found: Mapping[str, float], text: Callable[[float], str]) -> list[tuple[str, float, str, str]]:
    """Return (name, value, text, class) of each part that is not 0, alike ones side by side."""
    each = [(name, value, text(value), _kind(name)) for name, value in found.items() if value > 0]
    return sorted(each, key=lambda part: KINDS.index(part[3]))


def _kind(name: str) -> str:
    """Return the class of a part: the word that stands first in its name."""
    return min((kind for kind in KINDS if kind in name), key=name.index, default="operators")


def _legend(bars: Iterable[dict[str, Any]], what: str) -> list[tuple[str, str]]:
    """Return (class, name) of what the bars show; kinds with several parts by what these have in common."""
    names: dict[str, set[str]] = {}
    for one in bars:
        for name, _, _, kind in one[what]:
            names.setdefault(kind, set()).add(name)
    return [
        (kind, next(iter(names[kind])) if len(names[kind]) == 1 else f"{kind} communication")
        for kind in KINDS
        if kind in names
    ]
