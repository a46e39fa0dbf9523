"""python -m usp cost: what each way to parallelise costs, for one model, length and number of devices."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from rich.console import Console

from usp.config import AC_MODES, TrainConfig
from usp.cost.compare.comparison import compare
from usp.cost.compare.page import page
from usp.cost.compare.plots import plot, sweep
from usp.cost.compare.tables import comparison_json, comparison_tables
from usp.cost.methods import DEFAULT, Method
from usp.hf.models import load_model_config
from usp.run.failures import nearest

CONVENTIONS = (
    "On the wire: payload bytes as this implementation sends them, which tests hold against real process groups. "
    "As the paper counts: Table 2 of arXiv 2405.07719."
)
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
    problems += _unwritable("--plot", asked.plot, ".png") + _unwritable("--html", asked.html, ".html")
    if problems:
        raise ValueError("; ".join(problems))
    methods = [Method.parse(name.strip()) for name in (asked.methods.split(",") if asked.methods else DEFAULT)]
    base = TrainConfig(model=asked.model, seq_len=seq_len, ac=asked.ac, dtype="bfloat16")
    model_config = load_model_config(asked.model)
    found = compare(methods, base, model_config, asked.devices, asked.batch)
    if asked.json:
        print(json.dumps(comparison_json(found), indent=1))
    elif asked.markdown:
        print("\n".join(table.markdown() for table in comparison_tables(found)), end="")
    else:
        Console().print(*(table.table() for table in comparison_tables(found)), sep="\n")
    if asked.plot is None and asked.html is None:
        return
    title = f"{asked.model}, {asked.devices} devices, {asked.seq_len} tokens, batch {asked.batch}"
    drawn = plot(*sweep(methods, base, model_config, asked.devices, asked.batch))
    if asked.plot is not None:
        drawn.suptitle(title)
        drawn.savefig(asked.plot)
    if asked.html is not None:
        drawn.suptitle("")
        facts = (f"Activation checkpointing: {asked.ac}. Bytes are of one rank and one optimiser step.", CONVENTIONS)
        asked.html.write_text(page(title, facts, comparison_tables(found), drawn))


def _unwritable(flag: str, path: Path | None, suffix: str) -> list[str]:
    if path is None:
        return []
    if path.suffix != suffix:
        return [f"{flag} {path} must end in {suffix}"]
    return [] if path.parent.is_dir() else [f"{flag} {path}: there is no folder {path.parent}"]


def tokens(text: str) -> int:
    """`128K` as 131072.

    Raises:
        ValueError: for anything else than a positive whole number with K, M or nothing behind it.
    """
    found = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if found is None or not int(found[1]):
        raise ValueError(f"--seq-len {text} must be a number of tokens such as 131072, 128K or 1M")
    return int(found[1]) * UNITS[found[2]]
