"""Division of packed documents over ring ranks with equal tokens and nearly equal causal pairs.

    documents     a: 6 tokens                b: 2      c: 2      d: 2         12 tokens, ring = 2
    rank 0        a0 a1 a2       a5          b
    rank 1                 a3 a4                       c         d

Zigzag balances one document; of packed ones it cuts whatever its chunks meet, and ranks with the ends of long documents
have most of the work. Here ranks are given, one after another, the end of the document whose tokens have most pairs,
and besides tokens that have few: whole short documents, the start of one more, or that of the document itself. One
mixture of the two has a rank's share of tokens and of pairs. A single document is divided as zigzag does.

A rank receives, of each document that it has a part of, what precedes its last token there and is not its own. So ranks
send least if few have a part of a document's end, and those as much of it as pairs allow: ranks that come first have
more than the mean, which leaves others with less. What a rank gets besides should have few pairs, and cut documents
near their start, where who has the rest receives little. How mixtures compare is estimated, and several of the best
divisions of the first ranks are gone on with. Documents that fit on ranks whole are also divided without cuts.

Pairs and received keys are sums over layers, because all layers of a model have the same ranges. Where layers have
sliding windows, tokens beyond them have no more pairs than those before, and ranks receive a window's keys at most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

IMBALANCE = 0.05  # by which a rank's pairs may exceed the mean, so that ranks send less
WEIGHT = 0.5  # of keys received because of a cut, over those expected for what is left
WIDTH = 32  # divisions of the first ranks that are gone on with
EFFORT = 1 << 15  # documents times ranks times such divisions at most, so that planning takes about 0.1 s
FEW = 40  # documents of which any can be a rank's, and that are also divided without keeping whole those that fit

Range = tuple[int, int]  # positions [begin, end)
Windows = tuple[tuple[int, int], ...]  # (a sliding window in tokens, the query included, or 0 for none; layers with it)
FULL: Windows = ((0, 1),)


def causal_pairs(tokens: int, windows: Windows) -> int:
    """Return the pairs of the first `tokens` tokens of a document, summed over layers."""
    pairs = 0
    for window, layers in windows:
        few = window if 0 < window < tokens else tokens
        pairs += layers * (few * (few + 1) // 2 + (tokens - few) * window)
    return pairs


class DocumentPiece(NamedTuple):
    """Tokens [begin, end) of the document that starts at position `start`. density: pairs of one, on average."""

    density: float
    begin: int
    end: int
    start: int


class Mixture(NamedTuple):
    """What a rank may be given of a pool: pool[first:stop] and pool[high:] whole, the `few` first tokens of pool[other]
    and the `many` last of pool[high - 1].

    keys: what ranks are expected to receive because of it, less what they were for the pool.
    """

    keys: float
    first: int
    stop: int
    high: int
    other: int
    few: int
    many: int


@lru_cache(maxsize=64)
def balanced_ranges(
    boundaries: tuple[int, ...], seq_len: int, ring: int, windows: Windows = FULL
) -> tuple[tuple[Range, ...], ...]:
    """Return the ascending ranges of positions of each ring rank: equal tokens, and pairs as equal as documents allow.

    Of divisions whose pairs are within `IMBALANCE` of the mean, the one is taken that sends least.

    boundaries: cu_seqlens of a row; tokens after the last one are padding. `ring` divides `seq_len`. windows: of the
        layers whose pairs and keys are counted.
    """
    row, pool = _Row.of(boundaries, seq_len, ring, windows)
    # ranks in the order of their first tokens send more evenly
    divisions = [tuple(sorted(tuple(_ranges(part)) for part in parts)) for parts in row.divisions(pool, ring)]
    return min(divisions, key=lambda division: load(boundaries, division, windows))


def load(
    boundaries: tuple[int, ...], division: Iterable[Iterable[Range]], windows: Windows = FULL
) -> tuple[float, int]:
    """Return the work of a row's busiest rank, in pairs relative to the mean or to the unevenness that
    `balanced_ranges` allows where that is more, and the keys that ranks need from others. division: ascending ranges by
    rank."""
    starts, work, keys = sorted(set(boundaries)), [], 0
    for ranges in division:
        pairs, ends = 0, dict[int, int]()
        for begin, end in ranges:
            for number in range(bisect_right(starts, begin) - 1, min(bisect_left(starts, end), len(starts) - 1)):
                start = starts[number]
                first, stop = max(begin, start) - start, min(end, starts[number + 1]) - start
                gap, ends[start] = first - ends.get(start, 0), stop
                keys += sum(layers * min(gap, window - 1 if window else gap) for window, layers in windows)
                pairs += causal_pairs(stop, windows) - causal_pairs(first, windows)
        work.append(pairs)
    mean = sum(work) / len(work) or -1.0
    return max(1 + IMBALANCE, *(pairs / mean for pairs in work)), keys


@dataclass(frozen=True)
class _Row:
    """Facts of a row, by position in any of its documents; after the longest one come the positions of padding.

    tokens, most: tokens of a rank, and the pairs that it may have.
    pairs, seen: pairs of the tokens before this position, and of the last of them.
    keys: estimate of the keys received by ranks that divide the tokens before this position from their end on.
    """

    tokens: int
    most: float
    pairs: memoryview
    seen: memoryview
    keys: memoryview

    @staticmethod
    def of(boundaries: tuple[int, ...], seq_len: int, ring: int, windows: Windows) -> tuple[_Row, list[DocumentPiece]]:
        """Return the facts, and the documents in ascending density."""
        documents = [(b - a, a) for a, b in pairwise(boundaries) if a < b]
        longest, padding, tokens = max(documents, default=(0, 0))[0], seq_len - boundaries[-1], seq_len // ring
        lengths = np.arange(longest + 1)
        seen = np.sum([layers * np.minimum(lengths, window or longest) for window, layers in windows], axis=0)
        pairs = np.cumsum(seen)
        mean = sum(int(pairs[length]) for length, _ in documents) / ring
        keys = np.cumsum(seen * np.maximum(1 / tokens, seen / (mean or 1.0))) - seen / 2
        uneven = IMBALANCE - 1e-9 if len(documents) + bool(padding) > 1 else 0.0  # one document: as even as it can be
        pairs, keys = (np.pad(each, (0, padding), "edge") for each in (pairs, np.maximum(keys, 0.0)))
        row = _Row(tokens, (1 + uneven) * mean, pairs.data, np.pad(seen, (0, padding)).data, keys.data)
        pool = sorted(row.piece(0, length, start) for length, start in documents)
        if padding:
            pool.insert(0, row.piece(longest, longest + padding, boundaries[-1] - longest))
        return row, pool

    def piece(self, begin: int, end: int, start: int) -> DocumentPiece:
        return DocumentPiece((self.pairs[end] - self.pairs[begin]) / (end - begin), begin, end, start)

    def work(self, piece: DocumentPiece) -> int:
        """Return its pairs."""
        return self.pairs[piece.end] - self.pairs[piece.begin]

    def divisions(self, pool: list[DocumentPiece], ring: int) -> Iterator[tuple[list[DocumentPiece], ...]]:
        """Yield divisions, as the pieces of each rank."""
        width = max(1, min(WIDTH, EFFORT // (len(pool) * ring)))
        # Keys, pairs, pool; what ranks have.
        begun: list[tuple[float, int, list[DocumentPiece], tuple[list[DocumentPiece], ...]]]
        begun = [(0.0, sum(map(self.work, pool)), pool, ())]
        for left in range(ring, 0, -1):
            found: list[tuple[float, int, Mixture]] = []
            for number, (keys, pairs, pool, given) in enumerate(begun):
                mean = pairs / left
                if all(piece.end - piece.begin <= self.tokens and self.work(piece) <= mean for piece in reversed(pool)):
                    packed = self.packed(pool, left, mean)
                    yield (*given, *packed)
                    if len(pool) > FEW and all(sum(map(self.work, pieces)) <= self.most for pieces in packed):
                        continue
                mixtures = self.mixtures(pool, self.tokens, max(self.most, mean))
                found += [(keys + mixture.keys, number, mixture) for mixture in mixtures]
            before, begun, known = begun, [], set[tuple[int, float]]()
            for keys, number, mixture in sorted(found):
                _, pairs, pool, given = before[number]
                taken, rest = self.take(pool, mixture)
                pairs -= sum(map(self.work, taken))
                if (pairs, round(keys, 3)) not in known:
                    known.add((pairs, round(keys, 3)))
                    begun.append((keys, pairs, rest, (*given, taken)))
                if len(begun) == width:
                    break
        yield from (given for *_, given in begun)

    def packed(self, pool: list[DocumentPiece], ring: int, mean: float) -> list[list[DocumentPiece]]:
        """Divide documents, each of which a rank could have: from the densest on they go to the rank that lacks most
        pairs for a token and has room; those that no rank has room for are cut."""
        lacking, given = [(self.tokens, mean)] * ring, [list[DocumentPiece]() for _ in range(ring)]
        neediest, left = [(-mean / self.tokens, rank) for rank in range(ring)], list[DocumentPiece]()
        slack = max(0.0, self.most - mean)
        for piece in reversed(pool):
            passed = []
            while neediest:
                passed.append(heappop(neediest))
                rank = passed[-1][1]
                tokens, pairs = lacking[rank][0] - (piece.end - piece.begin), lacking[rank][1] - self.work(piece)
                if tokens >= 0 and pairs + slack >= 0:
                    lacking[rank] = tokens, pairs
                    given[rank].append(piece)
                    passed[-1:] = [(-pairs / tokens, rank)] if tokens else []
                    break
            else:
                left.append(piece)
            for entry in passed:
                heappush(neediest, entry)
        left.reverse()
        for _, rank in sorted(neediest):
            tokens, pairs = lacking[rank]
            taken, left = self.take(left, min(self.mixtures(left, tokens, pairs + slack)))
            given[rank] += taken
        return given

    def mixtures(self, pool: list[DocumentPiece], tokens: int, most: float) -> list[Mixture]:
        """Return mixtures of so many tokens with at most so many pairs, and hardly fewer where the pool has more; if
        there are none, mixtures with more. pool: in ascending density."""
        found: list[Mixture] = []
        dense = 0, 0, 0.0  # tokens, pairs and expected keys of pool[high:]
        for high in range(len(pool), 0, -1):
            main = pool[high - 1]
            size = main.end - main.begin
            for first in range(max(1, high - 1) if len(pool) <= FEW else 1):
                whole, work, expected = dense
                for stop in range(first, high):
                    piece, lack, room = pool[stop], tokens - whole, most - work
                    if lack <= 0:
                        if not lack and room >= 0:
                            found.append(Mixture(-expected, first, stop, high, stop, 0, 0))
                        break
                    own = head = None
                    if lack <= size and (stop > first or not first):
                        own = self.fewest(main.begin, 0, lack, lack, main.end, room)
                    if stop < high - 1:
                        limit = min(lack, piece.end - piece.begin - 1)
                        head = self.fewest(piece.begin, max(0, lack - size), limit, lack, main.end, room) or None
                    for other, few in ((high - 1, own), (stop, head)):
                        if few is not None:
                            begin, end = pool[other].begin + few, main.end - lack + few  # of what is left
                            keys = self.keys[end] - self.keys[main.end] - expected
                            keys += self.keys[begin - few] - self.keys[begin]
                            if few < lack and end > (begin if other == high - 1 else main.begin):
                                keys += WEIGHT * self.seen[end]
                            if other < high - 1 or begin < end == main.end:
                                keys += WEIGHT * self.seen[begin]
                            found.append(Mixture(keys, first, stop, high, other, few, lack - few))
                    if own == 0:
                        break
                    whole, work = whole + piece.end - piece.begin, work + self.work(piece)
                    expected += self.keys[piece.end] - self.keys[piece.begin]
            whole, work, expected = dense
            if found and (size >= tokens - whole or len(pool) > FEW):
                return found
            dense = whole + size, work + self.work(main), expected + self.keys[main.end] - self.keys[main.begin]
        return found or self.mixtures(pool, tokens, inf)

    def fewest(self, begin: int, low: int, high: int, tokens: int, end: int, most: float) -> int | None:
        """Return how many of so many tokens must come from `begin` on, while the others come before `end`, for at most
        so many pairs: from low to high, or None if these are too few."""
        room = most + self.pairs[begin] - self.pairs[end]
        if low > high or self.pairs[begin + high] - self.pairs[end - tokens + high] > room:
            return None
        pairs, end = self.pairs, end - tokens
        return low + bisect_left(range(low, high), True, key=lambda few: pairs[begin + few] - pairs[end + few] <= room)

    def take(self, pool: list[DocumentPiece], mixture: Mixture) -> tuple[list[DocumentPiece], list[DocumentPiece]]:
        """Return the pieces of a mixture, and the pool without them."""
        _, first, stop, high, other, few, many = mixture
        taken, rest = pool[first:stop] + pool[high:], pool[:first] + pool[stop:high]
        cuts = {other: (few, 0), high - 1: (few if other == high - 1 else 0, many)}  # first and last tokens
        for number, (before, after) in cuts.items():
            if before or after:
                _, begin, end, start = pool[number]
                rest.remove(pool[number])
                bounds = pairwise((begin, begin + before, end - after, end))
                head, middle, tail = (self.piece(a, b, start) if a < b else None for a, b in bounds)
                taken += filter(None, (head, tail))
                if middle:
                    insort(rest, middle)
        return taken, rest


def _ranges(pieces: Iterable[DocumentPiece]) -> Iterator[Range]:
    """Yield ascending ranges of positions, neighbors joined."""
    ranges = sorted((start + begin, start + end) for _, begin, end, start in pieces)
    begin, end = ranges[0]
    for following, stop in ranges[1:]:
        if following != end:
            yield begin, end
            begin = following
        end = stop
    yield begin, end
