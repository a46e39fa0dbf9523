"""python -m usp loss-by-position: the held-out losses of runs by position."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from .flags import check, output_problem


@dataclass(frozen=True)
class LossByPositionConfig:
    """Show held-out loss by position in the document: how one run's changed while it trained, or the last of several
    runs beside each other. A model that uses its context has a loss that falls with the position."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]")]
    """Output directories of runs of train.py with --eval-data."""
    out: Annotated[
        Path | None, arg(metavar="FILE.png", help_behavior_hint="(default: RUN/loss-by-position.png, of the first)")
    ] = None
    """Plot to write."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    asked = tyro.cli(LossByPositionConfig, args=argv, prog=prog)
    from usp.evaluation.curves import chosen_curves, plot_positions, position_table

    if not asked.runs:
        raise ValueError("no RUN is given: name the output folder of a run of train.py")
    curves = chosen_curves(asked.runs)
    out = asked.out or asked.runs[0] / "loss-by-position.png"
    check(output_problem("--out", out, ".png"))
    Console().print(position_table(curves).table())
    plot_positions(curves).savefig(out, dpi=130)
    print(f"plot: {out}")
