"""Views of a run's timeline: tables, a trace for chrome://tracing or ui.perfetto.dev, and a plot of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from rich.table import Table

from .timeline import Activity, Event, activities, bounds, covered, critical_path, rank_times

_COLOURS = {
    "generate": "#4477aa", "inference": "#66ccee", "train_step": "#ee7733", "compute": "#aa77bb",
    "reallocate": "#cc3344", "transfer": "#228833", "announce": "#88bb44", "load": "#997755", "offload": "#ccaa77",
    "release": "#444444", "switch": "#882255", "waiting": "#e4e4e4", "critical path": "black",
}  # fmt: skip
_HATCHED = ("reallocate", "load", "offload")
_SHOWN = ("kind", "step", "sent", "received", "minimum", "crossed", "host_minimum")  # of an event, in a trace
_SHORT = 0.005  # of a step: shorter parts of the critical path are listed as one


@dataclass(frozen=True)
class Total:
    """Work of one kind and name in a step, averaged over steps."""

    kind: str
    name: str
    seconds: float  # in which at least one rank works on it
    deviation: float  # their standard deviation over steps
    share: float  # of the steps' seconds
    waiting: float  # seconds that its first rank waits for the last to arrive
    bytes: int  # received by all ranks
    minimum: int  # the least that they need
    crossed: int = 0  # of these bytes, received from other hosts
    host_minimum: int = 0  # the least that hosts need

    @property
    def ratio(self) -> float | None:
        """Ratio of bytes to the minimum; None if nothing needs to move."""
        return self.bytes / self.minimum if self.minimum else None


def shown(events: Sequence[Event]) -> list[Event]:
    """Return the transfers clipped to begin when the first sender does: receives are posted long before."""
    transfers = [event for event in events if event.kind == "transfer"]
    first: dict[tuple[int, str], float] = {}
    for event in transfers:
        if event.sent:
            key = (event.step, event.name)
            first[key] = min(event.start, first.get(key, event.start))
    begins = [max(event.start, first.get((event.step, event.name), event.start)) for event in transfers]
    return [replace(event, start=min(begin, event.end)) for event, begin in zip(transfers, begins, strict=True)]


def totals(events: Sequence[Event]) -> list[Total]:
    """Return a `Total` for each kind and name, ordered by first start."""
    of_step = by_step(events)
    length = sum(map(_length, of_step.values())) or 1.0
    by_start = sorted(events, key=lambda event: (event.kind == "wait", event.start))
    rows = []
    for key in dict.fromkeys((event.kind, event.name) for event in by_start):
        steps = [[a for a in step if (a.event.kind, a.event.name) == key] for step in of_step.values()]
        if key[0] == "wait" and not any(steps):  # for transfers, which have rows of their own
            continue
        alike = [event for event in events if (event.kind, event.name) == key]
        seconds = [covered(step) for step in steps]
        waits = [max((activity.waiting for activity in step), default=0.0) for step in steps]
        sizes = (
            sum(getattr(event, name) for event in alike) // len(steps)
            for name in ("received", "minimum", "crossed", "host_minimum")
        )
        rows.append(Total(*key, mean(seconds), pstdev(seconds), sum(seconds) / length, mean(waits), *sizes))
    return rows


def by_step(events: Sequence[Event]) -> dict[int, list[Activity]]:
    """Return the activities of each step."""
    of_step: dict[int, list[Activity]] = {step: [] for step in sorted({event.step for event in events})}
    for activity in activities(events):
        of_step[activity.event.step].append(activity)
    return of_step


def _length(step: Sequence[Activity]) -> float:
    begin, end = bounds(step)
    return end - begin


def summary_table(events: Sequence[Event]) -> Table:
    """Return the totals of one or more steps as a table to print."""
    lengths = {step: _length(found) for step, found in by_step(events).items()}
    steps, average, several = list(lengths), mean(lengths.values()), len(lengths) > 1
    title = f"{len({event.rank for event in events})} ranks: {average:.3f} s"
    if several:
        title = f"mean of {len(steps)} steps, {steps[0]} to {steps[-1]}, {title}"
        title = f"{title}, standard deviation {pstdev(lengths.values()):.3f} s"
    else:
        title = f"step {steps[0]}, {title}"
    times = ("work (s)", *(("deviation",) if several else ()), "of step", "wait before (s)")
    result = _table(title, ("kind", "name"), (*times, "bytes", "minimum", "ratio", "between hosts", "minimum"))
    for row in totals(events):
        moved = (f"{row.bytes:,}", f"{row.minimum:,}") if row.bytes or row.minimum else ("", "")
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        deviation = (f"{row.deviation:.3f}",) if several else ()
        seconds = (f"{row.seconds:.3f}", *deviation, f"{row.share:.1%}", f"{row.waiting:.3f}")
        crossed = (f"{row.crossed:,}", f"{row.host_minimum:,}") if row.crossed or row.host_minimum else ("", "")
        result.add_row(row.kind, row.name, *seconds, *moved, ratio, *crossed)
    return result


def rank_table(number: int, step: Sequence[Activity]) -> Table:
    """Return what every rank did with the time of a step as a table to print."""
    result = _table(f"step {number}: each rank", ("rank",), ("work (s)", "waiting (s)", "no operation (s)", "idle"))
    for time in rank_times(step):
        seconds = (f"{value:.3f}" for value in (time.work, time.waiting, time.between))
        result.add_row(str(time.rank), *seconds, f"{time.idle_share:.1%}")
    return result


def path_table(number: int, step: Sequence[Activity]) -> Table:
    """Return the critical path of a step as a table to print, in order of time."""
    result = _table(f"step {number}: critical path", ("rank", "kind", "name"), ("seconds", "of step"))
    length, path = _length(step), critical_path(step)
    long = [part for part in path if part.seconds >= _SHORT * length]
    lines = [(str(part.rank), part.kind, part.name, part.seconds) for part in long]
    if len(long) < len(path):
        rest = sum(part.seconds for part in path) - sum(part.seconds for part in long)
        lines.append(("", "", f"{len(path) - len(long)} parts below {_SHORT:.1%}", rest))
    for *texts, seconds in lines:
        result.add_row(*texts, f"{seconds:.3f}", f"{seconds / length:.1%}" if length else "")
    return result


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    result = Table(title=title, title_justify="left")
    for heading in (*texts, *numbers):
        result.add_column(heading, justify="left" if heading in texts else "right")
    return result


def write_chrome_trace(events: Sequence[Event], path: Path) -> None:
    """Write a JSON trace with one process per rank; waiting is a slice of its own, transfers are a second thread."""
    records: list[dict[str, Any]] = []

    def add(event: Event, name: str, kind: str, start: float, end: float, thread: int = 0) -> None:
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6, "args": {key: getattr(event, key) for key in _SHOWN}}
        records.append({"ph": "X", "name": name, "cat": kind, "pid": event.rank, "tid": thread, **times})

    for rank in sorted({event.rank for event in events}):
        records.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(("operations", "transfers")):
            records.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for activity in activities(events):
        event, last = activity.event, activity.last
        if activity.waiting:
            name = f"wait for {event.name}" if last == event.rank else f"{event.name}: wait for rank {last}"
            add(event, name, "waiting", activity.start, activity.begin)
        if activity.work or not activity.waiting:
            add(event, event.name, event.kind, activity.begin, activity.end)
    for event in shown(events):
        add(event, event.name, event.kind, event.start, event.end, thread=1)
    path.write_text(json.dumps({"traceEvents": records}), encoding="utf-8")


def plot(events: Sequence[Event], path: Path) -> None:
    """Write a PNG of one step with one row per rank: work, waiting, and the critical path. Transfers are thin bars
    below; in the row itself they stand only where a call waits for them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    step, transfers = activities(events), shown(events)
    times = rank_times(step)
    rows = {time.rank: row for row, time in enumerate(times)}
    begin, end = bounds(step)
    width = end - begin
    figure = Figure(figsize=(14, 2.6 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()

    def bar(rank: int, kind: str, start: float, end: float, thin: bool = False) -> None:
        axes.barh(
            rows[rank] + (0.38 if thin else -0.06),
            max(end - start, width / 2000),  # shorter ones would be invisible
            left=start - begin,
            height=0.12 if thin else 0.7,
            color=_COLOURS.get(kind, "black"),
            hatch="////" if kind in _HATCHED else None,
            edgecolor="white",
            linewidth=0.3,
        )

    for activity in step:
        rank, kind = activity.event.rank, activity.event.kind
        if activity.waiting:
            bar(rank, "waiting", activity.start, activity.begin)
        if activity.work or not activity.waiting:
            bar(rank, kind, activity.begin, activity.end)
    for event in transfers:
        bar(event.rank, event.kind, event.start, event.end, thin=True)
    # The critical path, as one line along the tops of its bars.
    points = [(at - begin, rows[part.rank] - 0.44) for part in critical_path(step) for at in (part.start, part.end)]
    axes.plot(*zip(*points, strict=True) if points else ((), ()), color=_COLOURS["critical path"], linewidth=1.8)
    _label(axes, step, rows, begin, width)
    axes.set_yticks(range(len(rows)), [f"rank {time.rank}\nidle {time.idle_share:.0%}" for time in times])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, width * 1.005 or 1.0)
    axes.set_xlabel(f"seconds of step {events[0].step}")
    axes.spines[["top", "right"]].set_visible(False)
    present = {"waiting", "critical path", *(event.kind for event in events)}
    kinds = [kind for kind in _COLOURS if kind in present]
    handles = [Patch(facecolor=_COLOURS[k], hatch="////" if k in _HATCHED else None, edgecolor="white") for k in kinds]
    figure.legend(handles, kinds, loc="outside lower center", ncols=len(kinds), frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


def _label(axes: Any, step: Sequence[Activity], rows: Mapping[int, int], begin: float, width: float) -> None:
    """Label bars that are wide enough inside, and other calls above the plot, with a line to the first of each."""
    inside: set[str] = set()
    narrow: dict[str, tuple[float, int]] = {}
    for activity in sorted(step, key=lambda activity: (activity.begin, activity.event.rank)):
        kind, name = activity.event.kind, activity.event.name
        if kind in ("transfer", "wait", "announce", "release"):
            continue
        middle, row = (activity.begin + activity.end) / 2 - begin, rows[activity.event.rank]
        text = f"{kind} {name}" if kind in _HATCHED else name
        if activity.work > 0.0062 * width * len(text):
            back = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if kind in _HATCHED else None
            axes.text(middle, row - 0.06, text, ha="center", va="center", fontsize=8, clip_on=True, bbox=back)
            inside.add(text)
        elif kind not in _HATCHED:
            narrow.setdefault(text, (middle, row))
    free = -width
    for text, (middle, row) in sorted(narrow.items(), key=lambda item: item[1]):
        if text not in inside:
            free = max(middle, free + 0.018 * width)
            line = {"arrowstyle": "-", "color": "gray", "linewidth": 0.5, "relpos": (0, 0)}
            axes.annotate(
                text, (middle, row - 0.4), (free, -0.7), fontsize=7, rotation=35, va="bottom", arrowprops=line
            )
