"""The flags of the needle probe, and its prompts: texts with a sentence hidden at a given depth.

    begin of a document, haystack up to the needle, needle, rest of the haystack, question | answer

A prompt has exactly as many tokens as asked for. The haystack is cut into sentences and lines, so that the needle
interrupts none; a prompt begins with any of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from tyro.conf import Positional, arg

from usp.config import ROPE_SCALINGS, ComputeFlags, SequenceFlags
from usp.data.sources import TEXT_FIELD
from usp.data.tokenizer import Ids, Tokenizer, as_document
from usp.fields import AtLeast1, one_of, token_count, value_violations

KEY = "{key}"
MAX_DIGITS = 18
_SENTENCE = re.compile(r".*?(?:[.!?][ \t]+|\n+|\Z)", re.DOTALL)


@dataclass(frozen=True)
class _Probe:
    model: Annotated[Positional[str], arg(metavar="MODEL")] = ""
    """Local transformers checkpoint directory, such as RUN/model."""
    lengths: Annotated[
        str, arg(metavar="N,N,...", help_behavior_hint="(default: 1/16, 1/8 .. of the model's limit)")
    ] = ""
    """Lengths in tokens, such as 1K,4K,16K: of haystack, needle, question and answer together."""
    depths: Annotated[str, arg(metavar="PERCENT,...")] = "0,25,50,75,100"
    """Where in the haystack the needle is, in percent: 0 at its beginning, 100 at its end."""
    samples: AtLeast1 = 5
    """Prompts of each length and depth; each has another haystack, and another key."""
    data: Annotated[str, arg(metavar="stdlib|PATH")] = "stdlib"
    """Text of the haystack, as --data of train.py; too little text is repeated. A prompt begins anywhere in it."""
    data_field: str = TEXT_FIELD
    """Key or column that holds the text; not used for text files."""
    needle: str = "The pass key is {key}. Remember it: {key} is the pass key."
    """What is hidden. {key} is a random number, another one in every prompt."""
    question: str = "What is the pass key? The pass key is"
    """What follows the haystack, for the model to continue."""
    answer: str = " {key}"
    """What continues the question. A response is right if it contains this as words; upper and lower case are equal."""
    key_digits: AtLeast1 = 5
    """Digits of {key}."""
    max_new_tokens: Annotated[int, arg(help_behavior_hint="(default: the answer's tokens and 16)")] = 0
    """Maximum tokens of a response."""
    logprobs: bool = True
    """Also compute the log-probability of the right answer, in a forward pass that takes as long as the prompt's."""
    tokenizer: Annotated[str, arg(metavar="auto|bytes|PATH")] = "auto"
    """Local transformers tokenizer directory. bytes: byte-level tokens. auto: the model directory's own."""
    rope_scaling: Annotated[str, one_of(ROPE_SCALINGS)] = "none"
    """Scaling of rotary positions for lengths beyond the model's limit, as in train.py, but without training."""
    beyond_limit: bool = False
    """Also take lengths beyond the model's limit with its rotary positions as they are, to see where it fails."""
    seed: int = 0
    """Seed of keys and haystacks."""
    tp: int = 1
    """Tensor-parallel degree. All ranks that the degrees leave over divide the prompts."""
    pp: int = 1
    """Pipeline-parallel degree."""
    mark: Annotated[str, arg(metavar="N", help_behavior_hint="(optional)")] = ""
    """Length in tokens behind which the heat map gets a line, such as that of training."""
    out: Annotated[str, arg(metavar="FILE.png")] = "needle.png"
    """Heat map to write, a file that ends in .png; the results are written next to it, as .json."""


@dataclass(frozen=True)
class NeedleConfig(ComputeFlags, SequenceFlags, _Probe):
    """Find out at which lengths and depths a model finds a sentence (the needle) in a long text (the haystack), and
    draw the heat map. Responses are generated greedily.

    For example, on 8 ranks:
    torchrun --nproc-per-node 8 -m examples.needle runs/last/model --lengths 16K,64K --sp-ulysses 8
    """

    @property
    def asked_depths(self) -> tuple[float, ...]:
        """The depths of --depths, ascending. Raises ValueError for a text that is not a number of percent."""
        depths = set()
        for text in self.depths.split(","):
            try:
                depths.add(float(text))
            except ValueError:
                raise ValueError(f"{text.strip()!r} must be a number of percent") from None
        return tuple(sorted(depths))


