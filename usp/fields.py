"""Fields of configuration dataclasses: the values that they may have, and their conversion from text and mappings.

A rule stands beside its field, as `steps: Annotated[int, at_least(1)] = 100`, and `value_violations` checks them all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from usp.run.failures import nearest

C = TypeVar("C")

TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_BOOLS = {"true": True, "false": False}
AUTO_RATE = -1.0  # of rates
UNITS = {"": 1, "K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class Rule:
    """The values that a field may have: as a predicate (False for nan), in words after "must be", and if few, all."""

    holds: Callable[[Any], bool]
    words: str
    choices: Sequence[Any] = ()


@dataclass(frozen=True)
class Shown(PrimitiveConstructorSpec[Any]):
    """How a flag is shown in the help and parsed.

    rule: of its values.
    read: converts the value of a key in a mapping; None: only values of the field's type are accepted.
    """

    rule: Rule | None = None
    read: Callable[[Any], Any] | None = None


def at_least(least: int, words: str = "") -> Rule:
    return Rule(lambda value: value >= least, words or f"at least {least}")


def among(choices: Sequence[Any]) -> Rule:
    return Rule(choices.__contains__, f"one of {', '.join(map(str, choices))}", choices)


def shown(
    metavar: str, kind: type, parse: Callable[[str], Any], text: Callable[[Any], str] = str, **more: Any
) -> Shown:
    """Show a flag of type `kind` as `metavar`, and parse it with `parse`. text: shows its default."""
    return Shown(
        1,
        metavar,
        lambda words: parse(words[0]),
        lambda value: isinstance(value, kind),
        lambda value: [text(value)],
        **more,
    )


def one_of(choices: Sequence[Any]) -> Shown:
    """Show `choices` in the help; other values are refused by `value_violations`, with all other violations."""
    kind = type(choices[0])
    return shown("{" + ",".join(map(str, choices)) + "}", kind, kind, rule=among(choices))


def token_count(text: str) -> int:
    """Parse a number of tokens, an integer followed by K, M or nothing: `128K` is 131072. Raises ValueError for any
    other text."""
    number = re.fullmatch(r"(-?\d+)([KM]?)", text.strip().upper())
    if number is None:
        raise ValueError(f"{text} must be a number of tokens such as 131072, 128K or 1M")
    return int(number[1]) * UNITS[number[2]]


DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def corpus_tokens(text: str) -> int:
    """Parse a number of tokens of a corpus, with decimal units: `1.5T`. Raises ValueError for any other text."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    if number is None:
        raise ValueError(f"{text} must be a number of tokens such as 300B or 15T")
    return round(float(number[1]) * DECIMAL[number[2]])


def _tokens(metavar: str, parse: Callable[[str], int]) -> Shown:
    return shown(
        metavar, int, parse, read=lambda value: parse(value) if isinstance(value, str) else _convert(value, int)
    )


def _rate(text: str) -> float:
    if text == "auto":
        return AUTO_RATE
    if (rate := float(text)) < 0:
        raise ValueError(f"{text} must be at least 0, or auto")
    return rate


RATE = shown(
    "auto|RATE",
    float,
    _rate,
    lambda value: "auto" if value == AUTO_RATE else str(value),
    rule=Rule(lambda value: value == AUTO_RATE or 0 <= value < math.inf, "at least 0 and finite, or auto"),
    read=lambda value: AUTO_RATE if value == "auto" else _convert(value, float),
)
TOKENS, CORPUS = _tokens("N|NK|NM", token_count), _tokens("N|NB|NT", corpus_tokens)

