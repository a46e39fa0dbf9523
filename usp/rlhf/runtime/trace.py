"""Views of a run's timeline: a table, a trace for chrome://tracing or ui.perfetto.dev, and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from .timeline import Event

_COLOURS = {
    "generate": "#4477aa",
    "inference": "#66ccee",
    "train_step": "#ee7733",
    "compute": "#aa77bb",
    "reallocate": "#cc3344",
    "transfer": "#228833",
    "announce": "#88bb44",
    "load": "#997755",
    "offload": "#ccaa77",
    "release": "#444444",
    "wait": "#dddddd",
}
_THIN = ("transfer",)  # concurrent with other events, so drawn below them
_HATCHED = ("reallocate", "load", "offload")


@dataclass(frozen=True)
class Total:
    """Events of one kind and name, averaged over steps.

    Attributes:
        seconds: from the first rank's start to the last rank's end.
        share: fraction of the step time.
        bytes, minimum: received by all ranks, and the least that they need.
    """

    kind: str
    name: str
    seconds: float
    share: float
    bytes: int
    minimum: int

    @property
    def ratio(self) -> float | None:
        """Ratio of bytes to the minimum; None if nothing needs to move."""
        return self.bytes / self.minimum if self.minimum else None


def shown(events: Sequence[Event]) -> list[Event]:
    """Return the events with transfers clipped to begin when the first sender does: receives are posted long before."""
    first: dict[tuple[int, str], float] = {}
    for event in events:
        if event.kind == "transfer" and event.sent:
            key = (event.step, event.name)
            first[key] = min(event.start, first.get(key, event.start))

    def clipped(event: Event) -> Event:
        sent = first.get((event.step, event.name), event.start) if event.kind == "transfer" else event.start
        return replace(event, start=min(max(event.start, sent), event.end))

    return [clipped(event) for event in events]


def totals(events: Sequence[Event]) -> list[Total]:
    """Return a `Total` for each kind and name, ordered by first start."""
    steps = sorted({event.step for event in events})
    whole = sum(_span([event for event in events if event.step == step]) for step in steps)
    found: dict[tuple[str, str], list[Event]] = {}
    for event in sorted(events, key=lambda event: event.start):
        found.setdefault((event.kind, event.name), []).append(event)
    rows = []
    for (kind, name), alike in found.items():
        seconds = sum(_span([event for event in alike if event.step == step]) for step in steps)
        received, minimum = (sum(getattr(event, key) for event in alike) for key in ("received", "minimum"))
        share = seconds / whole if whole else 0.0
        rows.append(Total(kind, name, seconds / len(steps), share, received // len(steps), minimum // len(steps)))
    return rows


def _span(events: Sequence[Event]) -> float:
    return max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0)


def table(events: Sequence[Event]) -> Table:
    """Return the totals as a table to print."""
    steps = sorted({event.step for event in events})
    title = f"step {steps[0]}" if len(steps) == 1 else f"mean of {len(steps)} steps, {steps[0]} to {steps[-1]}"
    result = Table(title=f"{title}, {len({event.rank for event in events})} ranks")
    for heading in ("kind", "name"):
        result.add_column(heading)
    for heading in ("seconds", "share", "bytes", "minimum", "ratio"):
        result.add_column(heading, justify="right")
    for row in totals(events):
        moved = (f"{row.bytes:,}", f"{row.minimum:,}") if row.bytes or row.minimum else ("", "")
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        result.add_row(row.kind, row.name, f"{row.seconds:.3f}", f"{row.share:.1%}", *moved, ratio)
    return result


def write_chrome_trace(events: Sequence[Event], path: Path) -> None:
    """Write a JSON trace with one process per rank; transfers are on a separate thread."""
    records: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({event.rank for event in events})
    ]
    records += [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "pid": event.rank,
            "tid": int(event.kind in _THIN),
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {k: getattr(event, k) for k in ("kind", "step", "sent", "received", "minimum")},
        }
        for event in events
    ]
    path.write_text(json.dumps({"traceEvents": records}), encoding="utf-8")


def plot(events: Sequence[Event], path: Path) -> None:
    """Write a PNG with one row per rank: calls and reallocations, with transfers as thin bars below them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({event.rank for event in events})
    begin = min(event.start for event in events)
    width = max(event.end for event in events) - begin
    figure = Figure(figsize=(14, 2.2 + 0.55 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for event in events:
        thin, duration = event.kind in _THIN, event.end - event.start
        axes.barh(
            ranks.index(event.rank) + (0.38 if thin else -0.06),
            max(duration, width / 2000),  # shorter ones would be invisible
            left=event.start - begin,
            height=0.12 if thin else 0.7,
            color=_COLOURS.get(event.kind, "black"),
            hatch="////" if event.kind in _HATCHED else None,
            edgecolor="white",
            linewidth=0.3,
        )
    _label(axes, events, ranks, begin, width)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(0, width * 1.005 or 1.0)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in _COLOURS if any(event.kind == kind for event in events)]
    handles = [Patch(facecolor=_COLOURS[k], hatch="////" if k in _HATCHED else None, edgecolor="white") for k in kinds]
    figure.legend(handles, kinds, loc="outside lower center", ncols=len(kinds), frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


def _label(axes: Any, events: Sequence[Event], ranks: Sequence[int], begin: float, width: float) -> None:
    """Label bars that are wide enough inside, and other calls above the plot, with a line to the first of each."""
    inside: set[tuple[int, str]] = set()
    narrow: dict[tuple[int, str], tuple[float, int]] = {}
    for event in sorted(events, key=lambda event: (event.start, event.rank)):
        if event.kind in (*_THIN, "wait", "announce", "release"):
            continue
        middle, row = (event.start + event.end) / 2 - begin, ranks.index(event.rank)
        text = f"{event.kind} {event.name}" if event.kind in _HATCHED else event.name
        if event.end - event.start > 0.0062 * width * len(text):
            back = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if event.kind in _HATCHED else None
            axes.text(middle, row - 0.06, text, ha="center", va="center", fontsize=8, clip_on=True, bbox=back)
            inside.add((event.step, text))
        elif event.kind not in _HATCHED:
            narrow.setdefault((event.step, text), (middle, row))
    free = -width
    for (step, text), (middle, row) in sorted(narrow.items(), key=lambda item: item[1]):
        if (step, text) not in inside:
            free = max(middle, free + 0.018 * width)
            line = {"arrowstyle": "-", "color": "gray", "linewidth": 0.5, "relpos": (0, 0)}
            axes.annotate(
                text, (middle, row - 0.4), (free, -0.7), fontsize=7, rotation=35, va="bottom", arrowprops=line
            )
