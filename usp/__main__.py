"""Tools that need no launcher: python -m usp COMMAND."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; returns the exit code: 0, or 1 with one message for what cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m usp", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    trace = commands.add_parser("rlhf-trace", help="the timeline of an RLHF run: a table, a trace, a plot")
    trace.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    trace.add_argument("--step", type=int, metavar="N", help="one step (default: all)")
    trace.add_argument("--out", type=Path, metavar="FILE.png", help="the plot (default: RUN/timeline/timeline.png)")
    trace.set_defaults(command=rlhf_trace)
    dry = commands.add_parser("dry-run", help="one training step of any rank, without devices", add_help=False)
    dry.set_defaults(command=dry_run)
    asked, flags = parser.parse_known_args(argv)
    asked.flags = flags
    if flags and asked.command is not dry_run:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        asked.command(asked)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def dry_run(asked: argparse.Namespace) -> None:
    """Print what a training step would keep, send and compute; takes the flags of train.py."""
    from usp.dry_run_cli import main

    main(asked.flags)


def rlhf_trace(asked: argparse.Namespace) -> None:
    """Print the table of a run's timeline, and write its trace and its plot.

    Raises:
        ValueError: without a run or a timeline, and for a plot that is no .png.
    """
    from rich.console import Console

    from usp.rlhf.timeline import read_events
    from usp.rlhf.trace import plot, shown, table, write_chrome_trace

    events = shown(read_events(asked.run, asked.step))
    out = asked.out or asked.run / "timeline" / "timeline.png"
    if out.suffix != ".png":
        raise ValueError(f"--out {out} must end in .png")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    Console().print(table(events))
    plot(events, out)
    trace = out.with_suffix(".json")
    write_chrome_trace(events, trace)
    print(f"plot: {out}\ntrace: {trace} (for chrome://tracing or ui.perfetto.dev)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
