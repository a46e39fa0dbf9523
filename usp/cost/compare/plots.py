"""Plots of communication volume and memory, by number of devices and by sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from usp.config import TrainConfig
from usp.cost.grid import GIB
from usp.cost.job import ONE_DOCUMENT, Data
from usp.cost.methods import Batch, Method
from usp.hf.models import ModelConfig
from usp.run.metrics import short

from .comparison import Compared, compare

STYLES = ("-", "--", ":", "-.")


def sweep(
    methods: Sequence[Method],
    base: TrainConfig,
    model_config: ModelConfig,
    devices: int,
    batch: Batch,
    data: Data = ONE_DOCUMENT,
) -> tuple[dict[int, list[Compared]], dict[int, list[Compared]]]:
    """Return comparisons (by devices: powers of two up to `devices`, by sequence length: 1/8 to 8 times the base's)."""
    degrees = [2**power for power in range(1, devices.bit_length())]
    lengths = [max(1, base.seq_len // 8) * 2**power for power in range(7)]
    by_degree = {degree: compare(methods, base, model_config, degree, batch, data) for degree in degrees}
    by_length = {
        length: compare(methods, replace(base, seq_len=length), model_config, devices, batch, data)
        for length in lengths
    }
    return by_degree, by_length


def plot(by_degree: dict[int, list[Compared]], by_length: dict[int, list[Compared]]) -> Any:
    """Return a matplotlib figure of four panels; where a method is not feasible it has no point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    panels = figure.subplots(2, 2)
    everywhere = [one for found in (by_degree, by_length) for line in found.values() for one in line]
    names = list(dict.fromkeys(one.method for one in everywhere if not one.problem))
    for column, (found, what) in enumerate(((by_degree, "devices"), (by_length, "sequence length"))):
        _panel(panels[0][column], found, names, what, "sent per rank and step, GiB", lambda one: one.sent)
        _panel(panels[1][column], found, names, what, "peak memory per rank, GiB", lambda one: one.memory.peak.total)
    handles, labels = panels[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    return figure


def _panel(axes: Any, found: dict[int, list[Compared]], names: list[str], what: str, label: str, value: Any) -> None:
    highest = 1.0
    for number, name in enumerate(names):
        points = [
            (place, value(one) / GIB)
            for place, line in found.items()
            for one in line
            if one.method == name and not one.problem
        ]
        style, colour = STYLES[number // 10 % len(STYLES)], f"C{number % 10}"
        axes.plot(*zip(*points, strict=True) if points else ((), ()), style, marker="o", ms=4, color=colour, label=name)
        highest = max([highest, *(volume for _, volume in points)])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(found), [short(place) for place in found])
    powers = range(-4, int(highest).bit_length() + 1)
    low, high = axes.get_ylim()
    axes.set_yticks([2.0**power for power in powers], [f"{2.0**power:g}" for power in powers])
    axes.set_ylim(max(low, 2.0**-4), high)
    axes.minorticks_off()
    axes.set_xlabel(what)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
