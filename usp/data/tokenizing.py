"""Writing a token store: documents are read in one process, tokenized in many, and appended in their order.

    files -> pieces -> batches of about BATCH_CHARACTERS -> processes -> tokens.bin, index.bin

Whoever writes keeps a record of its place, STORE/progress.json: how much of the files is whole, and after which piece
of which input file. After a kill the files are cut to that, and writing goes on after that piece. The bytes are those
of a run that was not interrupted, because a piece's ids do not depend on the batch that it is in.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import queue
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .chat.conversation import Content, texts_in
from .documents import holds_chats, read_pieces
from .files import DataFile, DataFiles
from .progress import DataProgress
from .store import FORMAT, INDEX, MANIFEST, MASK, PROGRESS, SUM_BYTES, TOKENS, Manifest, checksum, write_json
from .tokenizer import Tokenizer, as_document, encode_all, fingerprint

BATCH_CHARACTERS = 2**20  # tokenized together; a tokenizer needs about 100 times as many bytes
SAVE_SECONDS = 2.0  # between two records of the place
LARGE = 2**26  # bytes of files that are worth starting processes

Piece = tuple[Content, bool, bool]  # text or a whole chat, whether it begins a document, and whether it ends one


@dataclass(frozen=True)
class Place:
    """What of the input is done: files before number `file`, and of that file `pieces` pieces of `characters`."""

    file: int = 0
    pieces: int = 0
    characters: int = 0
    begins: bool = True  # whether the next piece begins a document


@dataclass
class Written:
    """What is in the files of an unfinished store, and up to which place of the input.

    checksums: by file, of the parts of SUM_BYTES bytes that are whole.
    """

    place: Place = field(default_factory=Place)
    tokens: int = 0
    documents: int = 0
    characters: int = 0
    replaced: int = 0
    largest: int = 0
    checksums: dict[str, list[str]] = field(default_factory=lambda: {TOKENS: [], INDEX: []})


@dataclass(frozen=True)
class Encoded:
    """A batch of pieces as ids; `ends`: after which of them a document ends; `mask`: targets, None for all."""

    ids: npt.NDArray[np.unsignedinteger]
    mask: npt.NDArray[np.bool_] | None
    ends: npt.NDArray[np.int64]
    characters: int
    replaced: int


class UnfitFolder(ValueError):
    """The folder of a store holds something else."""


def source_of(files: DataFiles, field: str, tokenizer: Tokenizer) -> str:
    """Return a hash of what a store is made of: the names, sizes and times of the files, the field, the tokenizer.

    Raises:
        ValueError: for files of records whose first row is of no kind.
    """
    states = [(str(file.path.resolve()), file.format, *_state(file.path)) for file in files.files]
    content = json.dumps([FORMAT, states, field, fingerprint(tokenizer, holds_chats(files.files, field))])
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def write_store(files: DataFiles, field: str, tokenizer: Tokenizer, folder: Path, processes: int = 0) -> bool:
    """Write the token store of `files` to `folder`, or what is missing of it; return whether anything was missing.

    Args:
        field: key or column of the text in `files`.
        processes: that tokenize. 0: one per core for more than LARGE bytes, and otherwise none but this one.

    Raises:
        UnfitFolder: if `folder` holds other files, or the store of something else.
        ValueError: for data that cannot be read, holds no text, or changes while it is read.
        OSError: if the folder cannot be written.
    """
    source = source_of(files, field, tokenizer)
    masked = holds_chats(files.files, field)
    written = _found(folder, source)
    if written is None:
        return False
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    if not _is_there(folder, written, dtype, masked):
        written = Written()
    total = sum(file.path.stat().st_size for file in files.files)
    if not processes and total > LARGE and not multiprocessing.current_process().daemon:
        processes = len(os.sched_getaffinity(0))
    before = np.cumsum([0, *(file.path.stat().st_size for file in files.files)])
    with _removed_if_unfit(folder), ExitStack() as stack:
        out = stack.enter_context(_Output(folder, written, dtype, source, masked))
        show = stack.enter_context(DataProgress("tokenizing", total)) if total > LARGE else None
        encoder = stack.enter_context(_encoders(tokenizer.encoder(masked), dtype, processes))
        for encoded, place in _in_order(_batches(files.files, field, written.place), encoder, 2 * max(1, processes)):
            out.append(encoded, place)
            if show is not None:
                in_file = min(place.characters, int(before[min(place.file + 1, len(files.files))] - before[place.file]))
                show.update(int(before[place.file]) + in_file, f"{written.tokens / 1e6:,.1f}M tokens")
        if not written.tokens:
            raise ValueError("the data holds no text: every document in it is empty")
        out.finish(tokenizer, len(files.files))
    return True


@contextmanager
def _removed_if_unfit(folder: Path) -> Iterator[None]:
    """Remove what the block has written if the data is refused: it is of no use once the data has changed."""
    try:
        yield
    except ValueError:
        for name in (TOKENS, INDEX, MASK, PROGRESS):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()
        raise


def _found(folder: Path, source: str) -> Written | None:
    """Return what is written of the store of `source`, None if it is finished; create the folder if there is none."""
    other = f"{folder} is a token store of other data, or of another tokenizer: choose another folder, or remove it"
    for name in (MANIFEST, PROGRESS):
        if (folder / name).is_file():
            record = json.loads((folder / name).read_text())
            if record.pop("source", "") != source:
                raise UnfitFolder(other)
            return None if name == MANIFEST else Written(**record | {"place": Place(**record["place"])})
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UnfitFolder(f"{folder} is not empty, and no token store: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PROGRESS, _record(Written(), source))
    return Written()


def _is_there(folder: Path, written: Written, dtype: np.dtype, masked: bool) -> bool:
    """Return whether the files hold what the record says: a machine that fails may lose what it has written."""
    sizes = _sizes(written, dtype, masked)
    return all((folder / name).is_file() and (folder / name).stat().st_size >= sizes[name] for name in sizes)


def _sizes(written: Written, dtype: np.dtype, masked: bool) -> dict[str, int]:
    sizes = {TOKENS: written.tokens * dtype.itemsize, INDEX: 8 * (written.documents + 1)}
    return sizes | {MASK: written.tokens} if masked else sizes


def _record(written: Written, source: str) -> dict[str, object]:
    return {"source": source, **asdict(written)}


class _Output:
    """The files of a store, to which batches are appended; `written` is kept up to date."""

    def __init__(self, folder: Path, written: Written, dtype: npt.DTypeLike, source: str, masked: bool) -> None:
        self._folder, self._written, self._dtype, self._source = folder, written, np.dtype(dtype), source
        self._saved = time.monotonic()
        sizes = _sizes(written, self._dtype, masked)
        self._begins = {name: len(written.checksums.setdefault(name, [])) * SUM_BYTES for name in sizes}
        self._files = {name: (folder / name).open("a+b") for name in sizes}
        if written.place == Place():
            self._files[INDEX].truncate(0)
            self._files[INDEX].write(np.int64(0).tobytes())
            self._files[INDEX].flush()
        for name, size in sizes.items():
            self._files[name].truncate(size)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not (self._folder / MANIFEST).exists():
            with suppress(OSError):  # of a full disk, which may be what ended the block
                self._save()
        for file in self._files.values():
            file.close()

    def append(self, encoded: Encoded, place: Place) -> None:
        written = self._written
        self._files[TOKENS].write(encoded.ids.tobytes())
        self._files[INDEX].write((encoded.ends + written.tokens).tobytes())
        if MASK in self._files:
            mask = np.ones(len(encoded.ids), np.bool_) if encoded.mask is None else encoded.mask
            self._files[MASK].write(mask.tobytes())
        written.tokens += len(encoded.ids)
        written.documents += len(encoded.ends)
        written.characters += encoded.characters
        written.replaced += encoded.replaced
        written.largest = max(written.largest, int(encoded.ids.max(initial=0)))
        written.place = place
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._save()

    def finish(self, tokenizer: Tokenizer, files: int) -> None:
        """Write the manifest, and remove the record of the place."""
        self._flush()
        self._sum(whole=False)
        written = self._written
        Manifest(
            format=FORMAT,
            tokenizer=tokenizer.name,
            fingerprint=fingerprint(tokenizer, MASK in self._files),
            largest=written.largest,
            files=files,
            documents=written.documents,
            characters=written.characters,
            replaced=written.replaced,
            tokens=written.tokens,
            dtype=str(self._dtype),
            masked=MASK in self._files,
            source=self._source,
            checksums=written.checksums,
        ).write(self._folder)
        (self._folder / PROGRESS).unlink()

    def _save(self) -> None:
        self._flush()
        self._sum(whole=True)
        write_json(self._folder / PROGRESS, _record(self._written, self._source))
        self._saved = time.monotonic()

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _sum(self, whole: bool) -> None:
        """Add the checksums of the parts that are whole, or of all that remain."""
        for name, file in self._files.items():
            size = os.fstat(file.fileno()).st_size
            while self._begins[name] + (SUM_BYTES if whole else 1) <= size:
                self._written.checksums[name].append(checksum(file, self._begins[name]))
                self._begins[name] += SUM_BYTES


# Reading


def _batches(files: Sequence[DataFile], field: str, place: Place) -> Iterator[tuple[list[Piece], Place]]:
    """Yield the pieces after `place` in batches, each with the place after it."""
    batch: list[Piece] = []
    size = 0
    for number in range(place.file, len(files)):
        place = place if number == place.file else Place(number)
        for piece in _pieces(files[number], field, place):
            batch.append(piece)
            characters = sum(map(len, texts_in(piece[0])))
            size += characters
            place = Place(number, place.pieces + 1, place.characters + characters, piece[2])
            if size >= BATCH_CHARACTERS:
                yield batch, place
                batch, size = [], 0
    if batch:
        yield batch, place


def _pieces(file: DataFile, field: str, place: Place) -> Iterator[Piece]:
    """Yield the pieces of a file after `place`."""
    before, begins = _state(file.path), place.begins
    for text, finishes in islice(read_pieces(file, field), place.pieces, None):
        yield text, begins, finishes
        begins = finishes
    if _state(file.path) != before:
        raise ValueError(f"{file.path} changed while it was read: start again when nothing writes to it")


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


# Tokenizing


def _encode(tokenizer: Tokenizer, dtype: np.dtype, batch: Sequence[Piece]) -> Encoded:
    ids, masks, ends, tokens = [], list[npt.NDArray[np.bool_]](), [], 0
    encoded = encode_all(tokenizer, [content for content, _, _ in batch])
    for (found, mask), (_, begins, finishes) in zip(encoded, batch, strict=True):
        whole = as_document(tokenizer, found, begin=begins, end=finishes) if mask is None else found
        ids.append(whole.astype(dtype))
        masks.append(np.ones(len(whole), np.bool_) if mask is None else mask)
        tokens += len(whole)
        if finishes:
            ends.append(tokens)
    texts = [text for content, _, _ in batch for text in texts_in(content)]
    characters, replaced = sum(map(len, texts)), sum(text.count("\ufffd") for text in texts)
    some = any(mask is not None for _, mask in encoded)
    return Encoded(
        np.concatenate(ids), np.concatenate(masks) if some else None, np.array(ends, np.int64), characters, replaced
    )


class _Encoders:
    """Encodes batches in other processes, or in this one if there are none.

    Each thread of a pool waits for the answer of one process at a time, so that no two block each other with full
    pipes, and a process that dies is seen by the thread that waits for it.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype, connections: Sequence[Connection]) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for connection in connections:
            self._idle.put(connection)
        self.threads = ThreadPoolExecutor(max(1, len(connections)), "tokenizing")
        self._alone = not connections

    def submit(self, batch: Sequence[Piece]) -> Future[Encoded]:
        return self.threads.submit(self._encode, batch)

    def _encode(self, batch: Sequence[Piece]) -> Encoded:
        if self._alone:
            return _encode(self._tokenizer, self._dtype, batch)
        connection = self._idle.get()
        try:
            connection.send(batch)
            answer = connection.recv()
        except (EOFError, OSError) as error:
            raise OSError("a process that tokenizes has died, of too little memory perhaps: start again") from error
        self._idle.put(connection)
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def _encoders(tokenizer: Tokenizer, dtype: np.dtype, processes: int) -> Iterator[_Encoders]:
    context = multiprocessing.get_context("forkserver")  # imports once, and has no threads when it forks
    context.set_forkserver_preload([__name__])
    connections, running = [], []
    for _ in range(processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, tokenizer, dtype), daemon=True)
        process.start()
        theirs.close()  # so that its end is seen when the process dies
        connections.append(ours)
        running.append(process)
    encoders = _Encoders(tokenizer, dtype, connections)
    try:
        yield encoders
    finally:
        encoders.threads.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
            process.join()
        for connection in connections:
            connection.close()


def _work(connection: Connection, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """Encode batches until the process that sends them has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to this process too
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            batch = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            connection.send(_encode(tokenizer, dtype, batch))
        except Exception as error:
            connection.send(error)


def _in_order(
    batches: Iterator[tuple[list[Piece], Place]], encoders: _Encoders, ahead: int
) -> Iterator[tuple[Encoded, Place]]:
    """Yield the encoded batches in their order, while the next ones are read and encoded."""
    waiting: deque[tuple[Future[Encoded], Place]] = deque()
    for batch, place in batches:
        waiting.append((encoders.submit(batch), place))
        if len(waiting) > ahead:
            encoded, done = waiting.popleft()
            yield encoded.result(), done
    for encoded, done in [(one, at) for one, at in waiting]:
        yield encoded.result(), done
