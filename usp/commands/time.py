"""python -m usp time: the predicted step of a configuration on given hardware."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console

from usp.config import UNPREDICTED, TrainConfig
from usp.parallel.cluster.hardware import load_hardware

from .flags import DataFlags, JobFlags, Node, as_kind, check_world_size, data_of, parse, terms_of


@dataclass(frozen=True)
class TimeConfig(JobFlags, DataFlags, TrainConfig):
    """Predict the time of a step by its parts, its MFU and its memory, without devices: by formulas, or for models,
    adapters and optimizers that have none by a dry run.

    A configuration file may be given as the first argument, without --config.

    For example: python -m usp time --model llama3-8b --seq-len 131072 --sp-ulysses 8 --world-size 64 --hardware h100
    """

    world_size: int = 0
    """Number of devices."""
    hardware: Node = "h100"
    json: bool = False
    """Print JSON and nothing else, with times in seconds and sizes in bytes."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    asked = parse(argv, TimeConfig, prog, leading_config=True, without=UNPREDICTED - {"train_tokens"})
    check_world_size(asked.world_size)

    from usp.planning.step_report import render, report_json, step_report

    config = replace(as_kind(asked, TrainConfig), hardware=TrainConfig.hardware, train_tokens=0)
    terms = terms_of(asked)
    name = TimeConfig.hardware if asked.hardware == "auto" else asked.hardware  # auto: of a file
    report = step_report(config, asked.world_size, load_hardware(name), partial(data_of, asked))
    if asked.json:
        print(json.dumps(report_json(report, terms), indent=2))
    else:
        Console().print(render(report, terms))
