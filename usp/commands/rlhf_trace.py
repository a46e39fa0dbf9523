"""python -m usp rlhf-trace: the timeline of an RLHF run."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from .flags import check, output_problem


@dataclass(frozen=True)
class RlhfTraceConfig:
    """Show where the time of an RLHF run goes: a summary of its steps; of one step the idle share of each rank and the
    critical path; and a trace for chrome://tracing or ui.perfetto.dev.

    An operation's work begins when its last rank has arrived. What the others spend until then is waiting.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Output directory of the run."""
    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: the last)")] = None
    """Step to show; the summary and the trace are then of this step, too, instead of all."""
    out: Annotated[Path | None, arg(metavar="FILE.json", help_behavior_hint="(default: RUN/timeline/trace.json)")] = (
        None
    )
    """Trace to write."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    asked = tyro.cli(RlhfTraceConfig, args=argv, prog=prog)
    from usp.rlhf.runtime.timeline import read_events
    from usp.rlhf.runtime.trace import by_step, path_table, rank_table, summary_table, write_chrome_trace

    events = read_events(asked.run, asked.step)
    out = asked.out or asked.run / "timeline" / "trace.json"
    check(output_problem("--out", out, ".json"))
    number, step = list(by_step(events).items())[-1]
    console = Console()
    for table in (summary_table(events), rank_table(number, step), path_table(number, step)):
        console.print(table.table())
    write_chrome_trace(events, out)
    print(f"trace: {out} (for chrome://tracing or ui.perfetto.dev)")
