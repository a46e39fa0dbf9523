"""The command lines: flags and a file make a configuration, and every failure ends in one message.

    argv, --config FILE -> TrainConfig -> usp.train.trainer.train -> exit code

Flags override the file. The environment that torchrun sets is read here and nowhere else.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
import yaml
from tyro.conf import arg

from usp.config import TrainConfig, config_from_mapping, config_to_mapping
from usp.run.failures import INTERRUPTED, ConfigurationError, end, ending_of
from usp.run.launch import Launch, meet, stay_on_loopback
from usp.run.signals import StopRequest

if TYPE_CHECKING:
    from usp.train.prepare import PreparedRun

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class CommandLine(TrainConfig):
    """Train a causal language model with its sequences split over a Ulysses x Ring mesh, inside data, tensor, pipeline
    and expert parallelism.

    For example, on 8 ranks: torchrun --nproc-per-node 8 train.py --sp-ulysses 4 --sp-ring 2
    """

    config: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """A YAML or TOML file with these keys (the config.yaml of an earlier run, say). Flags override it."""


@dataclass(frozen=True)
class Command:
    """A program that torchrun starts on every rank.

    Attributes:
        prog: its name.
        line: the class of its flags: `config`, and the flag --config.
        config: the class of its configuration.
        load: gives what runs a configuration; called when the flags are right, because importing it takes seconds.
    """

    prog: str
    line: type
    config: type
    load: Callable[[], Callable[[Any, Launch, StopRequest, str | None], None]]


def prepare_run(config: TrainConfig, launch: Launch) -> PreparedRun:
    """Prepare a run: choose its layout under --plan auto, and predict the bytes that FSDP2 sends on this rank."""
    from usp.cost.job import job_of
    from usp.cost.planner.choice import planned
    from usp.cost.traffic.sharding import fsdp_sent_bytes
    from usp.train.prepare import prepare

    prepared = prepare(planned(config, launch), launch)
    if prepared.config.engine == "deepspeed":  # moves its bytes by rules of its own
        return prepared
    job = job_of(prepared.config, prepared.model_config, launch.world_size, prepared.shape)
    return replace(prepared, predicted_fsdp_bytes=fsdp_sent_bytes(job, launch.rank))


def _load() -> Callable[[TrainConfig, Launch, StopRequest, str | None], None]:
    from usp.train.trainer import train

    return lambda config, launch, stop, error_file: train(prepare_run(config, launch), launch, stop, error_file)


TRAIN = Command("train.py", CommandLine, TrainConfig, _load)


def main(argv: Sequence[str], environ: MutableMapping[str, str], command: Command = TRAIN) -> int:
    """Run `command` as `argv` asks, in the place that `environ` names; returns the exit code."""
    launch = meet(Launch.from_environment(environ))
    stay_on_loopback(launch, environ)
    environ.setdefault("LOCAL_RANK", str(launch.local_rank))  # DeepSpeed asks for it, launched or not
    stop, error_file = StopRequest(), environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        config = parse(argv, show_help=launch.rank == 0, command=command)
        run = command.load()
        with stop.listening():
            run(config, launch, stop, error_file)
    except (Exception, KeyboardInterrupt) as error:
        try:
            return end(ending_of(error, launch.rank), launch, error_file, asked_to_stop=stop.requested)
        except KeyboardInterrupt:  # while it waited for the launcher
            return INTERRUPTED
    return 0


def parse(argv: Sequence[str], show_help: bool = True, command: Command = TRAIN) -> Any:
    """The configuration that the flags, and the file that --config names, ask for.

    Leaves with SystemExit(0) when asked for help, printed where `show_help`. Raises ConfigurationError for a wrong
    flag or value, a file that cannot be read, and a wrong key in it.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default="", nargs="?", const="")  # without a path it is tyro's to refuse
    path = finder.parse_known_args(argv)[0].config
    file_config = read_config(path, command.config) if path else command.config()
    default = command.line(**config_to_mapping(file_config), config=path)
    mistakes = io.StringIO()
    try:
        with redirect_stderr(mistakes), nullcontext() if show_help else redirect_stdout(io.StringIO()):
            parsed = tyro.cli(command.line, args=argv, default=default, prog=command.prog)
    except SystemExit as stop:
        if stop.code:
            raise ConfigurationError(f"the command line holds a mistake\n{mistakes.getvalue().rstrip()}") from None
        raise
    return command.config(**{field.name: getattr(parsed, field.name) for field in fields(command.config)})


def read_config(path: str, kind: type) -> Any:
    """The configuration of class `kind` in a .yaml, .yml or .toml file; ConfigurationError when it holds none."""
    file = Path(path).expanduser()
    try:
        return config_from_mapping(_read_mapping(file), kind)
    except FileNotFoundError as error:
        raise ConfigurationError(f"--config {path}: no such file") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path}: {error}") from error


class UniqueKeysLoader(yaml.SafeLoader):
    """YAML as `safe_load` reads it, but a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in found:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", key.start_mark)
            found.add(name)
        return super().construct_mapping(node, deep)


def _read_mapping(file: Path) -> dict[str, Any]:
    if file.suffix == ".toml":
        return tomllib.loads(file.read_text())
    if file.suffix not in (".yaml", ".yml"):
        raise ValueError(f"the name ends in {file.suffix!r}, it must end in .yaml, .yml or .toml")
    mapping = yaml.load(file.read_text(), UniqueKeysLoader)
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise ValueError(f"it holds a {type(mapping).__name__}, it must hold keys with values")
    return mapping
