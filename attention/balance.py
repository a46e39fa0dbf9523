"""Division of packed documents over ring ranks with equal tokens and nearly equal causal pairs.

    documents     a: 6 tokens                b: 2      c: 2      d: 2         12 tokens, ring = 2
    rank 0        a4 a5                      b         c
    rank 1        a0 a1 a2 a3                                    d

Zigzag balances one document; of packed ones it cuts whatever its chunks meet, and ranks with the ends of long documents
have most of the work. Here documents stay whole where they can. A document with more than a rank's share is cut at its
end, where a token has the most pairs, and the rank gets its other tokens where they have the fewest: short documents,
or the document's own start. Some mixture of the two has a rank's share of tokens and of pairs. A single document is
divided as zigzag does.

A rank receives, of each document that it has a part of, what precedes its last token there and is not its own. So ranks
send least if few have a part of a document's end, and those as much of it as pairs allow: ranks that come first may get
more than the mean, which leaves others with less. Several ways of dividing are compared, and then each two ranks that
are near each other are divided again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, combinations, islice, pairwise, product
from operator import attrgetter

IMBALANCE = 0.05  # by which a rank's pairs may exceed the mean, so that ranks send less
AIMS = ((1.03, 0.02), (1.048, 0.002), (1.0, 0.02))  # least pairs of the first ranks, and by how much they may miss
WAYS = ("own start", "filled", "ends", "shell")  # of `_mix`, tried in turn from one of them on
NEAR = 64  # over the number of ranks: how far apart in the order of assignment two ranks are that are divided again
EFFORT = 1 << 17  # slices that are assigned in all divisions that are tried, so that many documents take no second
LONG = 1 << 14  # tokens of a row for which more than a few divisions are tried
FREE = 1 / 64  # of the tokens: what ranks may send without a search for a division that sends less

Range = tuple[int, int]  # positions [begin, end)


@dataclass(frozen=True)
class Slice:
    """Tokens [begin, end) of the document that starts at position `start`; tokens of no document have no pairs."""

    begin: int
    end: int
    start: int
    padding: bool = False

    @property
    def tokens(self) -> int:
        return self.end - self.begin

    @property
    def pairs(self) -> int:
        """Causal pairs of its queries."""
        return 0 if self.padding else (self.end * (self.end + 1) - self.begin * (self.begin + 1)) // 2

    @property
    def density(self) -> int:
        """Twice the pairs of a token, on average."""
        return 0 if self.padding else self.begin + self.end

    def split(self, first: int, last: int) -> tuple[list[Slice], Slice]:
        """Return the first and last tokens, and what is left between them."""
        cuts = (self.begin, self.begin + first, self.end - last, self.end)
        head, middle, tail = (Slice(a, b, self.start, self.padding) for a, b in pairwise(cuts))
        return [piece for piece in (head, tail) if piece.tokens], middle


@dataclass
class Share:
    """What a rank has been given, and how many tokens and pairs it lacks."""

    tokens: int
    pairs: float
    slices: list[Slice] = field(default_factory=list)

    def add(self, piece: Slice) -> None:
        self.slices.append(piece)
        self.tokens -= piece.tokens
        self.pairs -= piece.pairs

    def fits(self, piece: Slice, slack: float) -> bool:
        return piece.tokens <= self.tokens and piece.pairs <= self.pairs + slack

    @property
    def density(self) -> float:
        """The pairs that a missing token should have."""
        return self.pairs / self.tokens if self.tokens else -1.0

    @property
    def given(self) -> int:
        """Pairs that the rank has."""
        return sum(piece.pairs for piece in self.slices)

    @property
    def received(self) -> int:
        """Keys that the rank needs from others: in each document, those before its last token that it lacks."""
        needed: dict[int, int] = {}
        for piece in self.slices:
            if not piece.padding:
                needed[piece.start] = max(piece.end, needed.get(piece.start, 0))
        return sum(needed.values()) - sum(piece.tokens for piece in self.slices if not piece.padding)


@lru_cache(maxsize=64)
def balanced_ranges(boundaries: tuple[int, ...], seq_len: int, ring: int) -> tuple[tuple[Range, ...], ...]:
    """Return the ascending ranges of positions of each ring rank: equal tokens, and pairs as equal as documents allow.

    Of divisions whose pairs are within `IMBALANCE` of the mean, the one is taken that sends least.

    boundaries: cu_seqlens of a row; tokens after the last one are padding. `ring` divides `seq_len`.
    """
    pool = [Slice(0, b - a, a) for a, b in pairwise(boundaries) if a < b]
    if boundaries[-1] < seq_len:
        pool.append(Slice(0, seq_len - boundaries[-1], boundaries[-1], padding=True))
    pool.sort(key=attrgetter("density"))
    mean = sum(piece.pairs for piece in pool) / ring
    limit, tokens = (1 + IMBALANCE) * mean, seq_len // ring
    if len(pool) == 1:  # as even as it can be
        return tuple(tuple(_ranges(share)) for share in _best(pool, tokens, mean, ring, AIMS[-1:])[0])
    aims, tries = (AIMS, EFFORT // max(1, len(pool))) if seq_len >= LONG else (AIMS[-1:], 6)
    shares, _, sent = _best(pool, tokens, mean, ring, aims, tries)
    near = [(a, b) for a, b in combinations(range(ring), 2) if (b - a) * ring <= NEAR]
    for a, b in near if sent > FREE * seq_len and tries > 36 else ():
        two = shares[a], shares[b]
        before = max(share.given for share in two) > limit, sum(share.received for share in two)
        found, *after = _best(_joined(two), tokens, mean, 2, AIMS[:2])
        if tuple(after) < before:
            shares[a], shares[b] = found
    return tuple(tuple(_ranges(share)) for share in shares)


def _best(
    pool: list[Slice], tokens: int, mean: float, ring: int, aims: Iterable[tuple[float, float]], tries: int = 18
) -> tuple[list[Share], bool, int]:
    """Return of several divisions the one that is even and sends least; whether it is uneven, and how many keys ranks
    receive."""
    best: tuple[list[Share], bool, int] | None = None
    for (aim, slack), whole, first in islice(product(aims, (True, False), range(3)), max(1, tries)):
        shares = _divide(pool, tokens, mean, ring, whole, WAYS[first:], aim * mean, slack * mean)
        uneven = max(share.given for share in shares) > (1 + IMBALANCE) * mean
        received = sum(share.received for share in shares)
        if best is None or (uneven, received) < best[1:]:
            best = shares, uneven, received
        if best[1:] <= (False, FREE * tokens * ring):
            break
    assert best
    return best


def _joined(shares: Iterable[Share]) -> list[Slice]:
    """Return the slices of some ranks in ascending density, adjacent ones as one."""
    joined: list[Slice] = []
    for piece in sorted((piece for share in shares for piece in share.slices), key=attrgetter("start", "begin")):
        if joined and (joined[-1].start, joined[-1].end) == (piece.start, piece.begin):
            joined[-1] = replace(joined[-1], end=piece.end)
        else:
            joined.append(piece)
    return sorted(joined, key=attrgetter("density"))


def load(boundaries: tuple[int, ...], division: Iterable[Iterable[Range]]) -> tuple[float, int]:
    """Return the work of a row's busiest rank, in causal pairs relative to the mean or to the unevenness that
    `balanced_ranges` allows where that is more, and the keys that ranks need from others. division: ranges by rank."""
    starts, shares = sorted(set(boundaries)), []
    for ranges in division:
        share = Share(0, 0)
        for begin, end in ranges:
            for number in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
                start, last = starts[number], number + 1 == len(starts)  # after it is padding
                stop = end if last else min(end, starts[number + 1])
                share.add(Slice(max(begin, start) - start, stop - start, start, last))
        shares.append(share)
    mean = sum(share.pairs for share in shares) / len(shares) or -1.0
    return max(1 + IMBALANCE, *(share.pairs / mean for share in shares)), sum(share.received for share in shares)


def _divide(
    documents: list[Slice],
    tokens: int,
    mean: float,
    ring: int,
    whole: bool,
    ways: Sequence[str],
    aim: float,
    slack: float,
) -> list[Share]:
    """Divide documents, in ascending density. whole: keep those whole that fit; else every rank gets a mixture. aim:
    pairs of a mixture at least; it may miss by `slack`."""
    shares, pool = [Share(tokens, mean) for _ in range(ring)], list(documents)
    rest = list(shares)
    while rest and not (whole and all(rest[0].fits(piece, slack) for piece in pool)):
        rest[0].pairs = max(aim, sum(piece.pairs for piece in pool) / len(rest))
        _mix(pool, rest.pop(0), slack, ways)
    left: list[Slice] = []
    neediest = [(-share.density, number) for number, share in enumerate(rest)]
    for piece in reversed(pool):
        passed = []
        while neediest and not rest[neediest[0][1]].fits(piece, slack):
            passed.append(heappop(neediest))
        if neediest:
            number = heappop(neediest)[1]
            rest[number].add(piece)
            passed.append((-rest[number].density, number))
        else:
            left.insert(0, piece)
        for entry in passed:
            heappush(neediest, entry)
    for share in sorted(rest, key=attrgetter("density"), reverse=True):
        _mix(left, share, slack, ways)
    return shares


def _mix(pool: list[Slice], share: Share, slack: float, ways: Sequence[str]) -> None:
    """Complete a share from a pool in ascending density: `few` tokens with few pairs, and the others with many.

    In the first way that gives its pairs, within `slack`: the start and the end of the densest document; the sparsest
    documents as well, before its start; these and the start of the next, and the end of the densest; or of both as many
    first as last tokens. The last way can always go on, because a document that loses as much on either side keeps its
    density.
    """
    wanted, last = share.tokens, len(pool) - 1
    if not wanted:
        return
    tokens = [0, *accumulate(piece.tokens for piece in pool)]
    pairs = [0, *accumulate(piece.pairs for piece in pool)]

    def cuts(few: int, way: str) -> tuple[int, int, dict[int, tuple[int, int]]]:
        """Return numbers of documents: those before the first, and after the second, are taken whole; and how many
        first and last tokens are taken of others."""
        low = min(bisect_right(tokens, few) - 1, last)
        some, many = few - tokens[low], wanted - few
        if way == "own start":
            return 0, last, {last: (few, many)}
        if way == "filled":
            return low, last, {last: (some, many)}
        high = min(bisect_right(tokens, tokens[-1] - many) - 1, last)
        most = many - (tokens[-1] - tokens[high + 1])
        if way == "ends":
            return low, high, {low: (some, 0), high: (0, most)} if low < high else {low: (some, most)}
        parts = {low: some, high: most} if low < high else {low: some + most}
        return low, high, {number: (part // 2, part - part // 2) for number, part in parts.items()}

    def excess(few: int, way: str) -> float:
        low, high, ends = cuts(few, way)
        cut = sum(piece.pairs for number, counts in ends.items() for piece in pool[number].split(*counts)[0])
        return pairs[low] + pairs[-1] - pairs[high + 1] + cut - share.pairs

    for way in ways if pool[last].tokens >= wanted else WAYS[2:]:
        crossing = bisect_left(range(wanted), True, key=lambda few: excess(few, way) <= 0)
        nearest = min(crossing, max(crossing - 1, 0), key=lambda few: abs(excess(few, way)))
        few = next((few for few in (wanted, 0) if abs(excess(few, way)) <= slack), nearest)  # with one cut
        if abs(excess(few, way)) <= slack:
            break
    low, high, ends = cuts(few, way)
    taken, kept = [*pool[:low], *pool[high + 1 :]], pool[low : high + 1]
    for number, counts in ends.items():
        pieces, kept[number - low] = pool[number].split(*counts)
        taken += pieces
    for piece in taken:
        share.add(piece)
    pool[:] = sorted((piece for piece in kept if piece.tokens), key=attrgetter("density"))


def _ranges(share: Share) -> Iterator[Range]:
    """Yield ascending ranges of positions, neighbors joined."""
    ranges = sorted((piece.start + piece.begin, piece.start + piece.end) for piece in share.slices)
    begin, end = ranges[0]
    for following, stop in ranges[1:]:
        if following != end:
            yield begin, end
            begin = following
        end = stop
    yield begin, end
