"""Flags and configuration files of a command, and programs that torchrun starts on every rank.

Every field of a dataclass is a key of the YAML or TOML file that `--config` names and, unless a command leaves it out,
a flag. Flags override the file.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Collection, MutableMapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import tyro
import yaml
from tyro.conf import Fixed, Suppress, arg

from usp.config import EITHER, TrainConfig, without_removed
from usp.fields import (
    CORPUS,
    NotNegative,
    as_given,
    at_least,
    config_from_mapping,
    shared_values,
    token_count,
    value_violations,
)
from usp.model.facts import ModelFacts
from usp.parallel import node_names
from usp.run.failures import INTERRUPTED, ConfigurationError, end, ending_of, listed
from usp.run.launch import (
    Launch,
    StopRequest,
    end_with_launcher,
    hide_import_warnings,
    leave,
    meet,
    set_library_defaults,
)
from usp.run.output import warn

if TYPE_CHECKING:
    from usp.planning.job_cost import Terms
    from usp.predict.job import Data

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

C = TypeVar("C")
NODE_HELP = f"{', '.join(node_names())}, or a file from python -m usp calibrate."
Node = Annotated[str, arg(metavar="NODE|PATH.json", help=NODE_HELP)]


@dataclass(frozen=True)
class ConfigFile:
    """Flag that `parse` adds to every configuration."""

    config: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """YAML or TOML file with these keys, such as the config.yaml of a run. Flags override it."""


@dataclass(frozen=True)
class DataFlags:
    """Flags of predictions: what they assume of the data."""

    document_tokens: Annotated[str, arg(metavar="N|N,N,...", help_behavior_hint="(default: one document)")] = ""
    """Tokens of the documents of a sequence, repeated until it is full, such as 4K or 512,2K,16K."""
    router_imbalance: float = 1.0
    """Tokens of the busiest expert-parallel rank relative to the mean, for models with experts."""


@dataclass(frozen=True)
class JobFlags:
    """Flags of predictions: what to tell of a whole job."""

    price: Annotated[str, arg(metavar="PRICE|PATH", help_behavior_hint="(optional)")] = ""
    """Price of a device-hour, or a JSON or YAML file of prices by hardware name, such as h100: 2.5."""
    train_tokens: Annotated[int, CORPUS, at_least(0)] = 0
    """Tokens that times and costs are for, such as 300B or 15T. 0: a billion."""
    deadline: Annotated[NotNegative, arg(metavar="HOURS", help_behavior_hint="(optional)")] = 0.0
    """Hours of wall-clock time that the job may take, restarts included."""
    failures: Annotated[NotNegative, arg(help_behavior_hint="(default: 0.0197)")] = 0.0
    """Failures in 1,000 device-hours. The default is that of Llama 3 (arXiv 2407.21783, section 3.3.4)."""
    checkpoint_minutes: NotNegative = 30.0
    """Minutes between checkpoints; a failure loses half of them."""
    restart_minutes: NotNegative = 15.0
    """Minutes from a failure to the next step."""


def terms_of(asked: JobFlags) -> Terms:
    """Return what the flags ask of a job. Raises ConfigurationError for wrong values, and a file that has no prices."""
    from usp.planning.job_cost import FAILURES, Terms

    check(*value_violations(as_kind(asked, JobFlags)).values())
    return Terms(
        asked.train_tokens,
        prices_of(asked.price),
        asked.deadline or math.inf,
        asked.failures / 1000 or FAILURES,
        asked.checkpoint_minutes,
        asked.restart_minutes,
    )


def prices_of(text: str) -> dict[str, float]:
    """Return prices by hardware in lower case, "" for any, from a price or a file; else raise ConfigurationError."""
    if not text:
        return {}
    try:
        prices = {"": float(text)}
    except ValueError:
        file = Path(text).expanduser()
        try:
            read = yaml.load(file.read_text(), UniqueKeysLoader)  # JSON is YAML
            prices = {str(name).lower(): float(price) for name, price in read.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
            raise ConfigurationError(
                f"--price {text} must be a price or a JSON or YAML file of prices by hardware name: {error}"
            ) from None
    check(*(f"--price: {price} must be positive" for price in prices.values() if not 0 < price < math.inf))
    return prices


def data_of(asked: DataFlags, facts: ModelFacts) -> Data:
    """Return what the flags say of the data. Raises ConfigurationError for wrong values, and an imbalance of a model
    without experts."""
    from usp.predict.job import Data

    if asked.router_imbalance != 1 and not facts.num_experts:
        raise ConfigurationError(
            f"--router-imbalance = {asked.router_imbalance:g} has no effect on {facts.name}, which has no experts: "
            "remove it"
        )
    try:
        lengths = tuple(token_count(word) for word in asked.document_tokens.split(",") if word.strip())
        return Data(lengths, asked.router_imbalance)
    except ValueError as error:
        raise ConfigurationError(f"--document-tokens or --router-imbalance: {error}") from None


def parse(
    argv: Sequence[str],
    kind: type[C],
    prog: str = "",
    *,
    show_help: bool = True,
    leading_config: bool = False,
    without: Collection[str] = (),
    unset: Collection[str] = (),
) -> C:
    """Parse `argv`, and the file that its --config names, into a dataclass in which every field has a default. Raises
    ConfigurationError for a wrong flag or value, a file that cannot be read, and a wrong key in it.

    prog: program name in the usage message.
    show_help: whether --help prints; it raises SystemExit(0) either way.
    leading_config: accept the configuration file as a first argument without --config.
    without: inherited fields that are keys of the file, and no flags.
    unset: fields that are None where neither the command line nor the file gives them.
    """
    words = list(argv)
    if leading_config and words and not words[0].startswith("-"):
        words.insert(0, "--config")
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default="", nargs="?", const="")  # tyro refuses it without a path
    path = finder.parse_known_args(words)[0].config
    from_file, file = read_config(path, kind) if path else (kind(), frozenset[str]())
    hints = get_type_hints(kind, include_extras=True)
    hidden = [
        (each.name, Annotated[hints[each.name], Fixed, Suppress], each)
        for each in fields(kind)  # type: ignore[arg-type]
        if each.name in without and each.name not in vars(kind)["__annotations__"]
    ]
    names = {"__doc__": kind.__doc__}
    flags = make_dataclass(kind.__name__, hidden, bases=(ConfigFile, kind), namespace=names, frozen=True)
    mistakes = io.StringIO()
    try:
        with redirect_stderr(mistakes), nullcontext() if show_help else redirect_stdout(io.StringIO()):
            default = flags(**vars(from_file), config=path)
            config = as_kind(tyro.cli(flags, args=words, default=default, prog=prog), kind)
    except BrokenPipeError:  # the reader of the help, such as `head`, has gone
        leave()
    except SystemExit as stop:
        if stop.code:
            raise ConfigurationError(f"invalid command line\n{mistakes.getvalue().rstrip()}") from None
        raise
    line = {word.partition("=")[0][2:].replace("-", "_").removeprefix("no_") for word in words if word[:2] == "--"}
    config = _effective(config, line, file, path if show_help else "")
    return replace(config, **dict.fromkeys({*unset} - line - file))


def _effective(config: Any, line: Collection[str], file: Collection[str], path: str) -> Any:
    """Return `config` without the options of its file that have no effect, or that others of the command line replace.
    Raises ConfigurationError for given options that have none although they are equal to their defaults; others are
    among the violations of the configuration. line, file: fields that the command line and the file give. path: of the
    file, to warn of what is ignored; or empty."""
    kind = config.__class__
    program = next((each for each in kind.__mro__ if "without_effect" in vars(each)), object)
    declared = [vars(each).get("__annotations__", {}) for each in kind.__mro__ if not issubclass(program, each)]
    own, refused = set[str]().union(*declared), list[str]()  # own: flags of a command, with other meanings

    def is_default(name: str) -> bool:
        return getattr(config, name) == getattr(kind, name)

    def without(name: str, why: str) -> Any:
        if path and not is_default(name):
            warn(f"{path}: {why}; it is ignored")
        return replace(config, **{name: getattr(kind, name)})

    for pair in EITHER if issubclass(program, TrainConfig) else ():
        given = [name for name in pair if name in line]
        both = f"{as_given(config, pair[0])} and {as_given(config, pair[1])} both set the same"
        if own.intersection(pair) or not getattr(config, pair[1]):
            continue
        if len(given) == 1:
            config = without(next(name for name in pair if name not in line), both)
        elif is_default(pair[0]) and (given or (pair[0] == "steps" and {*pair} <= {*file})):
            refused.append(f"{both}: give one of them")
    if "steps" in line and is_default("steps") and bool(getattr(config, "curriculum", ())):
        refused.append(f"--steps = {config.steps} and --curriculum both set the length of the run: give one")
    found = config.without_effect() if program is not object else {}
    refused += [why for name, why in found.items() if name in line and name not in own and is_default(name)]
    while lost := [name for name in found if not (name in line or name in own or is_default(name))]:
        config = without(lost[0], found[lost[0]])
        found = config.without_effect()
    if refused:
        raise ConfigurationError(listed(refused))
    return config


def token_counts(flag: str, text: str) -> tuple[int, ...]:
    """Parse the value N,N,... of a flag; raise ConfigurationError for what are no numbers of tokens."""
    try:
        return tuple(token_count(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{flag} = {text}: {error}") from None


def as_kind(config: Any, kind: type[C]) -> C:
    """Return the fields of `config` that the dataclass `kind` has, as a `kind`."""
    return kind(**shared_values(config, kind))


def read_config(path: str, kind: type[C]) -> tuple[C, frozenset[str]]:
    """Read a .yaml, .yml or .toml file into a `kind`, and return the fields that it gives, too. Raises
    ConfigurationError if that fails."""
    try:
        mapping = without_removed(_read_mapping(Path(path).expanduser()))
        return config_from_mapping(mapping, kind), frozenset(str(key).replace("-", "_") for key in mapping)
    except FileNotFoundError as error:
        raise ConfigurationError(f"--config {path}: no such file") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {path}: {error}") from error


def check(*problems: str | None) -> None:
    """Raise ConfigurationError for all `problems` that are not None."""
    if found := [problem for problem in problems if problem]:
        raise ConfigurationError("\n".join(found))


def output_problem(flag: str, path: Path | None, *suffixes: str) -> str | None:
    """Return why `path` cannot be written: a wrong suffix, or no such directory; None if nothing is wrong."""
    if path is None:
        return None
    if suffixes and path.suffix not in suffixes:
        return f"{flag} {path} must end in {' or '.join(suffixes)}"
    return None if path.parent.is_dir() else f"{flag} {path}: {path.parent} is not a directory"


def check_world_size(value: int) -> None:
    """Raise ConfigurationError unless --world-size = `value` is given and positive."""
    if value < 1:
        raise ConfigurationError(f"--world-size = {value} must be at least 1: give --world-size, the number of ranks")


class UniqueKeysLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys."""

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
        raise ValueError(f"expected a .yaml, .yml or .toml file, got {file.suffix!r}")
    mapping = yaml.load(file.read_text(), UniqueKeysLoader)
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise ValueError(f"expected a mapping of keys to values, got a {type(mapping).__name__}")
    return mapping


