"""Write a token store: documents are read in one process, tokenized in many, and appended in their order.

    files -> pieces -> batches of about BATCH_CHARACTERS -> processes -> tokens.bin, index.bin

The writer keeps a record of its place, STORE/progress.json: how much of the store's files is complete, and after which
piece of which input file. After a kill the files are cut to that, and writing continues after that piece. The bytes are
those of a run that was not interrupted, because a piece's ids do not depend on the batch that it is in.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import store
from .chats import Chat, Content, NoText, StoredImage, texts_in
from .documents import DROP, REFUSE, holds_chats, read_pieces
from .sources import TEXT_FIELD, DataFile, DataFiles, naming
from .tokenizer import CONTEXT, Tokenizer, as_document, encode_masked, fingerprint, unended

BATCH_CHARACTERS = 2**20  # tokenized together; a tokenizer needs about 100 times as many bytes
IMAGE_CHARACTERS = 2**16  # that take as long as an image
LARGE_OF_IMAGES = 2**18  # bytes of files that name images, which are worth starting processes
CHAT_FORMAT = 5  # of how chats and completions are read and encoded
SAVE_SECONDS = 2.0  # between two records of the place

_here = threading.local()  # tokenizer and dtype of the thread or process that encodes


@dataclass(frozen=True)
class TextPiece:
    """A part of a document, or a whole one. content: text, a whole chat, or why a row is left out. begins, ends:
    whether it begins or ends its document. before, after: up to CONTEXT characters of the document around it."""

    content: Content | ValueError
    begins: bool
    ends: bool
    before: str
    after: str


@dataclass(frozen=True)
class Place:
    """How much of the input is done: the files before number `file`, and `pieces` pieces of that file."""

    file: int = 0
    pieces: int = 0
    characters: int = 0  # of these pieces


@dataclass
class StoreProgress:
    """What the files of an unfinished store hold, up to a place of the input. checksums: by file, of every SUM_BYTES
    bytes that are complete."""

    place: Place = field(default_factory=Place)
    tokens: int = 0
    documents: int = 0
    characters: int = 0
    replaced: int = 0
    dropped: int = 0
    why_dropped: str = ""
    largest: int = 0
    unended: int = 0
    images: int = 0
    image_bytes: int = 0
    checksums: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """A batch of pieces as ids. ends: numbers of ids after which a document ends. mask: targets; None for all. dropped:
    why each of the rows that are left out is. unended: number of answers without an end. images: and the number of ids
    before each."""

    ids: npt.NDArray[np.unsignedinteger]
    mask: npt.NDArray[np.bool_] | None
    ends: npt.NDArray[np.int64]
    characters: int
    replaced: int
    dropped: tuple[str, ...]
    unended: int = 0
    images: tuple[tuple[int, StoredImage], ...] = ()


def source_of(files: DataFiles, field: str, tokenizer: Tokenizer, bad_rows: str = REFUSE) -> str:
    """Return a hash of what a store is made from: the names, sizes and times of the files, the field, the tokenizer.
    Raises ValueError for files of records whose first row is of no kind."""
    states = [(str(file.path.resolve()), file.format, *_state(file.path)) for file in files.files]
    masked = holds_chats(files.files, field, bad_rows)
    parts = [store.FORMAT, states, field or TEXT_FIELD, fingerprint(tokenizer, masked)]
    content = json.dumps([*parts, *([CHAT_FORMAT] if masked else []), *([bad_rows] if bad_rows != REFUSE else [])])
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def write_store(
    files: DataFiles, field: str, tokenizer: Tokenizer, folder: Path, processes: int = 0, bad_rows: str = REFUSE
) -> bool:
    """Write the token store of `files` to `folder`, or the rest of it; return whether anything was missing.

    field: key or column of the text in `files`. bad_rows: with "drop", rows that cannot be read or encoded are left
        out and counted, as rows without text always are.
    processes: that tokenize. 0: one per core for more than LARGE bytes, and otherwise only this one.

    Raises ValueError if `folder` holds something else, and for data that cannot be read, holds no text, or changes
    while it is read; OSError if `folder` cannot be written.
    """
    source, masked = source_of(files, field, tokenizer, bad_rows), holds_chats(files.files, field, bad_rows)
    written = _continued(folder, source)
    if written is None:
        return False
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    sees = masked and tokenizer.chats is not None and tokenizer.chats.images is not None
    recorded = _sizes(written, dtype, masked, sees).items()
    if any(not (folder / name).is_file() or (folder / name).stat().st_size < size for name, size in recorded):
        written = StoreProgress()  # a machine that fails may lose what it has written
    sizes = [file.path.stat().st_size for file in files.files]
    before = np.cumsum([0, *sizes]).tolist()  # bytes of the files before each
    if (
        not processes
        and before[-1] > (LARGE_OF_IMAGES if sees else store.LARGE)
        and not multiprocessing.current_process().daemon
    ):
        processes = len(os.sched_getaffinity(0))
    try:
        with ExitStack() as stack:
            stack.enter_context(naming(folder))
            out = stack.enter_context(_Output(folder, written, dtype, source, masked, sees))
            show = stack.enter_context(store.show_progress("tokenizing", before[-1]))
            executor = _executor(tokenizer.encoder(masked), dtype, bad_rows, processes)
            stack.callback(executor.shutdown, cancel_futures=True)
            batches = _batches(files.files, field, bad_rows, written.place)
            for encoded, place in _in_order(batches, executor, 2 * max(1, processes)):
                out.append(encoded, place)
                done = before[place.file] + min(place.characters, sizes[place.file])
                show(done, f"{written.tokens / 1e6:,.1f}M tokens")
            if not written.tokens and written.dropped:
                raise ValueError(f"the data holds no text in any good row; the first: {written.why_dropped}")
            if not written.tokens:
                raise ValueError("the data holds no text: every document in it is empty")
            out.finish(tokenizer, len(files.files))
    except ValueError:  # the data is refused: what is written is useless once it has changed
        for name in (store.TOKENS, store.INDEX, store.MASK, store.IMAGES, store.IMAGE_INDEX, store.PROGRESS):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()
        raise
    return True


def _continued(folder: Path, source: str) -> StoreProgress | None:
    """Return the record of the store of `source` in `folder`, None if it is finished; create the folder if needed."""
    for name in (store.MANIFEST, store.PROGRESS):
        if (folder / name).is_file():
            try:
                record = dict(json.loads((folder / name).read_text()))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{folder / name} is damaged ({error}): remove {folder}") from error
            if record.pop("source", "") != source:
                raise ValueError(
                    f"{folder} is a token store of other data, or of another tokenizer: choose another folder, or "
                    f"remove it"
                )
            if name == store.MANIFEST:
                return None
            record["place"] = Place(**{key: record["place"][key] for key in vars(Place())})
            return StoreProgress(**record)
    begun = Path(store.PROGRESS).with_suffix(".new").name  # where there was no room for it
    if folder.exists() and (not folder.is_dir() or any(path.name != begun for path in folder.iterdir())):
        raise ValueError(f"{folder} is not empty, and no token store: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    store.write_json(folder / store.PROGRESS, {"source": source, **asdict(StoreProgress())})
    return StoreProgress()


def _sizes(written: StoreProgress, dtype: npt.DTypeLike, masked: bool, sees: bool) -> dict[str, int]:
    """Return the bytes of every file of an unfinished store. sees: whether it has files of images."""
    sizes = store.file_sizes(written.tokens, written.documents, dtype, masked)
    return sizes | store.image_sizes(written.images, written.image_bytes) if sees else sizes


class _Output:
    """The files of a store, to which batches are appended; `written` is kept up to date."""

    def __init__(
        self, folder: Path, written: StoreProgress, dtype: npt.DTypeLike, source: str, masked: bool, sees: bool
    ) -> None:
        self._folder, self._written, self._dtype, self._source = folder, written, np.dtype(dtype), source
        self._saved = time.monotonic()
        sizes = _sizes(written, dtype, masked, sees)
        self._files = {name: (folder / name).open("a+b") for name in sizes}
        for name, size in sizes.items():
            if written.place == Place():
                self._files[name].truncate(0)
            self._files[name].truncate(size)  # a new index is 8 bytes of zeros: the first document begins at 0

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not (self._folder / store.MANIFEST).exists():
            with suppress(OSError):  # of a full disk, which may be what ended the block
                self._save()
        for file in self._files.values():  # all of them: what one holds back would be written behind what follows
            with suppress(OSError):
                file.close()

    def append(self, encoded: Encoded, place: Place) -> None:
        written = self._written
        self._files[store.TOKENS].write(encoded.ids.tobytes())
        self._files[store.INDEX].write((encoded.ends + written.tokens).tobytes())
        if store.MASK in self._files:
            mask = np.ones(len(encoded.ids), np.bool_) if encoded.mask is None else encoded.mask
            self._files[store.MASK].write(mask.tobytes())
        for at, image in encoded.images:
            line = json.dumps(asdict(image)).encode() + b"\n"
            self._files[store.IMAGES].write(line)
            written.image_bytes += len(line)
            self._files[store.IMAGE_INDEX].write(np.array([written.tokens + at, written.image_bytes]).tobytes())
        written.unended += encoded.unended
        written.images += len(encoded.images)
        written.tokens += len(encoded.ids)
        written.documents += len(encoded.ends)
        written.characters += encoded.characters
        written.replaced += encoded.replaced
        written.dropped += len(encoded.dropped)
        written.why_dropped = next(iter((*filter(None, [written.why_dropped]), *encoded.dropped)), "")
        written.largest = max(written.largest, int(encoded.ids.max(initial=0)))
        written.place = place
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._save()

    def finish(self, tokenizer: Tokenizer, files: int) -> None:
        """Write the manifest, and remove the record of the place."""
        self._flush(complete=False)
        held = {name: value for name, value in vars(self._written).items() if name != "place"}
        held["images"] = held["images"] if store.IMAGES in self._files else None
        manifest = store.Manifest(
            format=store.FORMAT,
            tokenizer=tokenizer.name,
            fingerprint=fingerprint(tokenizer, store.MASK in self._files),
            files=files,
            dtype=str(self._dtype),
            masked=store.MASK in self._files,
            source=self._source,
            **held,
        )
        store.write_json(self._folder / store.MANIFEST, asdict(manifest))
        (self._folder / store.PROGRESS).unlink()

    def _save(self) -> None:
        self._flush(complete=True)
        store.write_json(self._folder / store.PROGRESS, {"source": self._source, **asdict(self._written)})
        self._saved = time.monotonic()

    def _flush(self, complete: bool) -> None:
        """Write the files to the disk, and add missing checksums, with `complete` only of whole blocks of SUM_BYTES."""
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sums = self._written.checksums.setdefault(name, [])
            size = os.fstat(file.fileno()).st_size
            end = size - size % store.SUM_BYTES if complete else size
            sums += [store.checksum(file, begin) for begin in range(len(sums) * store.SUM_BYTES, end, store.SUM_BYTES)]


def _batches(
    files: Sequence[DataFile], field: str, bad_rows: str, place: Place
) -> Iterator[tuple[list[TextPiece], Place]]:
    """Yield the pieces after `place` in batches, each with the place after it."""
    batch: list[TextPiece] = []
    size = 0
    for number in range(place.file, len(files)):
        place = place if number == place.file else Place(number)
        for piece in _pieces(files[number], field, place, bad_rows):
            batch.append(piece)
            characters = sum(map(len, texts_in(piece.content)))
            size += characters + IMAGE_CHARACTERS * len(getattr(piece.content, "images", ()))
            place = Place(number, place.pieces + 1, place.characters + characters)
            if size >= BATCH_CHARACTERS:
                yield batch, place
                batch, size = [], 0
    if batch:
        yield batch, place


def _pieces(file: DataFile, field: str, place: Place, bad_rows: str = REFUSE) -> Iterator[TextPiece]:
    state, before, begins = _state(file.path), "", True
    pairs = pairwise(chain(read_pieces(file, field, bad_rows), [("", True)]))
    for number, ((content, ends), (following, _)) in enumerate(pairs):
        after = "" if ends else str(following)[:CONTEXT]
        if number >= place.pieces:
            yield TextPiece(content, begins, ends, before, after)
        before, begins = "" if ends else str(content)[-CONTEXT:], ends
    if _state(file.path) != state:
        raise ValueError(f"{file.path} changed while it was read: start again when nothing writes to it")


def _state(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _executor(tokenizer: Tokenizer, dtype: np.dtype, bad_rows: str, processes: int) -> Executor:
    """Return what runs `_encode` in so many processes, or for 0 in a thread of this one."""
    shared = tokenizer, dtype, bad_rows
    if not processes:
        return ThreadPoolExecutor(1, "tokenizing", _begin, shared)
    context = multiprocessing.get_context("forkserver")  # imports once, and has no threads when it forks
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(processes, context, _begin_process, shared)


def _begin(tokenizer: Tokenizer, dtype: np.dtype, bad_rows: str) -> None:
    _here.tokenizer, _here.dtype, _here.bad_rows = tokenizer, dtype, bad_rows


def _begin_process(tokenizer: Tokenizer, dtype: np.dtype, bad_rows: str) -> None:
    """Prepare a process to encode batches until its parent ends, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to this process too
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _begin(tokenizer, dtype, bad_rows)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # type: ignore[func-returns-value]


