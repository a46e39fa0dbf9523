"""Prompts with a needle: a text of exactly as many tokens as asked for, with a sentence hidden at a given depth.

    begin of a document, haystack up to the needle, needle, rest of the haystack, question | answer

The haystack is cut into sentences and lines, so that the needle interrupts none; a prompt begins with any of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from usp.data.documents import read_pieces
from usp.data.files import DataFiles
from usp.data.tokenizer import Ids, Tokenizer

from .needle_flags import KEY, NeedleConfig

_SENTENCE = re.compile(r".*?(?:[.!?][ \t]+|\n+|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Cell:
    """A length in tokens, a depth in percent, and the number of a sample among those of both."""

    length: int
    depth: float
    sample: int


@dataclass(frozen=True, eq=False)
class Prompt:
    """Ids of a prompt, and of the answer that should follow; together as many as asked for.

    answer: as text, without spaces around it.
    """

    ids: Ids
    answer_ids: Ids
    answer: str


class Haystack:
    """Makes the prompts of a probe.

    Args:
        texts: of the haystack, repeated where they are too short.
        most: tokens of the longest prompt; no more than twice as many tokens of `texts` are read.

    Raises:
        ValueError: if `texts` hold nothing.
    """

    def __init__(self, config: NeedleConfig, tokenizer: Tokenizer, texts: Iterable[str], most: int) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._pieces: list[Ids] = []
        tokens = 0
        for text in texts:
            sentences = [found for found in _SENTENCE.findall(text) if found]
            self._pieces += [ids for ids in tokenizer.encode_all(sentences) if len(ids)]
            tokens = sum(map(len, self._pieces))
            if tokens >= 2 * most:
                break
        if not tokens:
            raise ValueError(f"--data = {config.data} holds no text for the haystack")

    def needed(self) -> int:
        """Return the tokens of a prompt besides the haystack, with the answer; of some key."""
        return sum(map(len, self._parts(random.Random(0))[:-1]))

    def prompt(self, cell: Cell) -> Prompt:
        """Return the prompt of a cell, which depends on nothing else but the seed.

        Raises:
            ValueError: if the cell's length leaves no token for the haystack.
        """
        random_ = random.Random(f"{self._config.seed}/{cell.length}/{cell.depth:g}/{cell.sample}")
        begin, needle, question, answer, text = self._parts(random_)
        room = cell.length - sum(map(len, (begin, needle, question, answer)))
        if room < 1:
            raise ValueError(
                f"a length of {cell.length} tokens is too short: needle, question and answer have "
                f"{cell.length - room}: use at least {cell.length - room + 1}, or shorter texts"
            )
        hay = list(self._hay(random_.randrange(len(self._pieces)), room))
        ends = np.cumsum([0, *map(len, hay)])
        place = int(np.abs(ends - room * cell.depth / 100).argmin())
        ids = np.concatenate((begin, *hay[:place], needle, *hay[place:], question))
        return Prompt(ids, answer, text)

    def _parts(self, random_: random.Random) -> tuple[Ids, Ids, Ids, Ids, str]:
        """Return what begins a prompt, needle, question and answer, and the answer as text, with a new key."""
        digits = self._config.key_digits
        key = str(random_.randrange(10 ** (digits - 1), 10**digits))
        config, encode = self._config, self._tokenizer.encode
        begin = [] if self._tokenizer.bos is None else [self._tokenizer.bos]
        needle, question, answer = (text.replace(KEY, key) for text in (config.needle, config.question, config.answer))
        parts = encode(f"\n{needle}\n"), encode(f"\n{question}"), encode(answer)
        return np.asarray(begin, np.int64), *parts, answer.strip()

    def _hay(self, first: int, room: int) -> Iterator[Ids]:
        """Yield sentences of `room` tokens in all; the last is cut."""
        while room:
            piece = self._pieces[first % len(self._pieces)][:room]
            yield piece
            first, room = first + 1, room - len(piece)


def texts_of(files: DataFiles, field: str) -> Iterator[str]:
    """Yield the text of documents, in the order of the files; chats and completions are left out."""
    for file in files.files:
        yield from (text for text, _ in read_pieces(file, field) if isinstance(text, str))


def is_right(response: str, answer: str) -> bool:
    """Return whether the answer is in the response, as whole words, in upper or lower case."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", response, re.IGNORECASE) is not None


def cells_of(lengths: Sequence[int], depths: Sequence[float], samples: int) -> list[Cell]:
    """Return the cells of a probe, in the order of lengths, depths and samples."""
    return [Cell(length, depth, sample) for length in lengths for depth in depths for sample in range(samples)]
