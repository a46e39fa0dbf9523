"""Global batches of rows of one store or a mixture, the same for any number of ranks and resumed at any row, and a
rank's part of them.

A rank reads its rows, and in them the tokens of its spans, ahead of the step. What depends on neighboring tokens,
positions and shifted labels, follows from the boundaries of documents, which are part of the row's index. A rank reads
its own tokens, and at the end of a span the next one, which is the last target. Striped spans alternate with those of
other ranks, so that a rank reads what lies between its tokens as well. Balanced spans follow from the boundaries, too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from usp.attention import OF_DOCUMENTS, SequenceLayout, causal_pairs, counted_windows
from usp.attention.layout import Span
from usp.parallel import option
from usp.sp.sequence import IGNORED_LABEL

from .chats import Image
from .rows import PackedRows, Permutation, Row, balanced
from .sources import STDLIB
from .store import Numbers
from .tokenizer import Ids

AHEAD = 2  # batches that are read before they are asked for
PERIOD = 1024  # rows of a mixture that hold each store's share


class MixedRows:
    """Rows of `sources`, which have one seq_len and one seed, in the proportions of `weights`.

    A row depends only on its number, as in one store: its place in its period, permuted, falls to a store and is one of
    that store's next rows. Stores that are smaller than their share begin another epoch of their own.

    shares: rows of each source in every PERIOD rows. weights: the same as fractions of 1. per_epoch: the rows of an
    epoch of every source, added up.

    Raises ValueError for a weight that is too small for a row in PERIOD.
    """

    def __init__(self, sources: Sequence[PackedRows], weights: Sequence[float]) -> None:
        self.sources = tuple(sources)
        self.seq_len, self.seed = sources[0].seq_len, sources[0].seed
        self.per_epoch = sum(source.per_epoch for source in sources)
        self.shares = shares(weights)
        self.weights = tuple(share / PERIOD for share in self.shares)
        self._order = lru_cache(maxsize=1)(self._order_of)

    @property
    def identity(self) -> str:
        parts = zip(self.shares, self.sources, strict=True)
        return "; ".join(f"{share}/{PERIOD} of {source.identity}" for share, source in parts)

    def epochs(self, rows: int) -> list[float]:
        """Return how often each source has been read after so many rows, with the epochs before them."""
        counts = taken(self.weights, self.seed, rows)
        return [epoch for count, source in zip(counts, self.sources, strict=True) for epoch in source.epochs(count)]

    def row(self, number: int) -> Row:
        period, place = divmod(number, PERIOD)
        which, numbers = self._order(period)
        return self.sources[which[place]].row(int(numbers[place]))

    def _order_of(self, period: int) -> tuple[Numbers, Numbers]:
        """Return for every row of a period its source, and its number in that, which ascends."""
        which = _sources(self.shares, self.seed, period)
        numbers = np.empty(PERIOD, np.int64)
        for source, share in enumerate(self.shares):
            numbers[which == source] = period * share + np.arange(share)
        return which, numbers


def taken(weights: Sequence[float], seed: int | None, rows: int) -> list[int]:
    """Return the number of rows of each source among the first `rows` rows of a mixture."""
    in_period = shares(weights)
    periods, rest = divmod(rows, PERIOD)
    in_rest = np.bincount(_sources(in_period, seed, periods)[:rest], minlength=len(in_period))
    return [periods * share + int(more) for share, more in zip(in_period, in_rest, strict=True)]


def _sources(in_period: Sequence[int], seed: int | None, period: int) -> Numbers:
    places = Permutation(PERIOD, None if seed is None else (seed, period, 2)).at(np.arange(PERIOD))
    return np.repeat(np.arange(len(in_period)), in_period)[places]


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return PERIOD divided in the proportions of `weights`, by largest remainders. Raises ValueError, naming a weight
    that gets nothing."""
    exact = [weight / math.fsum(weights) * PERIOD for weight in weights]
    rounded = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: rounded[index] - exact[index])
    for index in by_remainder[: PERIOD - sum(rounded)]:
        rounded[index] += 1
    if not all(rounded):
        raise ValueError(f"weight {weights[rounded.index(0)]:g} is too small: of {PERIOD} rows it gives none")
    return tuple(rounded)


