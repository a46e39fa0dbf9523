"""`python -m usp dry-run`: flags and a file make a configuration, whose step is run without devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

from rich.console import Console
from tyro.conf import arg

from usp.config import TrainConfig
from usp.cost.dry_run.dry_run import dry_run
from usp.cost.dry_run.dry_run_report import dry_run_json, render_dry_run
from usp.run.failures import ConfigurationError

from .train import TRAIN, parse


@dataclass(frozen=True)
class DryRunConfig(TrainConfig):
    """What a dry run takes beside the flags of train.py."""

    world_size: int = 0
    """How many ranks the run would have."""
    rank: int = 0
    """Which of them to be."""
    json: bool = False
    """Print JSON, sizes in bytes."""


@dataclass(frozen=True)
class DryRunLine(DryRunConfig):
    """One training step without devices: what a rank of any world keeps, sends and computes.

    For example: python -m usp dry-run runs/last/config.yaml --world-size 1024 --dp-shard -1 --sp-ring 16
    """

    config: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """A YAML or TOML file with these keys, which may stand first without this flag. Flags override it."""


def main(argv: Sequence[str]) -> None:
    """Print the dry run that `argv` asks for.

    Raises:
        ConfigurationError: for a wrong flag or file, and as `dry_run`.
    """
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--config")
    command = replace(TRAIN, prog="python -m usp dry-run", line=DryRunLine, config=DryRunConfig)
    asked = parse(words, command=command)
    if asked.world_size < 1:
        raise ConfigurationError("a dry run needs the number of ranks: give --world-size, at least 1")
    config = TrainConfig(**{field.name: getattr(asked, field.name) for field in fields(TrainConfig)})
    run = dry_run(config, asked.world_size, asked.rank)
    if asked.json:
        print(json.dumps(dry_run_json(run), indent=2))
    else:
        Console().print(render_dry_run(run))
