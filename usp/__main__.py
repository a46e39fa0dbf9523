"""Tools beside training: python -m usp COMMAND."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence
from functools import partial
from pathlib import Path


def main(argv: Sequence[str], environ: MutableMapping[str, str] | None = None) -> int:
    """Run the command that `argv` names; returns the exit code: 0, or 1 with one message for what cannot be done.

    environ: where torchrun says which rank this is, for the commands that it may launch; None for a lone process.
    """
    parser = argparse.ArgumentParser(prog="python -m usp", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    trace = commands.add_parser("rlhf-trace", help="the timeline of an RLHF run: a table, a trace, a plot")
    trace.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    trace.add_argument("--step", type=int, metavar="N", help="one step (default: all)")
    trace.add_argument("--out", type=Path, metavar="FILE.png", help="the plot (default: RUN/timeline/timeline.png)")
    trace.set_defaults(command=rlhf_trace)
    _add_cost(commands)
    _add_calibrate(commands, {} if environ is None else environ)
    takes_flags = (dry_run, plan)  # train.py's
    for name, command, said in (
        ("plan", plan, "the fastest degrees for a model, a length and a number of devices"),
        ("dry-run", dry_run, "one training step of any rank, without devices"),
    ):
        commands.add_parser(name, help=said, add_help=False).set_defaults(command=command)
    asked, flags = parser.parse_known_args(argv)
    asked.flags = flags
    if flags and asked.command not in takes_flags:
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
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="also write one page of tables and plots")
    parser.set_defaults(command=cost)


def cost(asked: argparse.Namespace) -> None:
    """Print what the methods cost.

    Raises:
        ValueError: for arguments that make no sense.
    """
    from usp.commands.cost import run

    run(asked)


def _add_calibrate(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], environ: MutableMapping[str, str]
) -> None:
    measure = commands.add_parser(
        "calibrate", help="measure this machine's rates and links (torchrun ... -m usp calibrate, for all its ranks)"
    )
    measure.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the hardware file to write")
    measure.add_argument("--name", default="this machine", help="what reports call it")
    measure.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    measure.add_argument("--heads", type=int, default=8, help="of the attention that is measured")
    measure.add_argument("--head-dim", type=int, default=64, help="of the attention that is measured")
    measure.set_defaults(command=partial(calibrate, environ=environ))


def plan(asked: argparse.Namespace) -> None:
    """Print the fastest configurations, and write the first where --out says; takes the flags of train.py."""
    from usp.commands.plan import main

    main(asked.flags)


def dry_run(asked: argparse.Namespace) -> None:
    """Print what a training step would keep, send and compute; takes the flags of train.py."""
    from usp.commands.dry_run import main

    main(asked.flags)


def rlhf_trace(asked: argparse.Namespace) -> None:
    """Print the table of a run's timeline, and write its trace and its plot.

    Raises:
        ValueError: without a run or a timeline, and for a plot that is no .png.
    """
    from rich.console import Console

    from usp.commands.rlhf_trace import plot, shown, table, write_chrome_trace
    from usp.rlhf.runtime.timeline import read_events

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


def calibrate(asked: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    """Measure on all ranks that torchrun launched, or in this process alone, and write the file on the first.

    Raises:
        ValueError: for a folder that is not there, and sizes that attention cannot have.
    """
    import json

    import torch.distributed as dist

    from parallel import load_hardware
    from usp.cost.time.calibrate import Plan
    from usp.cost.time.calibrate import calibrate as measured
    from usp.run.launch import Launch, choose_device, process_group, stay_on_loopback

    if not asked.out.parent.is_dir():
        raise ValueError(f"--out {asked.out}: there is no folder {asked.out.parent}")
    if min(asked.heads, asked.head_dim) < 1:
        raise ValueError(f"--heads {asked.heads} and --head-dim {asked.head_dim} must be at least 1")
    launch = Launch.from_environment(environ)
    stay_on_loopback(launch, environ)
    device = choose_device(asked.device, launch)
    with process_group(launch, device):
        plan = Plan.of(device, launch.local_world_size, asked.heads, asked.head_dim)
        found = measured(plan, asked.name)
        if launch.rank == 0:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
            hardware = load_hardware(str(asked.out))
            peaks = ", ".join(f"{peak / 1e9:,.1f} GFLOP/s in {dtype}" for dtype, peak in hardware.peak_flops.items())
            print(f"{asked.out}: {peaks}; memory {hardware.memory_bytes_per_second / 1e9:,.1f} GB/s")
            for tier in hardware.tiers:
                link = tier.send
                print(f"  {tier.name}: {link.bytes_per_second / 1e9:.3f} GB/s, {link.alpha_seconds * 1e6:.0f} us")
        dist.barrier()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
