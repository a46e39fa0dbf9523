"""Line charts of a sweep as numbers for the SVG of the page: both axes are logarithmic to base 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from usp.cost.grid import GIB

from .comparison import Compared
from .plots import short

WIDTH, HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 40


@dataclass(frozen=True)
class Chart:
    """A chart in units of a `WIDTH` x `HEIGHT` drawing.

    Attributes:
        ticks_x, ticks_y: (position, label).
        lines: (method, points, what a reader without a picture is told).
        limit: position and label of a horizontal line, if there is one.
    """

    title: str
    below: str
    ticks_x: tuple[tuple[float, str], ...]
    ticks_y: tuple[tuple[float, str], ...]
    lines: tuple[tuple[str, tuple[tuple[float, float], ...], str], ...]
    limit: tuple[float, str] | None = None
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM


def charts(
    by_degree: Mapping[int, Sequence[Compared]], by_length: Mapping[int, Sequence[Compared]], limit: float
) -> tuple[Chart, ...]:
    """Return bytes sent and peak memory by number of devices and by sequence length; `limit` in usable bytes."""

    def peak(one: Compared) -> float:
        return one.memory.peak.total if one.memory else 0

    return tuple(
        _chart(title, below, found, value, bound)
        for found, below in ((by_degree, "devices"), (by_length, "tokens of a sequence"))
        for title, value, bound in (
            ("GiB that the busiest rank sends in a step", lambda one: one.sent, None),
            ("GiB of memory of the rank that needs most", peak, limit),
        )
    )


def _chart(
    title: str,
    below: str,
    found: Mapping[int, Sequence[Compared]],
    value: Callable[[Compared], float],
    limit: float | None,
) -> Chart:
    sizes: dict[str, dict[int, float]] = {}
    for place, line in found.items():
        for one in line:
            if not one.problem and value(one) > 0:
                sizes.setdefault(one.method, {})[place] = value(one) / GIB
    every = [size for line in sizes.values() for size in line.values()] + ([limit / GIB] if limit else [])
    low, high = (math.floor(math.log2(min(every))), math.ceil(math.log2(max(every)))) if every else (0, 1)
    high = max(high, low + 1)
    places = [math.log2(place) for place in found]
    first, last = min(places), max(max(places), min(places) + 1)

    def x(place: int) -> float:
        return round(_LEFT + (math.log2(place) - first) / (last - first) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(size: float) -> float:
        return round(HEIGHT - _BOTTOM - (math.log2(size) - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM), 1)

    step = -(-(high - low) // 8)
    return Chart(
        title,
        below,
        tuple((x(place), short(place)) for place in found),
        tuple((y(2.0**power), f"{2.0**power:g}") for power in range(low, high + 1, step)),
        tuple(
            (
                method,
                tuple((x(place), y(size)) for place, size in line.items()),
                ", ".join(f"{short(place)}: {size:.3g}" for place, size in line.items()),
            )
            for method, line in sizes.items()
        ),
        (y(limit / GIB), f"{limit / GIB:.0f} usable") if limit else None,
    )
