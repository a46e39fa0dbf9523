"""python -m usp cost: what each way to parallelise costs, for one model, length and number of devices."""

from __future__ import annotations

import argparse
import json
import re

from rich.console import Console

from usp.config import AC_MODES, TrainConfig, nearest
from usp.hf.models import load_model_config

from .comparison import compare
from .methods import DEFAULT, Method
from .plots import plot, sweep
from .report import as_json, grids

UNITS = {"": 1, "K": 2**10, "M": 2**20}


def run(asked: argparse.Namespace) -> None:
    """Print what was asked for.

    Raises:
        ValueError: for what makes no sense, all of it together with the arguments' names.
    """
    seq_len = tokens(asked.seq_len)
    problems = [f"--{name} {getattr(asked, name)} must be at least 1" for name in ("batch", "devices") if
                getattr(asked, name) < 1]  # fmt: skip
    if asked.ac not in AC_MODES:
        problems.append(f"--ac {asked.ac} must be one of {', '.join(AC_MODES)}{nearest(asked.ac, AC_MODES)}")
    if asked.json and asked.markdown:
        problems.append("--json and --markdown are two ways to print the same: give one")
    if asked.plot is not None and asked.plot.suffix != ".png":
        problems.append(f"--plot {asked.plot} must end in .png")
    elif asked.plot is not None and not asked.plot.parent.is_dir():
        problems.append(f"--plot {asked.plot}: there is no folder {asked.plot.parent}")
    if problems:
        raise ValueError("; ".join(problems))
    methods = [Method.parse(name.strip()) for name in (asked.methods.split(",") if asked.methods else DEFAULT)]
    base = TrainConfig(model=asked.model, seq_len=seq_len, ac=asked.ac, dtype="bfloat16")
    model_config = load_model_config(asked.model)
    found = compare(methods, base, model_config, asked.devices, asked.batch)
    if asked.json:
        print(json.dumps(as_json(found), indent=1))
    elif asked.markdown:
        print("\n".join(grid.markdown() for grid in grids(found)), end="")
    else:
        console = Console()
        for grid in grids(found):
            grid.show(console)
    if asked.plot is not None:
        title = f"{asked.model}, {asked.devices} devices, {asked.seq_len} tokens, batch {asked.batch}"
        plot(*sweep(methods, base, model_config, asked.devices, asked.batch), title, asked.plot)


def tokens(text: str) -> int:
    """`128K` as 131072.

    Raises:
        ValueError: for anything else than a positive whole number with K, M or nothing behind it.
    """
    found = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if found is None or not int(found[1]):
        raise ValueError(f"--seq-len {text} must be a number of tokens such as 131072, 128K or 1M")
    return int(found[1]) * UNITS[found[2]]
