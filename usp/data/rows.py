"""Rows of a token store: which tokens are in row 0, 1, 2, ... of an endless sequence of rows.

Text is cut (`PackedRows`, `StageRows`):

    documents --permute--> one stream of tokens --cut every seq_len--> rows --permute-->

Each epoch has its own two permutations, fixed by the seed, or none without a seed. So a row depends only on its number:
any row can be read without those before it. A document that crosses a cut continues in another row as a separate
document. The last row of an epoch is filled up with the beginning of the stream, so there is no padding and no token is
left out.

For fine-tuning, documents stay whole, with padding at the ends of rows (`WholeRows`):

    documents --permute--> windows of WINDOW documents --best fit--> rows --permute windows, then rows of a window-->

In a window, the longest document comes first, and each goes where the least room is left, or begins a row (best-fit
decreasing). A document that is longer than a row is cut every seq_len tokens, and only its last part is packed. Of a
store with a mask only the first seq_len tokens of a document are used, because targets without what is before them
teach something else, and a document without a target there, or with an image that would be cut, is left out. Windows
are the same in every epoch, so that all epochs have as many rows; their order, and that of their rows, differs.

To find a place in an epoch's stream, its documents are divided into at most BLOCKS blocks, whose lengths are added up
once per epoch, in the order of the store. Of windows, only the number of rows of each is held.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .chats import StoredImage
from .store import Numbers, TokenStore

BLOCKS = 2**20
BLOCK = 64  # documents, or more where BLOCKS such blocks are too few
WINDOW = 4096

ROUNDS = 4
LEAST_BITS = 6  # with fewer, the rounds reach some orders more often than others
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class Permutation:
    """An order of the numbers 0, ..., count - 1: a random one fixed by `key`, or ascending for None.

    Numbers are computed one by one, in both directions, without memory. A Feistel network permutes the numbers of n
    bits: each round adds to one half of the bits (exclusive or) a random function of the other half (Luby and Rackoff,
    SIAM Journal on Computing 17, 1988). Numbers that leave the range are permuted again until they are back in it
    (cycle walking: Black and Rogaway, CT-RSA 2002), on average less than twice. The random functions are the finalizer
    of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), each with a key of its own.

    key: nonnegative integers.
    """

    def __init__(self, count: int, key: Sequence[int] | None) -> None:
        self.count = count
        bits = max(LEAST_BITS, (count - 1).bit_length())
        low = bits // 2
        self._low = np.uint64(low)
        self._low_mask, self._high_mask = np.uint64((1 << low) - 1), np.uint64((1 << bits - low) - 1)
        ascending = key is None or count == 1
        self._keys: tuple[np.uint64, ...] = (
            () if ascending else tuple(np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64))
        )

    def at(self, places: Numbers) -> Numbers:
        """Return the numbers at `places`, int64 of their shape."""
        return self._walk(places, list(enumerate(self._keys)))

    def place_of(self, numbers: Numbers) -> Numbers:
        """Return the places at which `numbers` are, int64 of their shape."""
        return self._walk(numbers, list(enumerate(self._keys))[::-1])

    def _walk(self, numbers: Numbers, rounds: list[tuple[int, np.uint64]]) -> Numbers:
        if not rounds:
            return numbers.astype(np.int64)
        permuted = self._permute(numbers.astype(np.uint64), rounds)
        outside = np.flatnonzero(permuted >= self.count)
        while len(outside):
            permuted[outside] = self._permute(permuted[outside], rounds)
            outside = outside[permuted[outside] >= self.count]
        return permuted.astype(np.int64)

    def _permute(self, numbers: npt.NDArray[np.uint64], rounds: list[tuple[int, np.uint64]]) -> npt.NDArray[np.uint64]:
        high, low = numbers >> self._low, numbers & self._low_mask
        for number, key in rounds:
            if number % 2:
                low ^= _scrambled(high, key) & self._low_mask
            else:
                high ^= _scrambled(low, key) & self._high_mask
        return (high << self._low) | low


def _scrambled(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = numbers + key  # arrays of unsigned integers wrap around
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS[:2], strict=True):
        mixed ^= mixed >> shift
        mixed *= multiplier
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


@dataclass(frozen=True)
class Row:
    """The tokens of `store` that a row consists of.

    begins: int64 (documents,), where in the store each document of the row begins. boundaries: int64 (documents + 1,),
    where in the row, from 0 to seq_len, or less if the rest of the row is padding.
    """

    store: TokenStore
    begins: Numbers
    boundaries: Numbers

    @staticmethod
    def of(store: TokenStore, begins: Numbers, lengths: Numbers) -> Row:
        return Row(store, begins, np.cumsum(np.concatenate(([0], lengths))))

    @property
    def images(self) -> list[StoredImage]:
        """The images of the row, in order."""
        return [image for span in self._spans() for _, image in self.store.images(*span)]

    @property
    def has_images(self) -> bool:
        """Whether the row has images, which are not read."""
        return any(self.store.image_numbers(*span) for span in self._spans())

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield where in the store each document of the row begins and ends."""
        ends = self.begins + np.diff(self.boundaries)
        return zip(self.begins.tolist(), ends.tolist(), strict=True)

    def pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return where in the store the tokens at places begin to end - 1 of the row are, as half-open intervals."""
        first = int(np.searchsorted(self.boundaries, begin, side="right")) - 1
        last = int(np.searchsorted(self.boundaries, end, side="left"))
        at = self.begins[first:last].copy()
        lengths = np.diff(self.boundaries[first : last + 1])
        ends = at + lengths
        at[0] += begin - self.boundaries[first]
        ends[-1] -= self.boundaries[last] - end
        breaks = np.flatnonzero(at[1:] != ends[:-1])  # documents that follow each other in the store are one piece
        starts = np.concatenate(([0], breaks + 1))
        stops = np.concatenate((breaks, [len(at) - 1]))
        return list(zip(at[starts].tolist(), ends[stops].tolist(), strict=True))


class PackedRows:
    """The rows of `seq_len` tokens of a store, in the order of `seed`, or for None in the order of the store.

    first_epoch: the epoch that row 0 begins.
    per_epoch: number of rows in which every token of the store occurs. places: of these rows, one after another, before
    what fills up the last row. sources, weights: the rows of each store that these are rows of, and the share that
    comes from it.
    """

    weights: tuple[float, ...] = (1.0,)

    def __init__(self, store: TokenStore, seq_len: int, seed: int | None, first_epoch: int = 0) -> None:
        self.store, self.seq_len, self.seed, self.first_epoch = store, seq_len, seed, first_epoch
        self.places = store.manifest.tokens
        self.per_epoch = -(-self.places // seq_len)
        self._stream = lru_cache(maxsize=2)(lambda epoch: _Stream(store, self._key(epoch, 0)))  # a row may be in two

    @property
    def sources(self) -> tuple[PackedRows, ...]:
        return (self,)

    def epochs(self, rows: int) -> list[float]:
        """Return how often each of `sources` has been read after so many rows, with the epochs before them."""
        return [self.first_epoch + rows / self.per_epoch]

    @property
    def identity(self) -> str:
        """A text that is the same for all rows of the same data, whatever their seq_len and seed."""
        manifest = self.store.manifest
        return f"{manifest.documents} documents, {manifest.tokens} tokens, digest {manifest.digest}"

    def row(self, number: int) -> Row:
        """Return what row `number` consists of; its tokens are not read."""
        epoch, place = self._place_of(number)
        order = Permutation(self.per_epoch, self._key(epoch, 1))
        return self._cut(int(order.at(np.array([place]))[0]) * self.seq_len, lambda _: self._stream(epoch))

    def _place_of(self, number: int) -> tuple[int, int]:
        """Return the epoch of a row, and its place there."""
        epochs, place = divmod(number, self.per_epoch)
        return self.first_epoch + epochs, place

    def _cut(self, at: int, stream_of: Callable[[int], _Stream]) -> Row:
        """Return the row that begins at place `at` of the streams of all epochs one after another."""
        tokens = self.store.manifest.tokens
        end, parts = at + self.seq_len, list[tuple[Numbers, Numbers]]()
        while at < end:
            epoch, within = divmod(at, tokens)
            upto = min(within + end - at, tokens)
            parts += stream_of(epoch).parts(within, upto)
            at += upto - within
        return Row.of(self.store, *(np.concatenate(values) for values in zip(*parts, strict=True)))

    def _key(self, *numbers: int) -> tuple[int, ...] | None:
        """Return the key of one of the permutations; None without a seed."""
        return None if self.seed is None else (self.seed, *numbers)


class StageRows(PackedRows):
    """The rows of a stage of a curriculum, which continue where the stage before stopped reading the store.

    All stages cut the same endless stream, the documents of one epoch after those of another, so that no token is in
    two stages of one epoch, however long their rows are. Rows are permuted among those of the stage that begin in the
    same epoch.

    begin: tokens of the endless stream before this stage. count: rows of the stage; later rows follow in order.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int, begin: int, count: int) -> None:
        super().__init__(store, seq_len, seed)
        self.begin, self.count = begin, count

    @property
    def identity(self) -> str:
        return f"tokens {self.begin} to {self.begin + self.count * self.seq_len} of {super().identity}"

    def epochs(self, rows: int) -> list[float]:
        return [(self.begin + rows * self.seq_len) / self.store.manifest.tokens]

    def row(self, number: int) -> Row:
        return self._cut(self.begin + self._place(number) * self.seq_len, self._stream)

    def _place(self, number: int) -> int:
        """Return which row of the stage, as they follow each other in the stream, has this number."""
        if number >= self.count:
            return number
        epoch = (self.begin + number * self.seq_len) // self.store.manifest.tokens
        first, last = self._first_of(epoch), min(self._first_of(epoch + 1), self.count)
        order = Permutation(last - first, self._key(epoch, 1, self.begin))
        return first + int(order.at(np.array([number - first]))[0])

    def _first_of(self, epoch: int) -> int:
        return max(0, -(-(epoch * self.store.manifest.tokens - self.begin) // self.seq_len))


class _Stream:
    """The documents of a store one after another, in the order of `key`."""

    def __init__(self, store: TokenStore, key: tuple[int, ...] | None) -> None:
        self._store, self._order = store, Permutation(store.manifest.documents, key)
        self._block = max(BLOCK, -(-store.manifest.documents // BLOCKS))
        sizes = np.zeros(-(-store.manifest.documents // self._block), np.int64)
        for documents, lengths in store.lengths():
            np.add.at(sizes, self._order.place_of(documents) // self._block, lengths)
        self._begins = np.cumsum(sizes) - sizes
        self._documents = lru_cache(maxsize=1)(self._documents_of)

    def parts(self, begin: int, end: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield where in the store the documents between two places of the stream begin, and their lengths. The first
        and the last are cut to these places; empty documents are left out."""
        for block in range(int(np.searchsorted(self._begins, begin, side="right")) - 1, len(self._begins)):
            if self._begins[block] >= end:
                return
            in_store, begins, ends = self._documents(block)
            cut = np.maximum(begins, begin)
            lengths = np.minimum(ends, end) - cut
            some = lengths > 0
            yield (in_store + cut - begins)[some], lengths[some]

    def _documents_of(self, block: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return where the documents of a block begin in the store, and where in the stream they begin and end."""
        last = min((block + 1) * self._block, self._store.manifest.documents)
        in_store, ends = self._store.bounds(self._order.at(np.arange(block * self._block, last)))
        in_stream = self._begins[block] + np.cumsum(ends - in_store)
        return in_store, in_stream - (ends - in_store), in_stream


@dataclass(frozen=True)
class _Window:
    """Documents that are packed together. begins, lengths: of their parts in the store. rows: the parts of each row.
    counts: of rows, tokens, documents longer than a row, and those among them without a part."""

    begins: Numbers
    lengths: Numbers
    rows: list[list[int]]
    counts: tuple[int, int, int, int]


class WholeRows(PackedRows):
    """Rows of at most `seq_len` tokens of whole documents of a store, in the order of `seed`, or for None in that of
    the windows.

    tokens: in the rows of an epoch. long: number of documents of more than `seq_len` tokens. left_out: those among them
    without a target in their first `seq_len` tokens, or with an image that is not whole in these.

    Raises ValueError if all documents are left out.
    """

    def __init__(self, store: TokenStore, seq_len: int, seed: int | None, first_epoch: int = 0) -> None:
        super().__init__(store, seq_len, seed, first_epoch)
        self._documents = Permutation(store.manifest.documents, self._key(0, 2))
        self._window = lru_cache(maxsize=1)(self._packed)
        windows = -(-store.manifest.documents // WINDOW)
        counts = np.array([self._window(number).counts for number in range(windows)])
        self._rows_of_windows = counts[:, 0]
        self.per_epoch, self.tokens, self.long, self.left_out = counts.sum(axis=0).tolist()
        self.places = self.per_epoch * seq_len
        if not self.per_epoch:
            raise ValueError(f"no document of {store.folder} has a target in its first seq_len={seq_len} tokens")

    @property
    def identity(self) -> str:
        return f"whole documents of {super().identity}"

    def row(self, number: int) -> Row:
        epoch, place = self._place_of(number)
        windows = len(self._rows_of_windows)
        order = Permutation(windows, self._key(epoch, 3)).at(np.arange(windows))
        ends = np.cumsum(self._rows_of_windows[order])
        at = int(np.searchsorted(ends, place, side="right"))
        number = int(order[at])
        window = self._window(number)
        within = np.array([place - int(ends[at]) + len(window.rows)])
        parts = window.rows[int(Permutation(len(window.rows), self._key(epoch, 4, number)).at(within)[0])]
        return Row.of(self.store, window.begins[parts], window.lengths[parts])

    def _packed(self, number: int) -> _Window:
        last = min((number + 1) * WINDOW, self.store.manifest.documents)
        begins, ends = self.store.bounds(self._documents.at(np.arange(number * WINDOW, last)))
        long = np.flatnonzero(ends - begins > self.seq_len)
        parts = -(-(ends - begins) // self.seq_len)  # none of an empty document
        if self.store.manifest.masked:
            parts[long] = [self._has_target(at, at + self.seq_len) for at in begins[long].tolist()]
        part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # its number in its document
        begins = np.repeat(begins, parts) + part * self.seq_len
        lengths = np.minimum(np.repeat(ends, parts) - begins, self.seq_len)
        rows = best_fit(lengths.tolist(), self.seq_len)
        counts = len(rows), int(lengths.sum()), len(long), int((parts[long] == 0).sum())
        return _Window(begins, lengths, rows, counts)

    def _has_target(self, begin: int, end: int) -> bool:
        """Return whether the beginning of a document, up to `end`, has a target, and no image that is cut there."""
        if images := self.store.images(begin, end):
            first, _ = images[0]
            tokens = int((self.store.read(begin, end) == self.store.read(first, first + 1)).sum())
            if tokens < sum(image.tokens for _, image in images):
                return False
        return bool(self.store.read_mask(begin + 1, end).any())


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """Return the part of each item, so that parts are of similar size; the largest is at most 4/3 of the optimum.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969): from the largest item
    on, each goes to the part with least so far, and of equal ones to that with the fewest items.
    """
    loads, chosen = [(0, 0, part) for part in range(parts)], [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        size, count, part = min(loads)
        chosen[item], loads[part] = part, (size + sizes[item], count + 1, part)
    return chosen


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Divide the indices of `lengths` into rows of at most `room` in total, by best-fit decreasing."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(left, (lengths[index], -1))
        free, row = left.pop(at) if at < len(left) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(left, (free - lengths[index], row))
    return rows
