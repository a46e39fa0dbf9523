"""Figures of a run against those that were expected before it, written as they come, so that a run can be resumed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

COLUMNS = ("section", "what", "value", "expected", "ratio", "verdict")


@dataclass(frozen=True)
class Check:
    """A figure. expected: nan where nothing is; between `least` and `most` times that it is right."""

    what: str
    value: float
    unit: str = ""
    expected: float = math.nan
    least: float = 0.0
    most: float = math.inf

    @property
    def ratio(self) -> float:
        return self.value / self.expected if self.expected else math.nan

    @property
    def right(self) -> bool:
        return not self.ratio < self.least and not self.ratio > self.most and not math.isinf(self.value)

    def cells(self) -> tuple[str, ...]:
        known = not math.isnan(self.ratio)
        shown = (f"{self.expected:.4g} {self.unit}", f"{self.ratio:.2f}") if known else ("", "")
        verdict = ("ok" if self.right else "OUT OF TOLERANCE") if known or not self.right else ""
        return (self.what, f"{self.value:.4g} {self.unit}".strip(), *shown, verdict)


Sections = dict[str, Callable[[], Iterable[Check]]]


class Log:
    """A file of checks by section, one JSON object a line; a section that has ended is not run again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        entries = [json.loads(line) for line in lines]
        self._ended = {entry["section"] for entry in entries if "seconds" in entry}
        self.checks = [
            (entry["section"], Check(**entry["check"]))
            for entry in entries
            if "check" in entry and entry["section"] in self._ended
        ]

    def run(self, sections: Sections) -> Iterator[tuple[str, Check]]:
        """Run what has not ended, and yield its checks. An error ends a section, and is a check that failed."""
        for section, checks in sections.items():
            if section in self._ended:
                continue
            begin = time.monotonic()
            for check in _or_error(checks):
                self.checks.append((section, check))
                self._write({"section": section, "check": asdict(check)})
                yield section, check
            self._write({"section": section, "seconds": round(time.monotonic() - begin, 1)})

    @property
    def right(self) -> bool:
        return all(check.right for _, check in self.checks)

    def _write(self, entry: dict[str, object]) -> None:
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def _or_error(checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    try:
        yield from checks()
    except Exception as error:  # the other sections shall run
        yield Check(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", math.inf)
