"""Hash configurations, to compare them across ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any


def fingerprint(value: object) -> str:
    """Hash dataclasses, collections and plain values; functions by their names, other objects by their plain fields."""
    return hashlib.blake2b(repr(_plain(value)).encode(), digest_size=16).hexdigest()


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return sorted((repr(_plain(key)), _plain(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(repr(_plain(item)) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, {field.name: _plain(getattr(value, field.name)) for field in fields(value)}]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    plain_fields = {k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, bool | int | float | str)}
    return [type(value).__qualname__, plain_fields]
