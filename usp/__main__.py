"""Tools for planning and analysis. Each COMMAND has its own --help."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from usp.run.failures import REFUSED, Ending, end
from usp.run.launch import Launch, hide_import_warnings, leave

COMMANDS = {
    "tokenize": "tokenize a data set once, into a token store for train.py --data",
    "plan": "find the fastest parallel configuration for a model on given hardware",
    "time": "predict the time of a step by its parts, its MFU and its memory",
    "dry-run": "run one training step of any rank without devices",
    "cost": "compare communication and memory of parallelization methods",
    "calibrate": "measure this machine's compute, memory and link speeds (start it with torchrun)",
    "rlhf-plan": "find the ranks and the layout of each model call of an RLHF step",
    "rlhf-dry-run": "run the model calls of one RLHF step of any rank without devices",
    "rlhf-trace": "show the timeline of an RLHF run",
    "rlhf-samples": "write the samples of an RLHF run as one HTML page",
}


def main(argv: Sequence[str], environ: MutableMapping[str, str] | None = None, prog: str = "python -m usp") -> int:
    """Run the command that `argv` names; return 0, or 1 after printing why it failed. Under torchrun, a failure ends
    the process, reported by `usp.run.failures.end`.

    Args:
        environ: what torchrun says about this rank, for `calibrate`; None for a single process.
        prog: program name in usage messages.
    """
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    asked, flags = parser.parse_known_args(argv)
    hide_import_warnings()
    command = command_module(asked.command)
    environ = {} if environ is None else environ
    try:
        command.main(flags, environ, f"{prog} {asked.command}")
    except BrokenPipeError:  # the reader of the output, such as `head`, has gone
        leave()
    except (ValueError, OSError) as error:
        launch = Launch.from_environment(environ)
        if launch.rendezvous:
            leave(end(Ending(f"error: {error}", REFUSED), launch, environ.get("TORCHELASTIC_ERROR_FILE")))
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def command_module(command: str) -> Any:
    """Import the module of a command, whose `main` runs it."""
    return import_module(f"usp.commands.{command.replace('-', '_')}")


def usp() -> NoReturn:
    """Run the console script `usp`."""
    leave(main(sys.argv[1:], os.environ, "usp"))


def _program(name: str) -> NoReturn:
    """Run the console script `usp-train`, which is train.py, or `usp-rlhf`, which is rlhf.py."""
    program = import_module(f"usp.commands.{name}").program
    leave(replace(program, prog=f"usp-{name}").main(sys.argv[1:], os.environ))


usp_train, usp_rlhf = partial(_program, "train"), partial(_program, "rlhf")


if __name__ == "__main__":
    leave(main(sys.argv[1:], os.environ))
