"""Figures of a run against those that were expected before it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A figure. It is right if it is finite and between `least` and `most` times what is expected.

    expected: nan where nothing is; 0 allows nothing else.
    """

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
        if math.isnan(self.expected) or not math.isfinite(self.value):
            return math.isfinite(self.value)
        return self.least <= self.ratio <= self.most if self.expected else self.value == 0

    def cells(self) -> tuple[str, ...]:
        known = not math.isnan(self.expected)
        ratio = f"{self.ratio:.2f}" if known and self.expected else ""
        expected = f"{self.expected:.4g} {self.unit}".strip() if known else ""
        verdict = ("ok" if known else "") if self.right else "OUT OF TOLERANCE"
        return (self.what, f"{self.value:.4g} {self.unit}".strip(), expected, ratio, verdict)