def parse_mixture(data: str) -> list[tuple[str, float]]:
    """Return the paths and weights of `PATH=WEIGHT,PATH=WEIGHT`; of a path that exists, or has no `=`, the weight is 1.
    Raises ValueError for no path, or a path without a weight that is a positive number."""
    given = option("data", data if data.strip() else repr(data))
    if not data.strip():
        raise ValueError(given + " names no data: give a token store, files of documents, or PATH=WEIGHT,...")
    if data == STDLIB or "=" not in data or Path(data).expanduser().exists():
        return [(data, 1.0)]
    mixture = []
    for item in data.split(","):
        path, _, text = item.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not path or not 0 < weight < math.inf:
            raise ValueError(given + f": {item!r} must be PATH=WEIGHT with a positive weight, such as books=0.3")
        mixture.append((path, weight))
    if len({path for path, _ in mixture}) < len(mixture):
        raise ValueError(given + " names a path twice: give it once, with the sum of its weights")
    return mixture


def parse_named(data: str) -> list[tuple[str, str]]:
    """Return the names and paths of `NAME=PATH,NAME=PATH`; of a path that exists, or has no `=`, the name is empty, and
    for an empty text there is none. Raises ValueError for a name or a path that is missing, or a name given twice."""
    if not data or "=" not in data or Path(data).expanduser().exists():
        return [("", data)] if data else []
    sets = [(name.strip(), path) for name, _, path in (item.partition("=") for item in data.split(","))]
    if not all(name and path and "/" not in name for name, path in sets) or len(dict(sets)) < len(sets):
        form = " must be NAME=PATH,NAME=PATH,... with a name of its own, without /, for each"
        raise ValueError(option("eval_data", data) + form)
    return sets


Rows = PackedRows | MixedRows


class BatchStream:
    """A place in the sequence of global batches of `rows` rows of `packed`.

    begun: where other data has begun, the step before that, and the epoch with which each source began.
    next_row: the first of the next batch.
    """

    def __init__(self, packed: Rows, rows: int, begun: tuple[int, int] = (0, 0)) -> None:
        self.packed, self.rows, self.begun, self.identity = packed, rows, begun, packed.identity
        self.next_row = 0

    @property
    def epoch(self) -> float:
        """Epochs of all sources together read so far, with the fraction of the current one."""
        return self.begun[1] + self.next_row / self.packed.per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume after the batches read so far, as JSON values."""
        return {
            "row": self.next_row,
            "epoch": int(max(self.packed.epochs(self.next_row))),
            "begun": self.begun,
            "seq_len": self.packed.seq_len,
            "seed": self.packed.seed,
            "data": self.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; the number of rows in a batch may differ from that of the stream that saved it.

        Raises ValueError, naming those of seq_len, seed and data that differ; the stream is unchanged.
        """
        own = self.state_dict()
        differing = [key for key in ("seq_len", "seed", "data") if state[key] != own[key]]
        if differing:
            raise ValueError("; ".join(f"{key} = {own[key]}, but the checkpoint has {state[key]}" for key in differing))
        self.next_row = state["row"]


@dataclass(frozen=True)
class Part:
    """What a rank of the ring x ulysses grid reads of every global batch: its tokens of `rows` rows from `first` on.

    layout: of each row, with tokens behind its end if the ranks cannot divide it; of one that depends on the
    row's documents, only the name and the sizes. balanced: these rows are not neighbors, but those that `even_rows`
    deals to this data-parallel rank. windows: per layer, the sliding window by which their work is counted, 0 for none
    and negative for a layer without attention. micro_batches: into which these rows are divided. images: reads the
    pixels of a vision-language model's images, see `usp.hf.processors.Images`; None for other models.
    """

    layout: SequenceLayout
    ring_rank: int
    ulysses_rank: int
    first: int
    rows: int
    balanced: bool = False
    micro_batches: int = 1
    images: Any = None
    windows: tuple[int, ...] = (0,)

    @staticmethod
    def whole(rows: int, seq_len: int) -> Part:
        return Part(SequenceLayout("contiguous", seq_len), 0, 0, 0, rows)


