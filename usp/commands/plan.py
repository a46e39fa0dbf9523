"""python -m usp plan: the fastest way to train a model on given hardware, as a file for train.py."""

from __future__ import annotations

import gc
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import yaml
from rich.console import Console
from tyro.conf import arg

from usp.config import CHOSEN, UNPREDICTED, TrainConfig
from usp.parallel import load_hardware
from usp.run.failures import ConfigurationError
from usp.run.output import working

from . import flags

if TYPE_CHECKING:
    from usp.planning.choice import Choice


@dataclass(frozen=True)
class PlanConfig(flags.JobFlags, flags.DataFlags, TrainConfig):
    """Find the fastest parallel configuration for a model, a sequence length and a number of devices.

    The plan sets the parallel degrees, ZeRO stage, activation checkpointing and micro-batches. A configuration file may
    be given as the first argument, without --config.

    Several kinds or numbers of devices are compared, in time and in money.

    For example: python -m usp plan --model llama3-8b --seq-len 131072 --world-size 64 --hardware h100
    """

    world_size: Annotated[str, arg(metavar="N|N,N,...")] = ""
    """Number of devices."""
    global_batch_size: int = 1
    """Sequences per step over all devices."""
    hardware: Annotated[str, arg(metavar="NODE|PATH.json,...", help=flags.NODE_HELP)] = "h100"
    out: Annotated[str, arg(metavar="PATH.yaml", help_behavior_hint="(optional)")] = ""
    """Write the first configuration to this file, for train.py --config."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Print the plan that `argv` asks for, and write it to --out; raise ConfigurationError if nothing fits."""
    gc.disable()  # imports and a search make no cycles worth looking for
    without = {*UNPREDICTED, *CHOSEN, "curriculum"} - {"train_tokens"}
    asked = flags.parse(argv, PlanConfig, prog, leading_config=True, without=without)

    from usp.planning.choice import choose, compare_choices, render_plan, tell

    out = Path(asked.out).expanduser() if asked.out else None
    flags.check(flags.output_problem("--out", out, ".yaml", ".yml"))
    sizes, terms = _sizes(asked.world_size), flags.terms_of(asked)
    kinds = {name: load_hardware(name) for name in asked.hardware.split(",")}
    config = replace(flags.as_kind(asked, TrainConfig), train_tokens=0, hardware=TrainConfig.hardware)
    places = [(kind, size) for kind in kinds.values() for size in sizes]
    if out and len(places) > 1:
        raise ConfigurationError("--out needs one plan: give one --hardware and one --world-size")
    choices: dict[str, Choice | str] = {}
    with working("planning") as say:
        for hardware, size in places:
            name = f"{size} x {hardware.name}"
            try:
                choices[name] = choice = choose(
                    config, size, hardware, partial(tell, say), partial(flags.data_of, asked)
                )
            except ConfigurationError as error:
                if len(places) == 1:
                    raise
                choices[name] = str(error)
        shown = render_plan(choice, terms) if len(places) == 1 else compare_choices(choices, terms)
    Console().print(shown)
    if out:
        out.write_text(yaml.safe_dump(asdict(choice.best.config), sort_keys=False))
        print(f"written: {out} (torchrun ... train.py --config {out})")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")] if text else [0]
    except ValueError:
        raise ConfigurationError(f"--world-size = {text} must be a number of devices, or several: 64,128") from None
    for size in sizes:
        flags.check_world_size(size)
    return sizes