def needle_violations(config: NeedleConfig) -> Iterator[str]:
    """Yield one message per invalid value, by the flags."""
    if not config.model:
        yield "no MODEL is given: name the directory of a model, such as RUN/model"
    yield from value_violations(config).values()
    if config.key_digits > MAX_DIGITS:
        yield f"--key-digits = {config.key_digits} must be at most {MAX_DIGITS}"
    if config.max_new_tokens < 0:
        yield f"--max-new-tokens = {config.max_new_tokens} must be at least 1, or 0 for the answer's tokens and 16"
    for name in ("lengths", "mark"):
        try:
            lengths = [token_count(text) for text in getattr(config, name).split(",") if text]
        except ValueError as error:
            yield f"--{name} = {getattr(config, name)}: {error}"
        else:
            yield from (f"--{name} = {getattr(config, name)}: {n} must be at least 1" for n in lengths if n < 1)
    try:
        if wrong := [f"{depth:g}" for depth in config.asked_depths if not 0 <= depth <= 100]:
            yield f"--depths = {config.depths}: {', '.join(wrong)} must be from 0 to 100 percent"
    except ValueError as error:
        yield f"--depths = {config.depths}: {error}"
    if config.beyond_limit and config.rope_scaling != "none":
        yield f"--beyond-limit keeps positions as they are, --rope-scaling = {config.rope_scaling} does not: give one"
    for name in ("needle", "answer"):
        if not getattr(config, name).strip():
            yield f"--{name} must not be empty"
    if KEY in config.answer and KEY not in config.needle:
        yield f"--answer = {config.answer!r} has a {KEY} that --needle = {config.needle!r} does not tell"
    if config.answer.strip() and config.answer.strip().lower() in config.question.lower():
        yield f"--question = {config.question!r} already contains --answer = {config.answer!r}"


@dataclass(frozen=True)
class Cell:
    """A length in tokens, a depth in percent, and the number of a sample among those of both."""

    length: int
    depth: float
    sample: int


@dataclass(frozen=True, eq=False)
class Prompt:
    """Ids of a prompt, and of the answer that should follow; together as many as asked for. answer: as text, without
    spaces around it."""

    ids: Ids
    answer_ids: Ids
    answer: str


class Haystack:
    """Maker of the prompts of a probe from `texts`, repeated where they are too short; no more than twice as many
    tokens are read as the longest prompt has, `most`. Raises ValueError if `texts` hold nothing."""

    def __init__(self, config: NeedleConfig, tokenizer: Tokenizer, texts: Iterable[str], most: int) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._pieces: list[Ids] = []
        for text in texts:
            sentences = [sentence for sentence in _SENTENCE.findall(text) if sentence]
            self._pieces += [ids for ids in tokenizer.encode_all(sentences) if len(ids)]
            if sum(map(len, self._pieces)) >= 2 * most:
                break
        if not self._pieces:
            raise ValueError(f"--data = {config.data} holds no text for the haystack")

    def prompt(self, cell: Cell) -> Prompt:
        """Return the prompt of a cell, which depends on nothing else but the seed. Raises ValueError if the cell's
        length leaves no token for the haystack."""
        config, tokenizer = self._config, self._tokenizer
        random_ = random.Random(f"{config.seed}/{cell.length}/{cell.depth:g}/{cell.sample}")
        key = str(random_.randrange(10 ** (config.key_digits - 1), 10**config.key_digits))
        needle, question, answer = (text.replace(KEY, key) for text in (config.needle, config.question, config.answer))
        begin_ids = as_document(tokenizer, np.zeros(0, np.int64), end=False)
        needle_ids, question_ids, answer_ids = tokenizer.encode_all([f"\n{needle}\n", f"\n{question}", answer])
        room = cell.length - sum(map(len, (begin_ids, needle_ids, question_ids, answer_ids)))
        if room < 1:
            raise ValueError(
                f"a length of {cell.length} tokens is too short: needle, question and answer have "
                f"{cell.length - room}: use at least {cell.length - room + 1}, or shorter texts"
            )
        hay = list(self._hay(random_.randrange(len(self._pieces)), room))
        ends = np.cumsum([0, *map(len, hay)])
        place = int(np.abs(ends - room * cell.depth / 100).argmin())
        ids = np.concatenate((begin_ids, *hay[:place], needle_ids, *hay[place:], question_ids))
        return Prompt(ids, answer_ids, answer.strip())

    def _hay(self, first: int, room: int) -> Iterator[Ids]:
        while room:
            piece = self._pieces[first % len(self._pieces)][:room]
            yield piece
            first, room = first + 1, room - len(piece)


def is_right(response: str, answer: str) -> bool:
    """Return whether the answer is in the response, as whole words, in upper or lower case."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", response, re.IGNORECASE) is not None