@dataclass(frozen=True)
class ImageBatch:
    """The images of the rows of a micro-batch.

    ids: int64 (rows, seq_len), of all tokens. sizes: of all images, in the order of their tokens; without any, of one
    that is encoded for nothing. own: the indices of those that this rank encodes. pixels: what the model takes of them.
    """

    ids: torch.Tensor
    sizes: Sequence[Image]
    own: Sequence[int]
    pixels: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TokenBatch:
    """A part of a global batch, on CPU, as `usp.sp.sequence.shard_batch` gives it.

    numbers: of the rows of the global batch. own: of those that this is a part of.
    input_ids, position_ids, shift_labels: int64 (rows, tokens).
    cu_seqlens: int32 (rows, documents + 1), each row from 0 to the end of its last document, which is repeated.
    real: bool (rows, tokens), False for those behind a row's seq_len; None if there are none.
    images: of each micro-batch, also of those without, if any row of the global batch has images: ranks that share the
        weights of the encoder call it alike. Otherwise empty.
    balanced: the share of its rows that layout auto divides as balanced; None with other layouts.
    """

    numbers: range
    own: Sequence[int]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    shift_labels: torch.Tensor
    cu_seqlens: torch.Tensor
    real: torch.Tensor | None = None
    images: tuple[ImageBatch, ...] = ()
    balanced: float | None = None

    def to(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what the model and the loss take, on `device`; cu_seqlens stay on the CPU."""
        tokens = {name: getattr(self, name).to(device) for name in ("input_ids", "position_ids", "shift_labels")}
        real = {} if self.real is None else {"real": self.real.to(device)}
        return tokens | real | {"cu_seqlens": self.cu_seqlens}


def even_rows(pairs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal rows, given the pairs of tokens that attend to each other in each, to ranks: the indices of each rank's.

    Ranks get equally many. Those at one place, which ranks compute at the same time, follow each other in the order of
    pairs, and the rank with the fewest so far gets the row with the most (longest processing time first: Graham 1969,
    SIAM Journal on Applied Mathematics 17).
    """
    order = sorted(range(len(pairs)), key=lambda row: -pairs[row])
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(0, len(order), ranks):
        dealt.sort(key=lambda rows: sum(pairs[row] for row in rows))
        for rows, row in zip(dealt, order[first : first + ranks], strict=True):
            rows.append(row)
    return sorted(dealt)


def read_batch(packed: Rows, numbers: range, part: Part, targets: int | None = None) -> TokenBatch:
    """Read a part of the global batch of the rows `numbers`.

    targets: number of tokens, counted over all rows, after which there are no targets; None for no limit.
    """
    own: Sequence[int] = numbers[part.first : part.first + part.rows]
    if part.balanced:
        lengths = [np.diff(packed.row(number).boundaries).tolist() for number in numbers]
        windows = counted_windows(part.windows)
        pairs = [sum(causal_pairs(length, windows) for length in each) for each in lengths]
        dealt = even_rows(pairs, len(numbers) // part.rows)
        own = [numbers[index] for index in dealt[part.first // part.rows]]
    rows, columns, real, kinds, place = [], [], [], [], (part.ring_rank, part.ulysses_rank)
    for number in own:
        rows.append(packed.row(number))
        limit = packed.seq_len if targets is None else targets - number * packed.seq_len
        documents = (tuple(rows[-1].boundaries.tolist()),) if part.layout.kind in OF_DOCUMENTS else None
        layout = replace(part.layout, documents=documents)
        kinds.append(layout.decided.kind)
        spans = [_read(rows[-1], span, limit) for span in layout.local_spans(*place)]
        columns.append([np.concatenate(values) for values in zip(*spans, strict=True)])
        if layout.seq_len > packed.seq_len:
            real.append(layout.positions(*place) < packed.seq_len)
    ids, positions, labels = (torch.from_numpy(np.stack(column)) for column in zip(*columns, strict=True))
    width = max(len(row.boundaries) for row in rows)
    padded = [np.pad(row.boundaries, (0, width - len(row.boundaries)), mode="edge") for row in rows]
    boundaries = torch.from_numpy(np.stack(padded)).to(torch.int32)
    images: tuple[ImageBatch, ...] = ()
    if part.images is not None and any(row.has_images for row in chain(rows, map(packed.row, numbers))):
        size = len(rows) // part.micro_batches
        images = tuple(_read_images(rows[at : at + size], packed.seq_len, part) for at in range(0, len(rows), size))
    hidden = torch.stack(real) if real else None
    chosen = kinds.count("balanced") / len(kinds) if part.layout.kind == "auto" else None
    return TokenBatch(numbers, own, ids, positions, labels, boundaries, hidden, images, chosen)


def _read_images(rows: Sequence[Row], seq_len: int, part: Part) -> ImageBatch:
    """Read a rank's images of a micro-batch. Raises ValueError for one that cannot be read, or has changed."""
    ids, images = np.zeros((len(rows), seq_len), np.int64), [image for row in rows for image in row.images]
    for place, row in zip(ids, rows, strict=True):
        end = int(row.boundaries[-1])
        place[:end] = np.concatenate([row.store.read(*piece) for piece in row.pieces(0, end)])
    if not images:
        blank, pixels = part.images.blank
        return ImageBatch(torch.from_numpy(ids), [blank], [0], pixels)
    ranks, rank = part.layout.ring * part.layout.ulysses, part.ring_rank * part.layout.ulysses + part.ulysses_rank
    own = own_images([image.patches for image in images], ranks, rank)
    read = [part.images.pixels(images[number]) for number in own]
    pixels = {name: torch.cat([each[name] for each in read]) for name in read[0]}
    return ImageBatch(torch.from_numpy(ids), images, own, pixels)


def own_images(patches: Sequence[int], ranks: int, rank: int) -> list[int]:
    """Return the indices of the images that a sequence-parallel rank encodes, given the patches of each: those that are
    its own, or else the smallest one, whose features nobody uses."""
    own = [number for number, owner in enumerate(balanced(patches, ranks)) if owner == rank]
    return own or sorted(range(len(patches)), key=lambda number: patches[number])[:1]


def _read(row: Row, span: Span, limit: int) -> tuple[Ids, Ids, Ids]:
    """Return the ids of a span, their positions in their documents, and their targets, which are before place `limit`.
    Behind the last document ids are 0, positions are counted from its end, and there are no targets."""
    places = span.start + span.step * np.arange(span.length)
    documents = np.searchsorted(row.boundaries, places, side="right")
    ends = np.append(row.boundaries, 0)[documents]
    end = int(places[-1]) + 1
    end = min(end + (end < ends[-1]), int(row.boundaries[-1]))  # with the next token, which is the last target
    tokens, wanted = np.zeros(places[-1] + 2 - span.start, np.int64), np.zeros(places[-1] + 2 - span.start, np.bool_)
    if span.start < end:
        pieces = row.pieces(span.start, end)
        tokens[: end - span.start] = np.concatenate([row.store.read(*piece) for piece in pieces])
        wanted[: end - span.start] = np.concatenate([row.store.read_mask(*piece) for piece in pieces])
    after = places + 1 - span.start
    targets = np.where((places + 1 < np.minimum(ends, limit)) & wanted[after], tokens[after], IGNORED_LABEL)
    return tokens[places - span.start], places - row.boundaries[documents - 1], targets


class BatchReader(Iterator[TokenBatch]):
    """Reads a rank's part of one global batch after another, from the place of `stream` on, which moves with them. A
    thread reads the next AHEAD batches in the background. waited: seconds that the last batch took to arrive."""

    def __init__(self, stream: BatchStream, part: Part) -> None:
        self.stream, self.part, self.waited = stream, part, 0.0
        self._thread = ThreadPoolExecutor(1, "data")
        self._coming: deque[Future[TokenBatch]] = deque()
        self._next = stream.next_row  # to be asked for

    def close(self) -> None:
        """End the reading ahead; no batch can be asked for afterwards."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __next__(self) -> TokenBatch:
        begin = time.perf_counter()
        while len(self._coming) <= AHEAD:
            numbers = range(self._next, self._next + self.stream.rows)
            self._coming.append(self._thread.submit(read_batch, self.stream.packed, numbers, self.part))
            self._next = numbers.stop
        batch = self._coming.popleft().result()
        self.stream.next_row = batch.numbers.stop
        self.waited = time.perf_counter() - begin
        return batch


def one_epoch(packed: PackedRows, rows: int, part: Part) -> Iterator[TokenBatch]:
    """Yield a part of the first epoch in global batches of `rows` rows, with each token of its rows a target once. What
    fills up the last row and the last batch is no target. `packed` has no seed, so that it ends there."""
    for first in range(0, packed.per_epoch, rows):
        yield read_batch(packed, range(first, first + rows), part, targets=packed.places)
