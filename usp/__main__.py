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
    _add_cost(commands)
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


def _add_cost(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("cost", help="what each way to parallelise sends and keeps, side by side")
    parser.add_argument("--model", default="llama3-8b", metavar="PRESET|PATH", help="as train.py's")
    parser.add_argument("--seq-len", default="128K", metavar="N", help="tokens of a sequence; K is 1024, M 1024 K")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences in a step, over all devices")
    parser.add_argument("--devices", type=int, default=16, metavar="N", help="ranks")
    parser.add_argument("--methods", metavar="M,M,...", help="such as usp+zero1,tp-sp8+ring2 (default: all known)")
    parser.add_argument("--ac", default="none", metavar="MODE", help="activation checkpointing, as train.py's")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON instead of tables")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also plot against degree and against length")
    parser.set_defaults(command=cost)


def cost(asked: argparse.Namespace) -> None:
    """Print what the methods cost.

    Raises:
        ValueError: for arguments that make no sense.
    """
    from usp.cost.command import run

    run(asked)


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
