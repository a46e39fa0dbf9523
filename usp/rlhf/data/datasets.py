"""What a step of training begins with: prompts with answers, out of a file or made from source code.

    JSONL file     {"prompt": ..., "answer": ...}                    prompts; sft trains on the answers
                   {"prompt": ..., "chosen": ..., "rejected": ...}   reward_model, dpo
    stdlib         a mark hidden somewhere in the sources of Python's own library: which one is it?

The built-in examples have an answer that a function can verify, and a prompt that has to be read as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from usp.data.documents import STDLIB, Unit, open_source
from usp.data.tokenizer import Ids, Tokenizer
from usp.run.failures import nearest

MARKS = "①②③④⑤⑥⑦⑧"
QUESTION = "\n# mark: "
SHORTEST = 64  # tokens of a prompt
_LARGE = 2**24  # examples: no stream comes round


@dataclass(frozen=True, eq=False)
class Example:
    """One prompt.

    Attributes:
        prompt: its ids, without an end of sequence.
        answer: what a right response says.
        rejected: a worse response.
    """

    prompt: Ids
    answer: str
    rejected: str = ""


class Examples(Protocol):
    """Examples by number."""

    @property
    def size(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int) -> Example:
        """Example 0 to size - 1."""


@dataclass(frozen=True, eq=False)
class HiddenMark:
    """At most `prompt_tokens` of source code with one of `MARKS` at a random place, and the question which one.

    Lengths are spread evenly on a logarithmic scale, down to a sixteenth: a model finds out on short prompts what is
    asked, and answers long ones soon after. The number of an example and the seed fix it. `wrong_answers` is the part
    whose answer is wrong, as some of what people demonstrate is.
    """

    units: Sequence[Unit]
    tokenizer: Tokenizer
    prompt_tokens: int
    seed: int
    wrong_answers: float = 0.0
    size: int = 2**31

    def __getitem__(self, index: int) -> Example:
        draw = np.random.default_rng((self.seed, index))
        mark, other = draw.choice(len(MARKS), size=2, replace=False)
        hidden, question = self._ids(MARKS[mark]), self._ids(QUESTION)
        shortest = max(SHORTEST, self.prompt_tokens // 16)
        tokens = round(shortest * (self.prompt_tokens / shortest) ** draw.random())
        text = self._text(draw, tokens - len(hidden) - len(question))
        place = draw.integers(len(text) + 1)
        prompt = np.concatenate((text[:place], hidden, text[place:], question))
        # Some are wrong in form, for a reward model that a policy cannot please with what it has never seen.
        rejected = draw.choice([f"{other + 1}", f"{other + 1}", f"{mark + 1}{other + 1}", ""])
        answer = other if draw.random() < self.wrong_answers else mark
        return Example(prompt, str(answer + 1), str(rejected))

    def _text(self, draw: np.random.Generator, tokens: int) -> Ids:
        parts: list[Ids] = []
        while (missing := tokens - sum(map(len, parts))) > 0:
            ids = self._unit(int(draw.integers(len(self.units))))
            start = int(draw.integers(max(1, len(ids) - missing + 1)))
            parts.append(ids[start : start + missing])
        return np.concatenate(parts)

    def _ids(self, text: str) -> Ids:
        return without_end(self.tokenizer, self.tokenizer.encode(text.encode()))

    @cached_property
    def _unit(self):
        return lru_cache(maxsize=64)(self._read)

    def _read(self, number: int) -> Ids:
        return self._ids(b"\n".join(self.units[number].read()).decode("utf-8", "replace"))


@dataclass(frozen=True, eq=False)
class FileExamples:
    """The lines of a JSONL file."""

    examples: Sequence[Example]

    @property
    def size(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def open_examples(
    data: str,
    keys: Sequence[str],
    tokenizer: Tokenizer,
    *,
    prompt_tokens: int,
    longest: int,
    seed: int,
    wrong_answers: float = 0.0,
    whole: bool = False,
) -> Examples:
    """The examples of `--data`: stdlib, or a JSONL file whose lines have `keys`, all of them text.

    Args:
        prompt_tokens: of the longest built-in example.
        longest: tokens that a prompt may have, so that the response fits the model's context.
        wrong_answers: part of the built-in examples whose answer is wrong.
        whole: whether prompts are trained on with what answers them, which must fit the context together then.

    Raises:
        ValueError: naming every line that cannot be used, and prompts that are too long.
    """
    if data == STDLIB:
        if not SHORTEST <= prompt_tokens <= longest:
            raise ValueError(
                f"--prompt-tokens = {prompt_tokens} must be from {SHORTEST} to {longest}, what the model reads"
            )
        return HiddenMark(open_source(STDLIB, ""), tokenizer, prompt_tokens, seed, wrong_answers)
    file = Path(data).expanduser()
    if not file.is_file() or file.suffix != ".jsonl":
        raise ValueError(f"--data = {data} must be stdlib, or a .jsonl file of prompts with the keys {', '.join(keys)}")
    examples, problems = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                examples.append(_parsed(line, keys, tokenizer, longest, whole))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        more = f"; and {len(problems) - 5} more lines" if len(problems) > 5 else ""
        raise ValueError(f"--data = {data}: {'; '.join(problems[:5])}{more}")
    if not examples:
        raise ValueError(f"--data = {data} holds no line")
    return FileExamples(examples)


def _parsed(line: str, keys: Sequence[str], tokenizer: Tokenizer, longest: int, whole: bool) -> Example:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"it holds a {type(row).__name__}, and must hold the keys {', '.join(keys)}")
    for key in keys:
        if not isinstance(row.get(key), str):
            raise ValueError(f"no text under {key!r}{nearest(key, row)}")
    prompt = without_end(tokenizer, tokenizer.encode(row["prompt"].encode()))
    if not 1 <= len(prompt) <= longest:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens, and it must be 1 to {longest}, so that the response fits the model's "
            f"context: shorten it, lower --max-new-tokens, or use a model with a longer context"
        )
    for key in keys[1:] if whole else ():
        tokens = len(tokenizer.encode(row[key].encode()))
        if len(prompt) + tokens > longest:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {tokens} under {key!r}, and the model reads {longest}: shorten "
                f"them, or use a model with a longer context"
            )
    answer, rejected = ("chosen", "rejected") if "chosen" in keys else ("answer", "")
    return Example(prompt, row[answer] if answer in keys else "", row[rejected] if rejected in keys else "")


def without_end(tokenizer: Tokenizer, ids: Ids) -> Ids:
    """Ids of a text that goes on."""
    return ids[:-1] if tokenizer.eos is not None and len(ids) and ids[-1] == tokenizer.eos else ids


def chosen(begin: int, count: int, size: int, seed: int) -> list[int]:
    """Which examples come at places begin to begin + count - 1 of an endless stream: each epoch in another order.

    A function of the place alone, so a stream can go on anywhere, with another number of examples a step.
    """
    if size > _LARGE:
        return [place % size for place in range(begin, begin + count)]
    places = [divmod(place, size) for place in range(begin, begin + count)]
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(size) for epoch, _ in places}
    return [int(orders[epoch][place]) for epoch, place in places]
