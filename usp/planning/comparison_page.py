"""A comparison of methods for people: plots by number of devices and sequence length, and one self-contained HTML page
whose template is `page.html`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from usp.run.metrics import seconds, short, size
from usp.run.tables import AND, GIB, Grid

from .choice import degrees, memory_options
from .comparison import Compared, Setting, compare
from .methods import Method
from .step_report import memory_parts

SHOWN = 5  # methods that are selected at first
# The classes of the page's bars, in their order: words of the names of a step's parts, then of the memory's.
KINDS = (
    *("attention", "products", "operators", "exposed", "offload", "bubble"),
    *("parameters", "gradients", "gathered", "optimizer", "activations", "temporary"),
)
Bar = list[tuple[str, float, str, str]]  # (name, value, text, class) of each part


@dataclass(frozen=True)
class Panel:
    """Lines of methods by number of devices or sequence length; both axes are logarithmic to base 2."""

    title: str
    below: str
    places: tuple[int, ...]  # on the horizontal axis
    lines: Mapping[str, Mapping[int, float]]  # GiB by method and place, where it is feasible
    limit: float | None = None  # GiB that are usable, for memory


def sweep(methods: Sequence[Method], setting: Setting) -> list[Panel]:
    """Return what is sent and the memory by devices (powers of two up to the setting's), then by length (1/8 to 8x)."""
    numbers = [2**power for power in range(1, setting.world_size.bit_length())]
    lengths = [max(1, setting.base.seq_len // 8) * 2**power for power in range(7)]
    by_number = {number: replace(setting, world_size=number) for number in numbers}
    by_length = {length: replace(setting, base=replace(setting.base, seq_len=length)) for length in lengths}
    panels = []
    for settings, below in ((by_number, "devices"), (by_length, "tokens of a sequence")):
        sent, memory = defaultdict[str, dict[int, float]](dict), defaultdict[str, dict[int, float]](dict)
        for place, at in settings.items():
            for each in compare(methods, at)[0]:
                sent[each.method][place] = each.sent_bytes / GIB
                memory[each.method][place] = each.step.memory.peak.total / GIB
        places, limit = tuple(settings), setting.usable.device / GIB
        panels += [
            Panel("GiB that the busiest rank sends in a step", below, places, sent),
            Panel("GiB of memory of the rank that needs most", below, places, memory, limit),
        ]
    return panels


def plot(panels: Sequence[Panel]) -> Any:
    """Return a matplotlib figure of the four panels of a sweep."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    columns = figure.subplots(2, 2).T.flat
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    for axes, panel in zip(columns, panels, strict=True):
        for number, name in enumerate(names):
            style, color = ("-", "--", ":", "-.")[number // 10 % 4], f"C{number % 10}"
            points = panel.lines.get(name, {})
            axes.plot(list(points), list(points.values()), style, marker="o", ms=4, color=color, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(panel.places, [short(place) for place in panel.places])
        powers = range(-4, int(max([1.0, *_values(panel)])).bit_length() + 1)
        low, high = axes.get_ylim()
        axes.set_yticks([2.0**power for power in powers], [f"{2.0**power:g}" for power in powers])
        axes.set_ylim(max(low, 2.0**-4), high)
        axes.minorticks_off()
        axes.set_xlabel(panel.below)
        axes.set_ylabel(panel.title)
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    return figure


def _values(panel: Panel) -> list[float]:
    return [value for line in panel.lines.values() for value in line.values() if value > 0]


def _powers(panel: Panel) -> tuple[float, float, int, int]:
    """Return the powers of two at the ends of a chart's axes: the first and last place, and around all values."""
    values = [*_values(panel), *([panel.limit] if panel.limit else [])] or [1.0]
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    first, last = math.log2(panel.places[0]), math.log2(panel.places[-1])
    return first, max(last, first + 1), low, max(high, low + 1)


def page(
    title: str,
    facts: Sequence[str],
    judged: Sequence[Compared],
    problems: Mapping[str, str],
    tables: Sequence[Grid],
    panels: Sequence[Panel],
) -> str:
    """Return the page, on which the first methods are selected, with the facts as lines below the tables."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"size": size, "seconds": seconds, "short": short, "log2": math.log2}
    methods = [_method(each) for each in judged]
    return environment.get_template("page.html").render(
        title=title,
        headline=_headline(judged),
        facts=facts,
        methods=methods,
        infeasible=problems,
        shown=SHOWN,
        kinds=KINDS,
        legends=[
            (name, _legend(each[key] for each in methods)) for name, key in (("Step", "time"), ("Memory", "memory"))
        ],
        longest=max((each.step.time.total for each in judged), default=1),
        largest=max((each.step.memory.peak.total for each in judged), default=1),
        limit=judged[0].step.limits.device if judged else 0,
        tables=[(grid, [[cell.split(AND) for cell in row] for row in grid.rows]) for grid in tables],
        charts=[(panel, *_powers(panel)) for panel in panels],
        number={each.method: index for index, each in enumerate(judged)},
    )


def _method(method: Compared) -> dict[str, Any]:
    step = method.step
    config = replace(step.job.config, dp_shard=step.job.dims.dp_shard)
    return {
        "name": method.method,
        "degrees": f"{degrees(config)}, {memory_options(config)}",
        "step": step,
        "reason": method.reason,
        "time": _bar(step.time.parts, seconds),
        "memory": _bar(memory_parts(step.memory), size),
        "sent": method.sent_bytes,
    }


def _headline(judged: Sequence[Compared]) -> str:
    """Return the decision in a sentence or two."""
    if not judged:
        return "None of the methods can run as asked; the reasons are below."
    first, *others = judged
    if first.step.fits:
        time, memory = first.step.time, f"{size(first.step.memory.peak.total)} of {size(first.step.limits.device)}"
        words = (
            f"{first.method} is the fastest that fits: {seconds(time.total)} per step, {time.mfu:.0%} MFU, {memory}."
        )
        if others and others[0].step.fits:
            words += f" {others[0].method} takes {others[0].step.time.total / time.total - 1:.0%} longer."
        return words
    if first.remedy is None:
        return "None of the methods fits, whatever saves memory: use more devices or shorter sequences."
    flags, step = first.remedy
    words = f"{size(step.memory.peak.total)} of {size(step.limits.device)}, {seconds(step.time.total)} per step"
    return f"None of the methods fits as asked. {first.method} does with {flags}: {words}."


def _bar(values: Mapping[str, float], text: Any) -> Bar:
    """Return the parts that are not 0, those of a class side by side."""
    bar = [
        # the class is the word that stands first in the name
        (name, value, text(value), min((kind for kind in KINDS if kind in name), key=name.index, default="operators"))
        for name, value in values.items()
        if value > 0
    ]
    return sorted(bar, key=lambda each: KINDS.index(each[3]))


def _legend(bars: Iterable[Bar]) -> list[tuple[str, str]]:
    """Return (class, name) of what the bars show; classes with several parts by what these have in common."""
    names = defaultdict[str, set[str]](set)
    for name, _, _, kind in chain(*bars):
        names[kind].add(name)
    legend = ((kind, names[kind]) for kind in KINDS if kind in names)
    return [(kind, " ".join(of) if len(of) == 1 else f"{kind} communication") for kind, of in legend]
