"""Token stores: the documents of a data set as flat files of token ids, read by position.

    STORE/tokens.bin       the ids of one document after another, in the smallest unsigned type
    STORE/index.bin        int64 (documents + 1,): where in tokens.bin each document begins, and the last one ends
    STORE/mask.bin         uint8 for every token: 1 where it is a target of the loss; absent if all tokens are
    STORE/images.jsonl     of images, their files and sizes; absent where the tokenizer reads none, as is the next
    STORE/images.bin       int64 (images, 2): where in tokens.bin each begins, and where in images.jsonl it ends
    STORE/manifest.json    see `Manifest`; written last, so that a folder without it is no store

Files are read at positions rather than mapped: what has been read of a mapped file counts as memory of the process,
which would grow with steps, and a mapped file that fails kills the process without a message.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from usp.run.output import working

from .chats import StoredImage
from .sources import naming
from .tokenizer import Ids

FORMAT = 2
TOKENS, INDEX, MASK, MANIFEST, PROGRESS = "tokens.bin", "index.bin", "mask.bin", "manifest.json", "progress.json"
IMAGES, IMAGE_INDEX = "images.jsonl", "images.bin"
SUM_BYTES = 2**26  # of a file that have a checksum together
CHUNK = 2**18  # documents or tokens that are looked at together
LARGE = 2**26  # bytes of files that are worth starting processes, and saying how far one is
LINE_SECONDS = 30.0  # between two lines that say how far one is

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Manifest:
    """What a store holds.

    tokenizer: its name. fingerprint: what its ids depend on. largest: the largest id.
    characters: number of characters of text. replaced: those that are U+FFFD, for bytes that are not UTF-8.
    dtype: type of the ids in tokens.bin.
    masked: whether there is a mask.bin.
    images: number of images; None where the tokenizer reads none. image_bytes: of what describes them.
    dropped: number of rows that were left out because they hold no text, or something is wrong with them; why_dropped:
    with the first.
    unended: number of answers in chats without a token that ends a response.
    source: hash of what the store was made from, see `source_of`; a store with the same hash need not be written.
    checksums: by file, of every SUM_BYTES bytes.
    """

    format: int
    tokenizer: str
    fingerprint: str
    largest: int
    files: int
    documents: int
    characters: int
    replaced: int
    tokens: int
    dtype: str
    masked: bool
    source: str
    checksums: Mapping[str, list[str]]
    dropped: int = 0
    why_dropped: str = ""
    unended: int = 0
    images: int | None = None
    image_bytes: int = 0

    @cached_property
    def digest(self) -> str:
        """Hash of the content: the same for stores of the same documents in the same order."""
        content = json.dumps([self.dtype, self.checksums], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of every file."""
        sizes = file_sizes(self.tokens, self.documents, self.dtype, self.masked)
        return sizes if self.images is None else sizes | image_sizes(self.images, self.image_bytes)


def image_sizes(images: int, image_bytes: int) -> dict[str, int]:
    """Return the bytes of the files of a store's images."""
    return {IMAGES: image_bytes, IMAGE_INDEX: 16 * images}


