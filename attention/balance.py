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
more than the mean, which leaves others with less. What a rank gets besides should have few pairs, and cut documents
near their start, where who has the rest receives little; how these compare is estimated, and several weights are tried.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, pairwise, product
from operator import attrgetter

IMBALANCE = 0.05  # by which a rank's pairs may exceed the mean, so that ranks send less
AIMS = ((1.048, 0.002), (1.03, 0.02), (1.0, 0.02))  # least pairs of the first ranks, and by how much they may miss
WAYS = ("own start", "filled", "ends", "shell")  # of `_mix`
WEIGHTS = (0.3, 0.7, 0.15)  # of keys received because of a cut, over those expected for what is left
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
    mean, tokens = sum(piece.pairs for piece in pool) / ring, seq_len // ring
    aims = AIMS if len(pool) > 1 and seq_len >= LONG else AIMS[-1:]  # one document: as even as it can be
    best: tuple[bool, int, list[Share]] | None = None
    for number, (whole, (aim, slack), weight) in enumerate(product((True, False), aims, WEIGHTS)):
        shares = _divide(pool, tokens, mean, ring, whole, weight, aim * mean, slack * mean)
        uneven = max(share.given for share in shares) > (1 + IMBALANCE) * mean
        division = uneven, sum(share.received for share in shares), shares
        if best is None or division[:2] < best[:2]:
            best = division
        enough = number + 1 >= EFFORT // (len(pool) + 4 * ring * ring) or best[1] <= FREE * seq_len
        if enough and not best[0]:
            break
    assert best
    return tuple(tuple(_ranges(share)) for share in best[2])


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
    weight: float,
    aim: float,
    slack: float,
) -> list[Share]:
    """Divide documents, in ascending density. whole: keep those whole that fit; else every rank gets a mixture. aim:
    pairs of a mixture at least; it may miss by `slack`."""
    shares, pool = [Share(tokens, mean) for _ in range(ring)], list(documents)
    turn = mean / tokens  # from which position on pairs limit how many tokens a rank takes

    def cut(position: float) -> float:
        """Return the keys received for a document of this length that ranks divide from its end on."""
        below = min(position, turn)
        keys = below * below / tokens / 2 + (position**3 - below**3) / (3 * mean or 1)
        return max(0.0, keys - position / 2)

    def received(piece: Slice) -> float:
        return 0.0 if piece.padding else cut(piece.end) - cut(piece.begin)

    rest = list(shares)
    while rest and not (whole and all(rest[0].fits(piece, slack) for piece in pool)):
        rest[0].pairs = max(aim, sum(piece.pairs for piece in pool) / len(rest))
        _mix(pool, rest.pop(0), slack, weight, received)
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
        _mix(left, share, slack, weight, received)
    return shares


def _mix(pool: list[Slice], share: Share, slack: float, weight: float, received: Callable[[Slice], float]) -> None:
    """Complete a share from a pool in ascending density: `few` tokens with few pairs, and the others with many.

    The ways: the start and the end of the densest document; the sparsest documents as well, before its start; these and
    the start of the next, and the end of the densest; or of both as many first as last tokens. Of those that give its
    pairs, within `slack`, or less where there are no more, the one after which ranks should receive least is taken. The
    last way can always go on, because a document that loses as much on either side keeps its density.

    weight: of keys received because documents are cut here. received: estimates those for what is left of a document.
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

    def ahead(few: int, way: str) -> float:
        """Return the keys that ranks receive because of the cuts, and later because of what is left."""
        low, high, ends = cuts(few, way)
        total = keys[high + 1] - keys[low]
        for number, (first, last) in ends.items():
            piece = pool[number]
            left = Slice(piece.begin + first, piece.end - last, piece.start, piece.padding)
            total += received(left) - received(piece)
            if left.tokens and not piece.padding:
                total += weight * (left.end if last else left.begin if first else 0)
        return total

    keys = [0.0, *accumulate(map(received, pool))]
    best = None
    for way in WAYS if pool[last].tokens >= wanted else WAYS[2:]:
        crossing = bisect_left(range(wanted), True, key=lambda few: excess(few, way) <= 0)
        nearest = min(crossing, max(crossing - 1, 0), key=lambda few: abs(excess(few, way)))
        few = next((few for few in (wanted, 0) if abs(excess(few, way)) <= slack), nearest)  # with one cut
        over = excess(few, way)
        if (way == WAYS[-1] and best is None) or abs(over) <= slack or (not few and over <= 0):
            option = ahead(few, way), few, way
            best = min(best or option, option)
    assert best
    _, few, way = best
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