def _encode(batch: Sequence[TextPiece]) -> Encoded:
    tokenizer: Tokenizer = _here.tokenizer
    parts = [(piece.before, piece.content, piece.after) for piece in batch if isinstance(piece.content, str)]
    ids_of_texts = iter(tokenizer.encode_parts(parts))
    ids, masks, ends, dropped = [np.zeros(0, _here.dtype)], [np.zeros(0, np.bool_)], list[int](), list[str]()
    placed = list[tuple[int, StoredImage]]()
    length, endless, read = 0, 0, list[str]()
    for piece in batch:
        content = piece.content
        try:
            if isinstance(content, ValueError):
                raise content
            if isinstance(content, str):
                document = as_document(tokenizer, next(ids_of_texts), begin=piece.begins, end=piece.ends)
                mask, images = np.ones(len(document), np.bool_), list[StoredImage]()
            else:
                document, mask, images = encode_masked(tokenizer, content)
                endless += unended(tokenizer, document, mask) if isinstance(content, Chat) else 0
        except ValueError as error:
            if _here.bad_rows != DROP and not isinstance(error, NoText):
                raise
            dropped.append(str(error))
            continue
        ids.append(document.astype(_here.dtype))
        masks.append(mask)
        if images:
            tokens = np.flatnonzero(document == tokenizer.chats.images.token_id)
            firsts = np.cumsum([0, *(image.tokens for image in images)])[:-1]
            placed += zip((length + tokens[firsts]).tolist(), images, strict=True)
        length += len(document)
        ends += [length] if piece.ends else []
        read += texts_in(content)
    return Encoded(
        ids=np.concatenate(ids),  # pyright: ignore[reportArgumentType]
        mask=np.concatenate(masks) if len(parts) < len(batch) else None,
        ends=np.array(ends, np.int64),
        characters=sum(map(len, read)),
        replaced=sum(text.count("\ufffd") for text in read),
        dropped=tuple(dropped),
        unended=endless,
        images=tuple(placed),
    )


def _in_order(
    batches: Iterator[tuple[list[TextPiece], Place]], executor: Executor, ahead: int
) -> Iterator[tuple[Encoded, Place]]:
    """Yield the encoded batches in their order, while the next ones are read and encoded."""
    waiting: deque[tuple[Future[Encoded], Place]] = deque()
    try:
        for batch, place in batches:
            waiting.append((executor.submit(_encode, batch), place))
            if len(waiting) > ahead:
                encoded, done = waiting.popleft()
                yield encoded.result(), done
        for encoded, done in waiting:
            yield encoded.result(), done
    except BrokenExecutor as error:
        raise OSError("a process that tokenizes has died, of too little memory perhaps: start again") from error
