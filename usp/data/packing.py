"""Pack documents into sequences, with iterators that can be resumed at any position.

    units --shuffle--> documents --shuffle in a unit--> ids --concatenate--> sequences of seq_len --shuffle-->

The stream is cut every seq_len ids: a document that crosses a cut continues in the next sequence as a separate
document, so there is no padding and no token is lost. Each epoch has a different order, fixed by the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from .documents import Unit
from .tokenizer import Ids, Tokenizer

T = TypeVar("T")

PackedSequence = tuple[Ids, list[int]]  # ids, and the document boundaries in them, from 0 to seq_len


@dataclass(frozen=True)
class Position:
    """Position in the stream of ids.

    Attributes:
        epoch: from 0.
        unit: index of the unit in the epoch's order.
        order: state of numpy's generator before it drew the order of the unit's documents.
        document: index of the document in the unit's order.
        offset: index of the id in the document.
    """

    epoch: int
    unit: int
    order: dict[str, Any]
    document: int
    offset: int


class TokenStream(Iterator[Ids]):
    """Endless iterator over the ids of one document after another. `position`: beginning of the last document returned.

    With `start`, the first document is the whole document that contains `start`; only its unit is read, and nothing
    before it is tokenized. Raises ValueError if an epoch holds no token.
    """

    def __init__(self, units: Sequence[Unit], tokenizer: Tokenizer, seed: int, start: Position | None = None) -> None:
        self.units, self.tokenizer, self.seed = units, tokenizer, seed
        self.position = start
        self._documents = self._walk(start)

    def __next__(self) -> Ids:
        self.position, ids = next(self._documents)
        return ids

    def _walk(self, start: Position | None) -> Iterator[tuple[Position, Ids]]:
        for epoch in itertools.count(start.epoch if start else 0):
            order = np.random.default_rng((self.seed, epoch))
            found = start is not None
            units = order.permutation(len(self.units))
            for place in range(start.unit if start else 0, len(units)):
                if start:
                    order.bit_generator.state = start.order
                state = dict(order.bit_generator.state)
                documents = self.units[units[place]].read()
                indices = order.permutation(len(documents))
                for number in range(start.document if start else 0, len(indices)):
                    start = None
                    if document := documents[indices[number]]:
                        found = True
                        yield Position(epoch, place, state, number, 0), self.tokenizer.encode(document)
                start = None
            if not found:
                raise ValueError("the data holds no text: every document in it is empty")
            start = None


class PackedSequences(Iterator[PackedSequence]):
    """Iterator that cuts a stream of documents every `seq_len` ids.

    `offset`: number of ids of the last document read that have been returned, or to skip in the first document.
    """

    def __init__(self, documents: Iterator[Ids], seq_len: int, offset: int = 0) -> None:
        self.documents, self.seq_len, self.offset = documents, seq_len, offset
        self._document: Ids | None = None

    def __next__(self) -> PackedSequence:
        row = np.empty(self.seq_len, dtype=np.int64)
        boundaries = [0]
        while boundaries[-1] < self.seq_len:
            if self._document is None:
                self._document = next(self.documents)
            begin = boundaries[-1]
            part = self._document[self.offset : self.offset + self.seq_len - begin]
            if len(part):
                row[begin : begin + len(part)] = part
                boundaries.append(begin + len(part))
                self.offset += len(part)
            else:
                self._document, self.offset = None, 0
        return row, boundaries


class ShuffleWindow(Iterator[T], Generic[T]):
    """Shuffle of an endless `source`: each item is drawn from a sliding window of `size`.

    `window` and `draw` are its state: restoring both, and the position of `source`, resumes it exactly.
    """

    def __init__(self, source: Iterator[T], size: int, seed: int) -> None:
        self.source, self.size = source, size
        self.window: list[T] = []
        self.draw = np.random.default_rng(seed)

    def __next__(self) -> T:
        while len(self.window) < self.size:
            self.window.append(next(self.source))
        following = next(self.source)
        place = self.draw.integers(len(self.window))
        drawn, self.window[place] = self.window[place], following
        return drawn