AtLeast0 = Annotated[int, at_least(0)]
AtLeast1 = Annotated[int, at_least(1)]
Fraction = Annotated[float, Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")]
NotNegative = Annotated[float, Rule(lambda value: 0 <= value < math.inf, "at least 0 and finite")]


@dataclass(frozen=True)
class OnlyWith:
    """Options that have an effect only in configurations of which `holds` is true. why: what to say of one elsewhere,
    after its flag and value."""

    options: tuple[str, ...]
    holds: Callable[[Any], Any]
    why: str


def without_effect(config: Any, rules: Iterable[OnlyWith]) -> dict[str, str]:
    """Return the options of a configuration that have no effect in it, whatever their values, with messages."""
    found = {name: rule.why for rule in rules if not rule.holds(config) for name in rule.options}
    return {name: f"{as_given(config, name)} {why}" for name, why in found.items() if hasattr(config, name)}


def changed_ones(config: Any, messages: Mapping[str, str]) -> Iterator[str]:
    """Yield the messages of the fields that differ from their defaults."""
    for name, message in messages.items():
        if getattr(config, name) != getattr(config.__class__, name):
            yield message


def flag(name: str) -> str:
    """Return the flag of a field: `sp_ring` is `--sp-ring`."""
    return "--" + name.replace("_", "-")


def as_given(config: Any, name: str) -> str:
    """Return a flag with its value, as a user gives it: `--tp = 2`, `--compile`."""
    value = getattr(config, name)
    return flag(name) if value is True else f"{flag(name)} = {value}"


def value_violations(config: Any, **rules: Rule) -> dict[str, str]:
    """Return what is wrong with single fields of a configuration, by field. rules: of fields that have none."""
    violations = {}
    for name, rule in {**_rules(config.__class__), **rules}.items():
        value = getattr(config, name)
        if not rule.holds(value):
            close = nearest(str(value), map(str, rule.choices))
            violations[name] = f"{flag(name)} = {value!r} must be {rule.words}{close}"
    return violations


def parameter_violations(values: Any) -> Iterator[str]:
    """Yield what is wrong with single fields of a dataclass, as `beta=0.0 must be above 0`. A number must be finite,
    unless the field has a rule that infinity satisfies."""
    rules = _rules(values.__class__)
    for name in names_of(values):
        value, rule = getattr(values, name), rules.get(name)
        holds = rule is None or rule.holds(value)
        if isinstance(value, float) and not math.isfinite(value) and not (rule and holds):
            yield f"{name}={value} must be finite"
        elif rule and not holds:
            yield f"{name}={value!r} must be {rule.words}"


@cache
def _rules(kind: type) -> dict[str, Rule]:
    """Return the rules of fields; one that a subclass only gives another default keeps its rule."""
    inherited = {k: v for base in reversed(kind.__bases__) if is_dataclass(base) for k, v in _rules(base).items()}
    hints = get_type_hints(kind, include_extras=True)
    marks = ((field.name, mark) for field in fields(kind) for mark in _marks(hints[field.name]))
    rules = ((name, mark.rule if isinstance(mark, Shown) else mark) for name, mark in marks)
    return inherited | {name: rule for name, rule in rules if isinstance(rule, Rule)}


def _marks(hint: Any) -> Sequence[Any]:
    return (among(get_args(hint)),) if get_origin(hint) is Literal else getattr(hint, "__metadata__", ())


def names_of(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass."""
    return tuple(field.name for field in fields(kind))


def shared_values(source: object, kind: Any) -> dict[str, Any]:
    """Return the values of `source` for the fields of the dataclass `kind` that it has, by name."""
    return {name: getattr(source, name) for name in names_of(kind) if hasattr(source, name)}


def config_from_mapping(mapping: Mapping[str, Any], kind: type[C]) -> C:
    """Build a `kind` from `mapping`, with defaults for missing keys; keys may have dashes for underscores. Raises
    ValueError, listing every unknown key with its nearest match, every duplicate, and every value of a wrong type."""
    kinds, hints = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in mapping.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            problems.append(f"unknown key {key!r}{nearest(name, hints)}")
            continue
        if name in values:
            problems.append(f"{key!r} is given twice (dashes and underscores are the same key): keep one")
            continue
        read = next((mark.read for mark in _marks(hints[name]) if isinstance(mark, Shown) and mark.read), None)
        try:
            values[name] = read(value) if read else _convert(value, kinds[name])
        except TypeError:
            problems.append(f"{key} = {value!r} must be {TYPE_NAMES[kinds[name]]}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    return kind(**values)


def _convert(value: Any, kind: type) -> Any:
    """Convert `value` to `kind` if that is lossless. YAML reads 3e-4 as a string, so a string may hold a float."""
    if kind is float and type(value) in (int, float, str):
        try:
            return float(value)
        except ValueError as error:
            raise TypeError from error
    if type(value) is not kind:
        raise TypeError
    return value


def parse_options(text: str, kind: type, source: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Parse NAME=VALUE,... into fields of the dataclass `kind`, converting each value to the type of its default.

    source: the flag that `text` comes from, for messages. without: fields that cannot be set.

    Raises ValueError, naming every entry that is wrong.
    """
    hints = get_type_hints(kind)
    known = {name: default for name, default in vars(kind()).items() if name not in without}
    values: dict[str, Any] = {}
    problems = []
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, _, value = (side.strip() for side in entry.partition("="))
        name = name.replace("-", "_")
        if name not in known:
            options = ", ".join(f"{option}={default}" for option, default in known.items())
            problems.append(f"unknown {name!r}{nearest(name, known)}, must be one of {options}")
            continue
        of_type = type(known[name])
        try:
            values[name] = _BOOLS[value.lower()] if of_type is bool else of_type(value)
        except (KeyError, ValueError):
            problems.append(f"{name} = {value!r} must be {getattr(hints[name], '__name__', hints[name])}")
    if problems:
        raise ValueError(f"{source} = {text}: {'; '.join(problems)}")
    return values
