"""python -m usp rlhf-samples: the samples of an RLHF run as one page."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from .flags import check, output_problem


@dataclass(frozen=True)
class RlhfSamplesConfig:
    """Write the samples of an RLHF run as one HTML page, which needs no network: prompts, responses, scores, and each
    token's log-probability in training and at sampling."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Output directory of the run."""
    out: Annotated[Path | None, arg(metavar="FILE.html", help_behavior_hint="(default: RUN/samples.html)")] = None
    """Page to write."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    asked = tyro.cli(RlhfSamplesConfig, args=argv, prog=prog)
    from usp.rlhf.records import read_samples, sample_page

    samples = read_samples(asked.run)
    out = asked.out or asked.run / "samples.html"
    check(output_problem("--out", out, ".html"))
    out.write_text(sample_page(f"Samples of {asked.run.resolve().name}", samples), encoding="utf-8")
    print(f"{len(samples)} samples: {out}")
