"""python -m usp dry-run: one training step on a simulated rank, without devices."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from usp.config import UNPREDICTED, TrainConfig

from .flags import as_kind, check_world_size, parse


@dataclass(frozen=True)
class DryRunConfig(TrainConfig):
    """Run one training step of one rank without devices, and report its memory, communication and FLOPs.

    Compiled dense layers are counted as with --ac selective, which saves as much, others as eager ones.

    For example: python -m usp dry-run runs/last/config.yaml --world-size 1024 --dp-shard -1 --sp-ring 16
    """

    world_size: int = 0
    """Number of ranks to simulate."""
    rank: int = 0
    """Rank to report on."""
    json: bool = False
    """Print JSON, with sizes in bytes."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    asked = parse(argv, DryRunConfig, prog, leading_config=True, without=UNPREDICTED)
    check_world_size(asked.world_size)
    from usp.train.dry_run import dry_run, dry_run_json, render_dry_run

    run = dry_run(as_kind(asked, TrainConfig), asked.world_size, asked.rank)
    if asked.json:
        print(json.dumps(dry_run_json(run), indent=2))
    else:
        Console().print(render_dry_run(run))
