"""python -m usp rlhf-trace: the timeline of an RLHF run."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from .flags import output_problem


@dataclass(frozen=True)
class RlhfTraceConfig:
    """Show the timeline of an RLHF run as a table, a trace for chrome://tracing or ui.perfetto.dev, and a plot."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Output directory of the run."""
    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Step to show."""
    out: Annotated[Path | None, arg(metavar="FILE.png", help_behavior_hint="(default: RUN/timeline/timeline.png)")] = (
        None
    )
    """Plot to write; the trace is written next to it, as .json."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Print the table of a run's timeline, and write its trace and plot."""
    asked = tyro.cli(RlhfTraceConfig, args=argv, prog=prog)
    from usp.rlhf.runtime.timeline import read_events
    from usp.rlhf.runtime.trace import plot, shown, table, write_chrome_trace

    events = shown(read_events(asked.run, asked.step))
    out = asked.out or asked.run / "timeline" / "timeline.png"
    if problem := output_problem("--out", out, ".png"):
        raise ValueError(problem)
    Console().print(table(events))
    plot(events, out)
    trace = out.with_suffix(".json")
    write_chrome_trace(events, trace)
    print(f"plot: {out}\ntrace: {trace} (for chrome://tracing or ui.perfetto.dev)")
