"""Tools for planning and analysis. See `python -m usp COMMAND --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib import import_module
from typing import NoReturn

from usp.run.launch import leave

COMMANDS = {
    "plan": "find the fastest parallel configuration for a model on given hardware",
    "dry-run": "run one training step of any rank without devices",
    "cost": "compare communication and memory of parallelization methods",
    "calibrate": "measure this machine's compute, memory and link speeds (start it with torchrun)",
    "models": "say which models of transformers run with sequence parallelism, and why others do not",
    "rlhf-trace": "show the timeline of an RLHF run",
}


def main(argv: Sequence[str], environ: MutableMapping[str, str] | None = None) -> int:
    """Run the command that `argv` names; return 0, or 1 after printing why it failed.

    environ: what torchrun says about this rank, for `calibrate`; None for a single process.
    """
    parser = argparse.ArgumentParser(prog="python -m usp", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    asked, flags = parser.parse_known_args(argv)
    command = import_module(f"usp.commands.{asked.command.replace('-', '_')}")
    try:
        command.main(flags, {} if environ is None else environ)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def usp() -> NoReturn:
    """Run `python -m usp` as a console script."""
    sys.exit(main(sys.argv[1:], os.environ))


def usp_train() -> NoReturn:
    """Run train.py as a console script."""
    _program("train")


def usp_rlhf() -> NoReturn:
    """Run rlhf.py as a console script."""
    _program("rlhf")


def _program(name: str) -> NoReturn:
    leave(import_module(f"usp.commands.{name}").main(sys.argv[1:], os.environ))


if __name__ == "__main__":
    usp()
