"""`python -m usp plan`: the fastest way to train a model on given hardware, and the file that train.py takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import yaml
from rich.console import Console
from tyro.conf import arg

from parallel import Hardware, load_hardware, node_names
from usp.cli import TRAIN, parse
from usp.config import TrainConfig, config_to_mapping
from usp.cost.advice import degrees, savings_of
from usp.cost.job import job_of
from usp.cost.plan_report import GIB, report
from usp.cost.planner import Candidate, Found, search
from usp.cost.predictor import predictor_for
from usp.cost.search import Question, layouts, suppositions
from usp.failures import ConfigurationError
from usp.hf.models import load_model_config, model_facts

USABLE = 0.9  # of a device's memory: the rest is the allocator's gaps, the context and the communication library's


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """What a plan takes beside the flags of train.py, of which it chooses the degrees and what saves memory."""

    world_size: int = 0
    """How many devices there are."""
    sequences: int = 1
    """Sequences in a step, over all devices."""
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
    found = plan(base, asked.world_size, asked.sequences, load_hardware(asked.hardware), Console())
    if asked.out:
        out.write_text(yaml.safe_dump(config_to_mapping(found.config), sort_keys=False))
        print(f"written: {out} (torchrun ... train.py --config {out})")


def plan(
    base: TrainConfig, world_size: int, sequences: int, hardware: Hardware, console: Console | None = None
) -> Candidate:
    """The fastest configuration that fits; said on `console`.

    Raises:
        ConfigurationError: where the question makes no sense, or nothing fits, with the nearest that would.
    """
    if problems := [
        f"{name} = {value} must be at least 1"
        for name, value in (("--world-size", world_size), ("--sequences", sequences))
        if value < 1
    ]:
        raise ConfigurationError("; ".join(problems))
    model_config = load_model_config(base.model)
    facts = model_facts(base.model, model_config)
    question = Question(base, sequences, world_size, hardware.tiers[0].devices or world_size)
    first = next(layouts(question, facts), None)
    if first is None:
        raise ConfigurationError(
            f"{world_size} devices cannot share {sequences} sequences of {base.seq_len} tokens of {base.model}: the "
            f"devices beside tp, pp, ring and ulysses must divide --sequences, and --seq-len be a multiple of "
            f"2 x ring x ulysses. Use powers of two for all three"
        )
    job = job_of(first, model_config, world_size)
    memory, predictor = USABLE * hardware.memory_bytes, predictor_for(job, hardware)
    found = search(question, facts, predictor, memory)
    if not found.best:
        raise ConfigurationError(_nothing_fits(found, base, world_size, hardware))
    if console is not None:
        others = []
        for supposed, other, times in suppositions(hardware):
            asked = predictor if other is hardware else predictor_for(job, other)
            best = search(question, facts, asked, times * memory, keep=1).best
            others.append((supposed, best[0] if best else None))
        console.print(report(found, facts, memory, others))
    return found.best[0]


def _nothing_fits(found: Found, base: TrainConfig, world_size: int, hardware: Hardware) -> str:
    tightest = found.tightest
    assert tightest is not None
    memory = USABLE * hardware.memory_bytes
    return (
        f"{base.model} at {base.seq_len} tokens fits {world_size} x {hardware.name} in none of {found.layouts} "
        f"layouts. The nearest is {degrees(tightest.config)} ({savings_of(tightest.config)}) with "
        f"{tightest.peak_bytes / GIB:.1f} GiB a device, of which {memory / GIB:.1f} can be used: give about "
        f"{world_size * tightest.peak_bytes / memory:.0f} devices, or fewer tokens"
    )
