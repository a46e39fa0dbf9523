"""python -m usp plan: the fastest way to train a model on given hardware, as a file for train.py."""

from __future__ import annotations

import gc
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import yaml
from rich.console import Console
from tyro.conf import arg

from parallel import load_hardware
from usp.config import UNPREDICTED, TrainConfig
from usp.planning.question import CHOSEN

from .flags import DataFlags, Node, as_kind, check, data_of, output_problem, parse


@dataclass(frozen=True)
class PlanConfig(DataFlags, TrainConfig):
    """Find the fastest parallel configuration for a model, a sequence length and a number of devices.

    The plan sets the parallel degrees, ZeRO stage, activation checkpointing and micro-batches. A configuration file may
    be given as the first argument, without --config.

    For example: python -m usp plan --model llama3-8b --seq-len 131072 --world-size 64 --hardware h100
    """

    world_size: int = 0
    """Number of devices."""
    global_batch_size: int = 1
    """Sequences per step over all devices."""
    hardware: Node = "h100"
    out: Annotated[str, arg(metavar="PATH.yaml", help_behavior_hint="(optional)")] = ""
    """Write the fastest configuration to this file, for train.py --config."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Print the plan that `argv` asks for, and write it to --out; raise ConfigurationError if nothing fits."""
    without = {*UNPREDICTED, *CHOSEN, "curriculum"} - {"compile"}
    asked = parse(argv, PlanConfig, prog, leading_config=True, without=without)

    from usp.planning.choice import choose, render_plan, suppose

    gc.disable()  # a search makes no cycles worth looking for
    out = Path(asked.out).expanduser()
    check(output_problem("--out", out if asked.out else None, ".yaml", ".yml"))
    with Console(stderr=True).status("planning") as status:

        def report(tried: int, layouts: int) -> None:
            if tried % 100 == 0:
                status.update(f"planning: {tried} of {layouts} layouts tried; most are ruled out by their bounds")

        hardware, data = load_hardware(asked.hardware), partial(data_of, asked)
        choice = choose(as_kind(asked, TrainConfig), asked.world_size, hardware, report, data)
        status.update("planning: with other memory and links")
        shown = render_plan(choice, suppose(choice))
    Console().print(shown)
    if asked.out:
        out.write_text(yaml.safe_dump(asdict(choice.best.config), sort_keys=False))
        print(f"written: {out} (torchrun ... train.py --config {out})")
