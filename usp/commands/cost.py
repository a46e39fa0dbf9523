"""python -m usp cost: time, communication and memory of parallelization methods, side by side."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import arg

from usp.config import AC_MODES, FP8, TrainConfig
from usp.fields import TOKENS, AtLeast1, at_least, one_of, value_violations
from usp.parallel import load_hardware

from .flags import DataFlags, JobFlags, Node, data_of, terms_of


@dataclass(frozen=True)
class CostConfig(JobFlags, DataFlags):
    """Compare the time, communication and memory of parallelization methods.

    For example: python -m usp cost --model llama3-8b --seq-len 128K --world-size 16 --methods usp+zero1,tp-sp8+ring2
    """

    model: Annotated[str, arg(metavar="PRESET|PATH")] = "llama3-8b"
    """Model preset or local transformers checkpoint directory."""
    seq_len: Annotated[int, TOKENS, at_least(1)] = 2**17
    """Sequence length in tokens; 128K is 131072, 1M is 1024K."""
    global_batch_size: AtLeast1 = 1
    """Sequences per step over all devices."""
    micro_batch: AtLeast1 = 1
    """Sequences of a micro-batch on one data-parallel rank, the same in every method."""
    world_size: AtLeast1 = 16
    """Number of devices."""
    methods: Annotated[str, arg(metavar="M,M,...", help_behavior_hint="(default: all)")] = ""
    """Methods to compare, such as usp+zero1,tp-sp8+ring2."""
    ac: Annotated[str, one_of(AC_MODES)] = "none"
    """Activation checkpointing mode."""
    fp8: Annotated[str, one_of(FP8)] = "none"
    """Float8 products of the layers' linears, as of train.py."""
    hardware: Node = "h100"
    json: bool = False
    """Print JSON, with sizes in bytes."""
    markdown: bool = False
    """Print Markdown tables."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Print the comparison that `argv` asks for; raise ValueError naming all invalid arguments."""
    asked = tyro.cli(CostConfig, args=argv, prog=prog)
    both = ["--json and --markdown are mutually exclusive: give one"] if asked.json and asked.markdown else []
    if invalid := [*value_violations(asked).values(), *both]:
        raise ValueError("; ".join(invalid))
    from usp.hf.models import load_model_config, model_facts
    from usp.planning import comparison
    from usp.planning.job_cost import job_grid
    from usp.planning.methods import DEFAULT, Method

    terms = terms_of(asked)
    methods = [Method.parse(name.strip()) for name in (asked.methods.split(",") if asked.methods else DEFAULT)]
    model_config = load_model_config(asked.model, weights=False)
    read = model_facts(asked.model, model_config)
    if read.formula_violation:
        raise ValueError(read.formula_violation)
    setting = comparison.Setting(
        hardware=load_hardware(asked.hardware),
        world_size=asked.world_size,
        base=TrainConfig(model=asked.model, seq_len=asked.seq_len, ac=asked.ac, dtype="bfloat16", fp8=asked.fp8),
        model_config=model_config,
        sequences=asked.global_batch_size,
        rows=asked.micro_batch,
        data=data_of(asked, read),
    )
    compared, problems = comparison.compare(methods, setting)
    judged = comparison.judge(compared)
    shown = [comparison.verdict_table(judged, setting.hardware.name)] if judged else []
    costs = [(each.method, each.step.job_cost(terms)) for each in judged if each.step.fits]
    jobs = [job_grid(terms, costs)] if terms.asked and costs else []
    shown += [*jobs, *comparison.comparison_tables(compared, problems)]
    if asked.json:
        print(json.dumps(comparison.comparison_json(methods, judged, problems, terms), indent=1))
    elif asked.markdown:
        print("\n".join(table.markdown() for table in shown), end="")
    else:
        Console().print(*(table.table() for table in shown), sep="\n")