@dataclass(frozen=True)
class Command:
    """A program that torchrun starts on every rank. `run` gets the configuration, the launch, the stop request, and
    torchrun's error file; it imports what takes seconds when it is called, because the flags are valid then."""

    prog: str  # program name in the usage message
    config: type  # dataclass of its flags
    run: Callable[[Any, Launch, StopRequest, str | None], None]
    unset: tuple[str, ...] = ()  # of `parse`

    def main(self, argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
        """Run the program on this rank of the launch that `environ` describes, and return the exit code."""
        launch = Launch.from_environment(environ)
        end_with_launcher(launch)
        hide_import_warnings()
        set_library_defaults(launch, environ)
        stop, error_file = StopRequest(), environ.get("TORCHELASTIC_ERROR_FILE")
        config: Any = self.config()
        mistake: ConfigurationError | None = None
        try:
            try:
                config = parse(argv, self.config, self.prog, show_help=launch.rank == 0, unset=self.unset)
            except ConfigurationError as error:
                mistake = error
            unmet, launch = launch, replace(launch, attempt=-1 - launch.attempt)  # for `end`, in no attempt's way
            launch = meet(unmet, getattr(config, "hang_timeout", TrainConfig.hang_timeout))
            if mistake is not None:
                raise mistake
            with stop.listening():
                self.run(config, launch, stop, error_file)
        except (Exception, KeyboardInterrupt) as error:
            try:
                return end(ending_of(error, launch.rank), launch, error_file, asked_to_stop=stop.signal_number > 0)
            except KeyboardInterrupt:  # while waiting for the launcher
                return INTERRUPTED
        return 0
