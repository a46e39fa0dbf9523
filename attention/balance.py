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

Pairs and received keys are sums over layers, because all layers of a model have the same ranges. Where layers have
sliding windows, tokens beyond them have no more pairs than those before, and ranks receive a window's keys at most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
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
Windows = tuple[tuple[int, int], ...]  # (a sliding window in tokens, the query included, or 0 for none; layers with it)
FULL: Windows = ((0, 1),)


def seen(tokens: int, windows: Windows) -> int:
    """Return the keys that the last of a document's first `tokens` tokens attends to, summed over layers."""
    return sum(layers * min(tokens, window or tokens) for window, layers in windows)


def causal_pairs(tokens: int, windows: Windows) -> int:
    """Return the pairs of the first `tokens` tokens of a document, summed over layers."""
    pairs = 0
    for window, layers in windows:
        few = window if 0 < window < tokens else tokens
        pairs += layers * (few * (few + 1) // 2 + (tokens - few) * window)
    return pairs


@dataclass(frozen=True)
class Slice:
    """Tokens [begin, end) of the document that starts at position `start`. windows: of the layers that attend to them,
    none for padding."""

    begin: int
    end: int
    start: int
    windows: Windows

    @cached_property
    def tokens(self) -> int:
        return self.end - self.begin

    @cached_property
    def pairs(self) -> int:
        """Pairs of its queries."""
        return causal_pairs(self.end, self.windows) - causal_pairs(self.begin, self.windows)

    @cached_property
    def density(self) -> float:
        """The pairs of a token, on average."""
        return self.pairs / self.tokens

    def without(self, first: int, last: int) -> Slice:
        """Return what is left between its first and last tokens."""
        return Slice(self.begin + first, self.end - last, self.start, self.windows)


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
        """Keys that the rank needs from others, summed over layers: those between its slices of a document, and before
        the first, that are in the window of the next one's first token."""
        keys, ends = 0, {piece.start: 0 for piece in self.slices if piece.begin}
        for piece in sorted((piece for piece in self.slices if piece.start in ends), key=attrgetter("begin")):
            gap, ends[piece.start] = piece.begin - ends[piece.start], piece.end
            keys += sum(layers * min(gap, window - 1 if window else gap) for window, layers in piece.windows)
        return keys


@lru_cache(maxsize=64)
def balanced_ranges(
    boundaries: tuple[int, ...], seq_len: int, ring: int, windows: Windows = FULL
) -> tuple[tuple[Range, ...], ...]:
    """Return the ascending ranges of positions of each ring rank: equal tokens, and pairs as equal as documents allow.

    Of divisions whose pairs are within `IMBALANCE` of the mean, the one is taken that sends least.

    boundaries: cu_seqlens of a row; tokens after the last one are padding. `ring` divides `seq_len`. windows: of the
        layers whose pairs and keys are counted.
    """
    pool = [Slice(0, b - a, a, windows) for a, b in pairwise(boundaries) if a < b]
    if boundaries[-1] < seq_len:
        pool.append(Slice(0, seq_len - boundaries[-1], boundaries[-1], ()))
    pool.sort(key=attrgetter("density"))
    mean, tokens = sum(piece.pairs for piece in pool) / ring, seq_len // ring
    free = FREE * seq_len * sum(layers for _, layers in windows)
    aims = AIMS if len(pool) > 1 and seq_len >= LONG else AIMS[-1:]  # one document: as even as it can be
    best: tuple[bool, int, list[Share]] | None = None
    tries = [(whole, *each) for each in product(aims, WEIGHTS) for whole in (True, False)]
    if windows == FULL:  # short documents have so few pairs that whole ones leave ranks even, nearly always
        tries.sort(key=lambda each: not each[0])
    for number, (whole, (aim, slack), weight) in enumerate(tries):
        shares = _divide(pool, tokens, mean, ring, whole, weight, aim * mean, slack * mean)
        uneven = max(share.given for share in shares) > (1 + IMBALANCE) * mean
        division = uneven, sum(share.received for share in shares), shares
        if best is None or division[:2] < best[:2]:
            best = division
        enough = number + 1 >= EFFORT // (len(pool) + 4 * ring * ring) or best[1] <= free
        if enough and not best[0]:
            break
    assert best
    return tuple(tuple(_ranges(share)) for share in best[2])


def load(
    boundaries: tuple[int, ...], division: Iterable[Iterable[Range]], windows: Windows = FULL
) -> tuple[float, int]:
    """Return the work of a row's busiest rank, in pairs relative to the mean or to the unevenness that
    `balanced_ranges` allows where that is more, and the keys that ranks need from others. division: ranges by rank."""
    starts, shares = sorted(set(boundaries)), []
    for ranges in division:
        share = Share(0, 0)
        for begin, end in ranges:
            for number in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
                start, last = starts[number], number + 1 == len(starts)  # after it is padding
                stop = end if last else min(end, starts[number + 1])
                share.add(Slice(max(begin, start) - start, stop - start, start, () if last else windows))
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
    turn = mean / tokens  # from how many keys of a token on pairs limit how many tokens a rank takes
    windows = documents[-1].windows  # of all but padding

    @cache
    def cut(position: int) -> float:
        """Return the keys received for a document of this length that ranks divide from its end on."""
        keys, bends = 0.0, sorted({0, position, *(window for window, _ in windows if window < position)})
        for begin, end in pairwise(bends):  # between which the keys of a token grow evenly with its position
            first, last = seen(begin, windows), seen(end, windows)
            growth, bend = (last - first) / (end - begin), min(max(first, turn), last)
            if growth:
                keys += (bend * bend - first * first) / tokens / 2 / growth
                keys += (last**3 - bend**3) / ((3 * mean or 1) * growth)
            else:
                keys += (end - begin) * last * max(1 / tokens, last / (mean or 1))
        return max(0.0, keys - seen(position, windows) / 2)

    def received(piece: Slice) -> float:
        return cut(piece.end) - cut(piece.begin) if piece.windows else 0.0

    rest = list(shares)
    while rest and not (whole and all(rest[0].fits(piece, slack) for piece in reversed(pool))):
        rest[0].pairs = max(aim, sum([piece.pairs for piece in pool]) / len(rest))
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
    last way can always go on, because a document that loses as much on either side keeps its density (or gains some,
    where layers have windows).

    weight: of keys received because documents are cut here. received: estimates those for what is left of a document.
    """
    wanted, last = share.tokens, len(pool) - 1
    if not wanted:
        return
    tokens = [0, *accumulate([piece.tokens for piece in pool])]
    pairs = [0, *accumulate([piece.pairs for piece in pool])]

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
        cut = sum([pool[number].pairs - pool[number].without(*counts).pairs for number, counts in ends.items()])
        return pairs[low] + pairs[-1] - pairs[high + 1] + cut - share.pairs

    def ahead(few: int, way: str) -> float:
        """Return the keys that ranks receive because of the cuts, and later because of what is left."""
        low, high, ends = cuts(few, way)
        total = keys[high + 1] - keys[low]
        for number, (first, last) in ends.items():
            left = pool[number].without(first, last)
            total += received(left) - received(pool[number])
            if left.tokens:
                total += weight * seen(left.end if last else left.begin if first else 0, left.windows)
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
    for number, (first, end) in ends.items():
        piece = pool[number]
        taken += [piece.without(0, piece.tokens - first), piece.without(piece.tokens - end, 0)]
        kept[number - low] = piece.without(first, end)
    for piece in filter(attrgetter("tokens"), taken):
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