def file_sizes(tokens: int, documents: int, dtype: npt.DTypeLike, masked: bool) -> dict[str, int]:
    """Return the bytes of every other file of a store that holds this much."""
    sizes = {TOKENS: tokens * np.dtype(dtype).itemsize, INDEX: 8 * (documents + 1)}
    return sizes | {MASK: tokens} if masked else sizes


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file atomically: whoever reads it finds all of the new content, or all of the old."""
    new = path.with_suffix(".new")
    with naming(new), new.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def is_store(folder: Path) -> bool:
    """Return whether `folder` is a token store, or one that is not finished or lacks a file."""
    files = (folder / name for name in (TOKENS, INDEX, MANIFEST, PROGRESS))
    return sum(file.is_file() for file in files) > 1


class TokenStore:
    """The documents of a store in `folder`.

    manifest: what it holds. token_bytes: bytes of tokens.bin that have been read so far.

    Raises ValueError for a store that is not finished, lacks a file, or whose files have the wrong size; `verify` reads
    them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = _read_manifest(folder)
        self.token_bytes = 0
        self._dtype = np.dtype(self.manifest.dtype)
        if absent := [name for name in self.manifest.sizes if not (folder / name).is_file()]:
            raise _incomplete(folder, " and no ".join(absent))
        self._files = {name: (folder / name).open("rb", buffering=0) for name in self.manifest.sizes}
        for name, size in self.manifest.sizes.items():
            if (actual := os.fstat(self._files[name].fileno()).st_size) != size:
                raise _damaged(folder / name, f"it has {actual} bytes instead of {size}")

    def read(self, begin: int, end: int) -> Ids:
        """Return the ids at positions begin to end - 1."""
        size = self._dtype.itemsize
        content = self._bytes(TOKENS, begin * size, end * size)
        self.token_bytes += len(content)
        return np.frombuffer(content, self._dtype).astype(np.int64)

    def read_mask(self, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """Return which of the tokens at positions begin to end - 1 are targets of the loss."""
        if not self.manifest.masked:
            return np.ones(end - begin, np.bool_)
        return np.frombuffer(self._bytes(MASK, begin, end), np.uint8) != 0

    def bounds(self, documents: Numbers) -> tuple[Numbers, Numbers]:
        """Return where documents begin and end, by their numbers, each int64 of their shape (n,)."""
        if len(documents) and documents[-1] - documents[0] == len(documents) - 1 and (np.diff(documents) == 1).all():
            edges = np.frombuffer(self._bytes(INDEX, 8 * int(documents[0]), 8 * int(documents[-1] + 2)), np.int64)
            return edges[:-1], edges[1:]
        pairs = b"".join(self._bytes(INDEX, 8 * number, 8 * number + 16) for number in documents.tolist())
        edges = np.frombuffer(pairs, np.int64).reshape(-1, 2)
        return edges[:, 0], edges[:, 1]

    def image_numbers(self, begin: int, end: int) -> range:
        """Return the numbers of the images that begin at positions begin to end - 1; reads only their index."""
        numbers = range(self.manifest.images or 0)
        return range(*(bisect_left(numbers, at, key=lambda n: self._image(n)[0]) for at in (begin, end)))

    def images(self, begin: int, end: int) -> list[tuple[int, StoredImage]]:
        """Return the images that begin at positions begin to end - 1, and where each does."""
        numbers = self.image_numbers(begin, end)
        places = [self._image(number) for number in numbers]
        stops = [stop for _, stop in places]
        starts = [self._image(numbers.start - 1)[1] if numbers.start else 0, *stops[:-1]]
        lines = (json.loads(self._bytes(IMAGES, *place)) for place in zip(starts, stops, strict=False))
        found = (StoredImage(**line | {"grid": tuple(line["grid"])}) for line in lines)
        return [(at, image) for (at, _), image in zip(places, found, strict=True)]

    def _image(self, number: int) -> tuple[int, int]:
        at, stop = np.frombuffer(self._bytes(IMAGE_INDEX, 16 * number, 16 * number + 16), np.int64).tolist()
        return at, stop

    def lengths(self) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield the numbers of all documents and their lengths, some at a time."""
        for first in range(0, self.manifest.documents, CHUNK):
            documents = np.arange(first, min(first + CHUNK, self.manifest.documents))
            begins, ends = self.bounds(documents)
            yield documents, ends - begins

    def first_id_from(self, least: int) -> tuple[int, int] | None:
        """Return the first id that is at least `least`, and the number of its document; None if there is none."""
        if self.manifest.largest < least:
            return None
        for begin in range(0, self.manifest.tokens, CHUNK):
            ids = self.read(begin, min(begin + CHUNK, self.manifest.tokens))
            if len(places := np.flatnonzero(ids >= least)):
                numbers, at = range(self.manifest.documents), begin + int(places[0])
                return int(ids[places[0]]), bisect_right(numbers, at, key=lambda n: self.bounds(np.array([n]))[1][0])
        return None

    def verify(self, files: Collection[str], progress: Callable[[int], None] = lambda done: None) -> None:
        """Read files of the store and compare their checksums, on several cores. `progress` gets the bytes read so far.
        Raises ValueError, naming the file and the bytes of it that are damaged."""
        done = 0
        blocks = [
            (name, begin, expected)
            for name, sums in self.manifest.checksums.items()
            if name in files
            for begin, expected in zip(range(0, len(sums) * SUM_BYTES, SUM_BYTES), sums, strict=True)
        ]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            checksums = pool.map(lambda block: checksum(self._files[block[0]], block[1]), blocks)
            for (name, begin, expected), actual in zip(blocks, checksums, strict=True):
                end = min(begin + SUM_BYTES, self.manifest.sizes[name])
                if actual != expected:
                    raise _damaged(self.folder / name, f"bytes {begin} to {end} do not have their checksum")
                done += end - begin
                progress(done)

    def _bytes(self, name: str, begin: int, end: int) -> bytes:
        content = os.pread(self._files[name].fileno(), end - begin, begin)
        while len(content) < end - begin:  # one call reads at most 2 GiB, and may read less
            more = os.pread(self._files[name].fileno(), end - begin - len(content), begin + len(content))
            if not more:
                raise _damaged(self.folder / name, f"it ends before byte {end}")
            content += more
        return content


def checksum(file: BinaryIO, begin: int) -> str:
    """Return the checksum of the SUM_BYTES bytes of a file from `begin` on, or as many as there are."""
    digest = hashlib.blake2b(digest_size=16)
    for at in range(begin, begin + SUM_BYTES, 2**20):
        digest.update(os.pread(file.fileno(), min(2**20, begin + SUM_BYTES - at), at))
    return digest.hexdigest()


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file() and (folder / PROGRESS).is_file():
        raise ValueError(f"token store {folder} is not finished: run the same `python -m usp tokenize` again")
    if not path.is_file():
        raise _incomplete(folder, MANIFEST)
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"{path} has format {content['format']}, not {FORMAT}: tokenize the data again")
        optional = {field.name: field.default for field in fields(Manifest) if field.default is not MISSING}
        manifest = Manifest(**{field.name: (optional | content)[field.name] for field in fields(Manifest)})
        sums = {name: len(manifest.checksums.get(name, ())) for name in manifest.sizes}
        wrong = [name for name, size in manifest.sizes.items() if sums[name] != -(-size // SUM_BYTES)]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"it is no manifest ({error})") from error
    if wrong:
        raise _damaged(path, f"it lacks checksums of {', '.join(wrong)}")
    if not manifest.tokens:
        raise ValueError(f"token store {folder} is empty: it holds no token")
    return manifest


def _incomplete(folder: Path, absent: str) -> ValueError:
    return ValueError(f"token store {folder} has no {absent}: copy all of its files, or tokenize the data again")


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged: {why}; remove the folder, and tokenize the data again")


@contextmanager
def show_progress(job: str, total: int) -> Iterator[Callable[..., None]]:
    """Say in a `with` block how much of more than LARGE bytes is done, and how long the rest takes. It gives a function
    of the bytes done so far, and a note to say with them."""
    first: tuple[int, float] | None = None  # what an earlier process has done, and when this one began

    with working(job, total > LARGE, LINE_SECONDS) as say:

        def update(done: int, note: str = "") -> None:
            nonlocal first
            done, now = min(done, total), time.monotonic()
            first = first or (done, now)
            rest = (total - done) * (now - first[1]) / max(1, done - first[0])
            left = f", {rest:.0f} s left" if done > first[0] else ""
            say(f"{job}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB{left}  {note}".rstrip())

        yield update
