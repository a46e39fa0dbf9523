"""The command line of RLHF: rlhf.py's flags and files, as `usp.commands.train` reads them."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from usp.commands import train as cli
from usp.rlhf.config import RlhfConfig
from usp.run.launch import Launch
from usp.run.signals import StopRequest


@dataclass(frozen=True)
class CommandLine(RlhfConfig):
    """Train a language model with PPO, GRPO and their kin, or on examples and pairs, every call of a model in a layout
    of its own.

    For example, on 8 ranks: torchrun --nproc-per-node 8 rlhf.py --algorithm grpo --sp-ulysses 2 --sp-ring 2
    """

    config: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """A YAML or TOML file with these keys (the config.yaml of an earlier run, say). Flags override it."""


def _load() -> Callable[[Any, Launch, StopRequest, str | None], None]:
    from usp.rlhf.trainer import train_rlhf

    return train_rlhf


RLHF = cli.Command("rlhf.py", CommandLine, RlhfConfig, _load)


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Train as `argv` asks, in the place that `environ` names; returns the exit code."""
    return cli.main(argv, environ, RLHF)
