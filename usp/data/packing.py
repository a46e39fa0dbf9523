"""Documents to packed sequences, as iterators that can say where they are and begin there.

    units --shuffle--> documents --shuffle in a unit--> ids --concatenate--> sequences of seq_len --shuffle-->

A sequence is cut from the stream wherever it ends: a document that reaches over the cut goes on in the next
sequence as a document of its own, so no token is padding and none is lost. An epoch that runs out is followed by the
next, in another order; the seed fixes every order.
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

PackedSequence = tuple[Ids, list[int]]  # the ids, where the documents in them begin and where the last one ends


@dataclass(frozen=True)
class Position:
    """A place in the stream of ids.

    Args:
        epoch: from 0.
        unit: how many units of the epoch, in its order, come before.
        order: the state that numpy's generator was in before it drew the order of the unit's documents.
        document: how many documents of the unit, in its order, come before.
        offset: how many ids of the document come before.
    """

    epoch: int
    unit: int
    order: dict[str, Any]
    document: int
    offset: int


class TokenStream(Iterator[Ids]):
    """The ids of one document after another, for ever. `position` is where the one given last begins.

    With `start`, the first document is the one that `start` lies in, whole: to get there, its unit is read, and
    nothing else is read or tokenized. Raises ValueError when an epoch holds no token.
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
    """Cut a stream of documents every `seq_len` ids.

    `offset` is how many ids of the document read last are in the sequences given so far; the one to begin with is
    where the first document begins.
    """

    def __init__(self, documents: Iterator[Ids], seq_len: int, offset: int = 0) -> None:
        self.documents, self.seq_len, self.offset = documents, seq_len, offset
        self._document: Ids | None = None

    def __next__(self) -> PackedSequence:
        row = np.empty(self.seq_len, dtype=np.int64)
        borders = [0]
        while borders[-1] < self.seq_len:
            if self._document is None:
                self._document = next(self.documents)
            begin = borders[-1]
            part = self._document[self.offset : self.offset + self.seq_len - begin]
            if len(part):
                row[begin : begin + len(part)] = part
                borders.append(begin + len(part))
                self.offset += len(part)
            else:
                self._document, self.offset = None, 0
        return row, borders


class ShuffleWindow(Iterator[T], Generic[T]):
    """The endless `source` in another order: each is drawn from a window of `size` that moves over it.

    `window` and `draw` are its state: with both as they were, and `source` where it was, it goes on alike.
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
