"""`python -m usp plan`: the fastest way to train a model on given hardware, and the file that train.py takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import yaml
from rich.console import Console
from tyro.conf import arg

from parallel import load_hardware, node_names
from usp.config import TrainConfig, config_to_mapping
from usp.cost.planner.choice import choose, suppose
from usp.cost.planner.plan_report import render_plan
from usp.run.failures import ConfigurationError

from .train import TRAIN, parse


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """What a plan takes beside the flags of train.py, of which it chooses the degrees and what saves memory."""

    world_size: int = 0
    """How many devices there are."""
    global_batch_size: int = 1
    """Sequences per step over all devices."""
    hardware: Annotated[str, arg(metavar="NODE|PATH.json", help=f"{', '.join(node_names())}, or a file.")] = "h100"
    out: Annotated[str, arg(metavar="PATH.yaml", help_behavior_hint="(optional)")] = ""
    """Write the first of them where train.py --config finds it."""


@dataclass(frozen=True)
class PlanLine(PlanConfig):
    """The fastest degrees for a model, a length and a number of devices, with the reasons.

    For example: python -m usp plan --model llama3-8b --seq-len 131072 --world-size 64 --hardware h100
    """

    config: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """A YAML or TOML file with these keys, which may stand first without this flag. Flags override it."""


def main(argv: Sequence[str]) -> None:
    """Print the plan that `argv` asks for, and write it where --out says.

    Raises:
        ConfigurationError: for a wrong flag or file, and where nothing fits, with the nearest that would.
    """
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--config")
    asked = parse(words, command=replace(TRAIN, prog="python -m usp plan", line=PlanLine, config=PlanConfig))
    out = Path(asked.out).expanduser()
    if asked.out and (out.suffix not in (".yaml", ".yml") or not out.parent.is_dir()):
        raise ConfigurationError(f"--out = {asked.out} must be a .yaml file in a folder that exists")
    base = TrainConfig(**{field.name: getattr(asked, field.name) for field in fields(TrainConfig)})
    choice = choose(base, asked.world_size, load_hardware(asked.hardware))
    Console().print(render_plan(choice, suppose(choice)))
    if asked.out:
        out.write_text(yaml.safe_dump(config_to_mapping(choice.best.config), sort_keys=False))
        print(f"written: {out} (torchrun ... train.py --config {out})")
