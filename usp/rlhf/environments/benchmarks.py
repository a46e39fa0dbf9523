"""Published benchmarks by name: how a row of their files becomes a prompt, and what scores a response to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from .ready_rewards import BENCHMARK, BLOCK, READY_REWARDS, from_spec, score


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of `BENCHMARKS`.

    Attributes:
        prompts, answers: texts with names of a row's keys in braces; the first whose keys a row has is filled in.
        reward: that scores a response. until: texts before which a response is cut.
        before: precedes the code of a response.
    """

    prompts: Sequence[str]
    answers: Sequence[str]
    reward: str
    until: Sequence[str] = ()
    before: str = ""

    def asked(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return the prompt and the answer of a row. Raises ValueError for a row that is none."""
        return filled(self.prompts, row), filled(self.answers, row)

    def score(self, sample: Mapping[str, Any], response: str) -> float:
        """Return the score of a response, 1 if it passes."""
        blocks = BLOCK.findall(response) if self.reward == "code" else []
        ends = [at for text in self.until if (at := response.find(text)) >= 0]
        text = f"\n{blocks[-1]}" if blocks else response[: min(ends, default=None)]
        return score(from_spec(self.reward, REWARDS), sample, filled([self.before], sample["row"]) + text)


def filled(templates: Sequence[str], row: Mapping[str, Any]) -> str:
    """Return the first template whose keys a row has, filled in; a list of texts as lines. Raises ValueError."""
    names = {key.lower(): key for key in row}
    wanted = [[key for _, key, _, _ in Formatter().parse(template) if key] for template in templates]
    for template, keys in zip(templates, wanted, strict=True):
        if names.keys() >= set(keys):
            values = [(key, row[names[key]]) for key in keys]
            lists = {key: value if isinstance(value, list) else [value] for key, value in values}
            if not all(isinstance(each, str | int | float) for value in lists.values() for each in value):
                raise ValueError(f"{', '.join(map(repr, keys))} must hold text, or lists of texts")
            return template.format(**{key: "\n".join(map(str, value)) for key, value in lists.items()})
    raise ValueError(f"no text under {next(key for key in wanted[0] if key not in names)!r}")


def number(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the last number in the response is the answer, of which what follows the last "#### " counts, else 0;
    without commas, dollar signs and a period at the end."""
    found = [*re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", response)[-1:], answer.rpartition("#### ")[2]]
    plain = [re.sub(r"\.$", "", re.sub("[,$]", "", each)).lower() for each in found]
    return float(len(plain) == 2 and plain[0] == plain[1])


def contains(prompt: str, response: str, answer: str) -> float:
    """Return the share of the answer's lines that the response contains, whatever the case of letters."""
    lines = answer.lower().splitlines()
    return sum(line in response.lower() for line in lines) / len(lines)


def by_row(prompt: str, response: str, answer: str, row: Mapping[str, Any]) -> float:
    """Return what the benchmark that a row names says of a response."""
    return BENCHMARKS[row[BENCHMARK]].score({"prompt": prompt, "answer": answer, "row": row}, response)


REWARDS: Mapping[str, Callable[..., Callable[..., float]]] = {
    **READY_REWARDS,
    "number": lambda: number,
    "contains": lambda: contains,
    BENCHMARK: lambda: by_row,
}
_DATA = json.loads(Path(__file__).with_name("benchmarks.json").read_text())
BENCHMARKS: Mapping[str, Benchmark] = {name: Benchmark(**values) for name, values in _DATA.items()}
