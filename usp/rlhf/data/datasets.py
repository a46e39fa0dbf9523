"""Prompts with answers, read from a file or built from source code.

    JSONL file     {"prompt": ..., "answer": ...}                    prompts; sft trains on the answers
                   {"prompt": ..., "chosen": ..., "rejected": ...}   reward_model, dpo
    stdlib         find the mark hidden in a piece of the Python standard library's source code

The built-in task has a verifiable answer and needs the whole prompt to be read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from usp.data.files import STDLIB, DataFile, find_files
from usp.data.tokenizer import Ids, Tokenizer, as_document
from usp.run.failures import nearest

MARKS = "①②③④⑤⑥⑦⑧"
QUESTION = "\n# mark: "
SHORTEST = 64  # tokens in a built-in prompt
_LARGE = 2**24  # data sets with more examples are not shuffled: no run reaches a second epoch


@dataclass(frozen=True, eq=False)
class Example:
    """One prompt.

    Attributes:
        prompt: token ids, without an end of sequence.
        answer: the correct response.
        rejected: a worse response, for preference pairs.
    """

    prompt: Ids
    answer: str
    rejected: str = ""


class Examples(Protocol):
    """A collection of examples with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True, eq=False)
class HiddenMark:
    """Synthetic task: up to `prompt_tokens` of source code with one of `MARKS` at a random place; name the mark.

    Prompt lengths are log-uniform down to a sixteenth of `prompt_tokens`: a model learns the task on short prompts
    first. An example depends only on its index and the seed. A fraction `wrong_answers` of the examples has a wrong
    answer, like noisy demonstrations.
    """

    files: Sequence[DataFile]
    tokenizer: Tokenizer
    prompt_tokens: int
    seed: int
    wrong_answers: float = 0.0

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, index: int) -> Example:
        draw = np.random.default_rng((self.seed, index))
        mark, other = draw.choice(len(MARKS), size=2, replace=False)
        hidden, question = self.tokenizer.encode(MARKS[mark]), self.tokenizer.encode(QUESTION)
        shortest = max(SHORTEST, self.prompt_tokens // 16)
        tokens = round(shortest * (self.prompt_tokens / shortest) ** draw.random())
        text = self._text(draw, tokens - len(hidden) - len(question) - (self.tokenizer.bos is not None))
        place = draw.integers(len(text) + 1)
        ids = np.concatenate((text[:place], hidden, text[place:], question))
        prompt = as_document(self.tokenizer, ids, end=False)
        # Some are malformed, so that a policy cannot exploit the reward model with formats it has never seen.
        rejected = draw.choice([f"{other + 1}", f"{other + 1}", f"{mark + 1}{other + 1}", ""])
        answer = other if draw.random() < self.wrong_answers else mark
        return Example(prompt, str(answer + 1), str(rejected))

    def _text(self, draw: np.random.Generator, tokens: int) -> Ids:
        parts: list[Ids] = []
        while (missing := tokens - sum(map(len, parts))) > 0:
            ids = self._file(int(draw.integers(len(self.files))))
            start = int(draw.integers(max(1, len(ids) - missing + 1)))
            parts.append(ids[start : start + missing])
        return np.concatenate(parts)

    @cached_property
    def _file(self):
        return lru_cache(maxsize=64)(self._read)

    def _read(self, number: int) -> Ids:
        return self.tokenizer.encode(self.files[number].path.read_text("utf-8", "replace"))


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
    """Open `data`: stdlib, or a JSONL file whose lines have text under each of `keys`.

    Args:
        prompt_tokens: length of the longest built-in prompt.
        longest: maximum tokens in a prompt, so that the response fits the model's context.
        wrong_answers: fraction of built-in examples with a wrong answer.
        whole: prompt and answer are trained on together, so together they must fit in `longest`.

    Raises:
        ValueError: naming every invalid line, and prompts that are too long.
    """
    if data == STDLIB:
        if not SHORTEST <= prompt_tokens <= longest:
            raise ValueError(
                f"--prompt-tokens = {prompt_tokens} must be from {SHORTEST} to {longest} to fit the model's context"
            )
        return HiddenMark(find_files(STDLIB, "").files, tokenizer, prompt_tokens, seed, wrong_answers)
    file = Path(data).expanduser()
    if not file.is_file() or file.suffix != ".jsonl":
        raise ValueError(f"--data = {data} must be stdlib, or a .jsonl file of prompts with the keys {', '.join(keys)}")
    examples, problems = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                examples.append(_parse(line, keys, tokenizer, longest, whole))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        more = f"; and {len(problems) - 5} more lines" if len(problems) > 5 else ""
        raise ValueError(f"--data = {data}: {'; '.join(problems[:5])}{more}")
    if not examples:
        raise ValueError(f"--data = {data} holds no lines")
    return examples


def _parse(line: str, keys: Sequence[str], tokenizer: Tokenizer, longest: int, whole: bool) -> Example:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with the keys {', '.join(keys)}, got {type(row).__name__}")
    for key in keys:
        if not isinstance(row.get(key), str):
            raise ValueError(f"no text under {key!r}{nearest(key, row)}")
    prompt = as_document(tokenizer, tokenizer.encode(row["prompt"]), end=False)
    if not 1 <= len(prompt) <= longest:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens, expected 1 to {longest} so that the response fits the model's context: "
            f"shorten it, lower --max-new-tokens, or use a model with a longer context"
        )
    for key in keys[1:] if whole else ():
        tokens = len(as_document(tokenizer, tokenizer.encode(row[key]), begin=False))
        if len(prompt) + tokens > longest:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {tokens} under {key!r} exceed the model's context of {longest}: "
                f"shorten them, or use a model with a longer context"
            )
    answer, rejected = ("chosen", "rejected") if "chosen" in keys else ("answer", "")
    return Example(prompt, row[answer] if answer in keys else "", row[rejected] if rejected in keys else "")


def example_indices(begin: int, count: int, size: int, seed: int) -> list[int]:
    """Return the examples at positions begin to begin + count - 1 of an endless stream, reshuffled every epoch.

    Depends only on the position, so a run can resume anywhere and with another number of examples per step.
    """
    if size > _LARGE:
        return [position % size for position in range(begin, begin + count)]
    positions = [divmod(position, size) for position in range(begin, begin + count)]
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(size) for epoch, _ in positions}
    return [int(orders[epoch][offset]) for epoch, offset in positions]
