"""Nested frozen dataclasses from the values of a JSON file, by their type hints.

The metadata of a field may state its `key` in the file, a `rule` for its value, and that it is `inline`: the keys of
that object may also stand in the enclosing one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import chain
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class ValueRule:
    """What a value must be, in words and as a check."""

    text: str
    holds: Callable[[Any], bool]


def from_json(hint: Any, value: Any, key: str, problems: list[str]) -> Any:
    """Return `value` as an object of type `hint`; append what is wrong with it to `problems`, by key."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # X | None
        return None if value is None else from_json(inner[0], value, key, problems)
    expected = "a list" if origin is tuple else _EXPECTED.get(hint, "an object")
    if is_dataclass(hint) and isinstance(value, Mapping):
        return _object(hint, value, key, problems)
    if origin is Mapping and isinstance(value, Mapping):
        return {str(name): from_json(inner[1], each, f"{key}.{name}", problems) for name, each in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        hints = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(hints) == len(value):
            pairs = enumerate(zip(hints, value, strict=True))
            return tuple(from_json(each, item, f"{key}[{at}]", problems) for at, (each, item) in pairs)
        expected = f"a list of {len(hints)} values"
    if hint in (int, float) and type(value) in (int, float):
        number = float(value) if abs(value) < 1e300 else float("inf")
        if hint is float or number.is_integer():
            return hint(number)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    problems.append(f"{key}={_shown(value)} must be {expected}")
    return None


_EXPECTED = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}


def _object(cls: Any, values: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    """Return an instance of a dataclass, or None with new `problems`."""
    before, prefix, hints = len(problems), f"{where}." if where else "", get_type_hints(cls)
    known = {field.metadata.get("key", field.name): field for field in fields(cls)}
    inline = {name: list(get_type_hints(hints[name])) for name, field in known.items() if "inline" in field.metadata}
    names = [*known, *dict.fromkeys(chain(*inline.values()))]
    for name in values:
        if name not in names:
            beside = [other for other in names if other.rpartition(".")[0] == name.rpartition(".")[0]]
            problems.append(f"{prefix}{name} is unknown, only {', '.join(beside)} are known")
    arguments = {}
    for name, field in known.items():
        value, key, count = values.get(name), f"{prefix}{name}", len(problems)
        if name not in values and name in inline:
            value, key = {part: values[part] for part in inline[name] if part in values}, where
        elif name not in values:
            if field.default is MISSING:
                problems.append(f"{key} is missing")
            continue
        arguments[field.name] = result = from_json(hints[field.name], value, key, problems)
        rule = field.metadata.get("rule")
        if rule is not None and len(problems) == count and not rule.holds(result):
            problems.append(f"{key}={_shown(value)} must be {rule.text}")
    return cls(**arguments) if len(problems) == before else None


def _shown(value: object) -> str:
    """Return a value as text of at most 60 characters."""
    text = f"{value:g}" if type(value) is float else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
