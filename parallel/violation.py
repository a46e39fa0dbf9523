"""What is wrong with arguments, as values: who shows one decides what its arguments are called.

A Python caller reads `tp=3 must divide ...: use tp=2`, a user of a program `--tp 3 must divide ...: use --tp 2`. Errors
have a violation as their argument: `raise ValueError(option("tp", tp) + " must divide ...: use " + option("tp", 2))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """A fact and a remedy: text, and between it arguments by (name, value). `str` has them as in a call in Python."""

    parts: tuple[str | tuple[str, Any], ...]

    def __add__(self, more: str | Violation) -> Violation:
        return Violation((*self.parts, *((more,) if isinstance(more, str) else more.parts)))

    def __radd__(self, text: str) -> Violation:
        return Violation((text, *self.parts))

    def __str__(self) -> str:
        return self.shown(lambda name, value: f"{name}={value}")

    def renamed(self, **names: str) -> Violation:
        """Return the same of arguments with other names."""
        return Violation(tuple(p if isinstance(p, str) else (names.get(p[0], p[0]), p[1]) for p in self.parts))

    def shown(self, named: Callable[[str, Any], str]) -> str:
        """Return the text. named: shows a name and its value."""
        return "".join(part if isinstance(part, str) else named(*part) for part in self.parts)


def option(name: str, value: Any) -> Violation:
    """Return an argument with a value, as a part of a violation."""
    return Violation(((name, value),))


def all_of(violations: Iterable[str | Violation], between: str = "; ") -> Violation:
    """Return several as one; an empty one for none."""
    parts = [part for each in violations for part in (between, *((each,) if isinstance(each, str) else each.parts))]
    return Violation(tuple(parts[1:]))


def violation_of(error: Exception) -> Violation:
    """Return what an error says."""
    said = error.args[0] if error.args else ""
    return said if isinstance(said, Violation) else Violation((str(error),))
