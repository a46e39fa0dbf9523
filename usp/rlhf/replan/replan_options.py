"""The options of --replan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from usp.rlhf.config import parse_options


@dataclass(frozen=True)
class ReplanOptions:
    """When to search for another plan, and which gain is worth a change.

    Attributes:
        every: steps between two searches.
        gain: the least part of a step's time that another plan must save.
        budget: seconds of a search, in which no rank trains.
    """

    every: int = 10
    gain: float = 0.05
    budget: float = 5.0

    @staticmethod
    def parse(text: str) -> ReplanOptions:
        """Parse every=N,gain=5%,budget=SECONDS; the gain may be a fraction, too.

        Raises:
            ValueError: naming every part that is wrong.
        """
        as_fraction = re.sub(r"([\d.]+)%", lambda match: repr(float(match[1]) / 100), text)
        options = ReplanOptions(**parse_options(as_fraction, ReplanOptions, "--replan"))
        if problems := list(options._violations()):
            raise ValueError(f"--replan = {text}: {'; '.join(problems)}")
        return options

    def _violations(self) -> Iterator[str]:
        if self.every < 1:
            yield f"every={self.every} must be at least 1"
        if not 0 <= self.gain < 1:
            yield f"gain={self.gain} must be from 0 to 100%"
        if not 0 < self.budget < math.inf:
            yield f"budget={self.budget} must be above 0"
