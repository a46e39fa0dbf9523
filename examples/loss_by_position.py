"""Held-out loss by position in the document, of one run while it trains or of several runs: a table and a plot.

python examples/loss_by_position.py RUN             # how it changed during a run
python examples/loss_by_position.py RUN-A RUN-B     # the last evaluation of each
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from usp.commands.flags import check, output_problem
from usp.run.launch import leave
from usp.run.metrics import BY_POSITION, METRICS_FILE, short
from usp.run.tables import Grid

MOST = 6  # curves of one run


@dataclass(frozen=True)
class LossByPositionConfig:
    """Show held-out loss by position in the document: how one run's changed while it trained, or the last of several
    runs beside each other. A model that uses its context has a loss that falls with the position."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]")]
    """Output directories of runs of train.py with --eval-data."""
    out: Annotated[
        Path | None, arg(metavar="FILE.png", help_behavior_hint="(default: RUN/loss-by-position.png, of the first)")
    ] = None
    """Plot to write."""


@dataclass(frozen=True)
class Curve:
    """One evaluation: the mean loss, and {last: loss} of each range of positions (`HeldOutLoss.by_position`). seq_len:
    of its rows, which changes with the stages of a curriculum; None if the run did not record it. held_out: name of the
    set, of several."""

    run: str
    held_out: str
    step: int
    seq_len: int | None
    loss: float
    by_position: dict[int, float]


def read_curves(run: Path) -> list[Curve]:
    """Return the evaluations that a run recorded, in order, on each of its held-out sets. Raises ValueError if `run`
    has no metrics file or no evaluation."""
    file = run / METRICS_FILE
    if not file.is_file():
        raise ValueError(f"{run} has no {METRICS_FILE}: give the output folder of a run of train.py")
    curves = []
    for line in file.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that is writing it
            break
        sets: dict[str, dict[int, float]] = {}
        for key in (key for key in record if key.startswith(f"{BY_POSITION}/")):
            held_out, _, last = key.removeprefix(f"{BY_POSITION}/").rpartition("/")
            sets.setdefault(held_out, {})[int(last)] = record[key]
        if len(sets) > 1:
            del sets[""]  # of the first set, once more
        for held_out, losses in sets.items():
            loss = record[f"eval_loss/{held_out}" if held_out else "eval_loss"]
            curves.append(Curve(run.resolve().name, held_out, record["step"], record.get("seq_len"), loss, losses))
    if not curves:
        raise ValueError(f"{file} records no evaluation: train with --eval-data")
    return curves


def chosen_curves(runs: Sequence[Path]) -> list[Curve]:
    """Return the last evaluation of each of several runs, or of one run at most `MOST`: first, last and between; each
    on all of its held-out sets."""
    chosen = []
    for curves in map(read_curves, runs):
        steps = sorted({curve.step for curve in curves})
        shown = min(MOST, len(steps))
        places = [round(index * (len(steps) - 1) / max(1, shown - 1)) for index in range(shown)]
        last = {steps[place] for place in places} if len(runs) == 1 else steps[-1:]
        chosen += [curve for curve in curves if curve.step in last]
    return chosen


def position_table(curves: Sequence[Curve]) -> Grid:
    """Return a table with a line for each evaluation and a column for each range of positions."""
    lasts = sorted({last for curve in curves for last in curve.by_position})
    lengths, sets = _several_lengths(curves), any(curve.held_out for curve in curves)
    rows = []
    for curve in curves:
        cells = (f"{curve.by_position[last]:.4f}" if last in curve.by_position else "" for last in lasts)
        length = (short(curve.seq_len) if curve.seq_len else "",) if lengths else ()
        name = (curve.held_out,) if sets else ()
        rows.append((curve.run, *name, str(curve.step), *length, f"{curve.loss:.4f}", *cells))
    first = ("run", *(("held out",) if sets else ()), "step", *(("seq len",) if lengths else ()), "all")
    columns = (*first, *(f"to {short(last)}" for last in lasts))
    return Grid("Held-out loss by position in the document", columns, tuple(rows))


def _several_lengths(curves: Sequence[Curve]) -> bool:
    """Return whether rows have several lengths: shorter ones cut more documents, so all of their losses are higher."""
    return len({curve.seq_len for curve in curves}) > 1


def plot_positions(curves: Sequence[Curve]) -> Any:
    """Return a matplotlib figure with a line for each evaluation, from dark (the first) to light."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["viridis"]
    several = len({curve.run for curve in curves}) > 1
    for number, curve in enumerate(curves):
        label = ", ".join([*([curve.run] if several else []), *filter(None, [curve.held_out]), f"step {curve.step}"])
        if curve.seq_len and _several_lengths(curves):
            label += f", rows of {short(curve.seq_len)}"
        colour = colours(0.85 * number / max(1, len(curves) - 1))
        lasts = sorted(curve.by_position)
        axes.plot(lasts, [curve.by_position[last] for last in lasts], "o-", markersize=4, color=colour, label=label)
    ticks = sorted({last for curve in curves for last in curve.by_position})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [short(last) for last in ticks])
    axes.minorticks_off()
    axes.set_xlabel("position in the document, up to")
    axes.set_ylabel("held-out loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    if not several:
        axes.set_title(curves[0].run, fontsize="medium")
    return figure


def main(argv: Sequence[str]) -> int:
    """Print the table and write the plot; return 0, or 1 after printing what is wrong."""
    try:
        asked = tyro.cli(LossByPositionConfig, args=argv, prog="python examples/loss_by_position.py")
        if not asked.runs:
            raise ValueError("no RUN is given: name the output folder of a run of train.py")
        curves = chosen_curves(asked.runs)
        out = asked.out or asked.runs[0] / "loss-by-position.png"
        check(output_problem("--out", out, ".png"))
        Console().print(position_table(curves).table())
        plot_positions(curves).savefig(out, dpi=130)
        print(f"plot: {out}")
    except BrokenPipeError:  # the reader of the output, such as `head`, has gone
        pass
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
