"""Token stores: all documents of a data set, tokenized once into a cache and read by position.

    CACHE/KEY/tokens.bin       the ids of one document after another, in the smallest unsigned type
    CACHE/KEY/ends.bin         int64, the position in tokens.bin after each document
    CACHE/KEY/manifest.json    see `Manifest`

KEY is derived from the names, sizes and times of the files, the field and the tokenizer: data that changes gets another
store, and a run reads what it began with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from .documents import read_pieces
from .files import DataFile, DataFiles
from .tokenizer import Ids, Tokenizer, as_document

FORMAT = 1
BATCH_CHARACTERS = 2**20  # tokenized together; a tokenizer needs about 100 times as many bytes
LARGE = 2**26  # bytes of files that take more than a moment
TOKENS, ENDS, MANIFEST = "tokens.bin", "ends.bin", "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a store holds.

    Attributes:
        characters: of text. replaced: of them, U+FFFD, which stands for bytes that are not UTF-8.
        dtype: of tokens.bin.
        digest: of all tokens and ends.
    """

    files: int
    documents: int
    characters: int
    replaced: int
    tokens: int
    dtype: str
    digest: str


class TokenStore:
    """The documents of a store.

    manifest: what it holds. ends: int64 (documents,), the position after each document, mapped from its file.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = Manifest(**json.loads((folder / MANIFEST).read_text()))
        self._dtype = np.dtype(self.manifest.dtype)
        sizes = [(folder / name).stat().st_size for name in (TOKENS, ENDS)]
        if sizes != [self.manifest.tokens * self._dtype.itemsize, self.manifest.documents * 8]:
            raise ValueError(f"token store {folder} is damaged: remove it, it is written again")
        self.ends: npt.NDArray[np.int64] = np.memmap(folder / ENDS, np.int64, "r")
        # Not mapped: what has been read of a mapped file counts as memory of the process, which would grow with steps.
        self._tokens = (folder / TOKENS).open("rb", buffering=0)

    def lengths(self, documents: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the tokens of documents, by their numbers."""
        before = self.ends[documents.astype(np.int64) - 1]
        return self.ends[documents] - np.where(documents > 0, before, 0)

    def read(self, begin: int, end: int) -> Ids:
        """Return the ids at positions begin to end - 1."""
        size = self._dtype.itemsize
        content = os.pread(self._tokens.fileno(), (end - begin) * size, begin * size)
        return np.frombuffer(content, self._dtype).astype(np.int64)


def open_store(
    files: DataFiles, field: str, tokenizer: Tokenizer, cache: Path, say: Callable[[str], None] = lambda line: None
) -> TokenStore:
    """Open the token store of `files` in `cache`, and write it first if there is none.

    One process writes; others that want the same store wait for it.

    Args:
        field: key or column of the text in `files`.
        cache: directory of stores; created.
        say: gets a line before more than LARGE bytes are tokenized.

    Raises:
        ValueError: for data that cannot be read, holds no text, or changes while it is read.
        OSError: if the cache cannot be written.
    """
    folder = cache / _key(files, field, tokenizer)
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _write_store(files, field, tokenizer, folder, say)
    return TokenStore(folder)


def _key(files: DataFiles, field: str, tokenizer: Tokenizer) -> str:
    states = [(str(file.path.resolve()), file.format, *_state(file.path)) for file in files.files]
    content = json.dumps([FORMAT, states, field, tokenizer.fingerprint])
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _write_store(files: DataFiles, field: str, tokenizer: Tokenizer, folder: Path, say: Callable[[str], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    if sum(file.path.stat().st_size for file in files.files) > LARGE:
        say(f"tokenizing {len(files.files)} files below {files.root} into {folder}")
    try:
        manifest = _tokenize(files, field, tokenizer, partial)
        (partial / MANIFEST).write_text(json.dumps(asdict(manifest)))
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _tokenize(files: DataFiles, field: str, tokenizer: Tokenizer, folder: Path) -> Manifest:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    digest = hashlib.blake2b(digest_size=16)
    tokens = documents = characters = replaced = 0
    with (folder / TOKENS).open("wb") as file, (folder / ENDS).open("wb") as ends:
        for batch in _batches(_all_pieces(files.files, field)):
            encoded = tokenizer.encode_all([text for text, _, _ in batch])
            for (text, begins, finishes), ids in zip(batch, encoded, strict=True):
                ids = as_document(tokenizer, ids, begin=begins, end=finishes)
                tokens += len(ids)
                characters += len(text)
                replaced += text.count("\ufffd")
                content = ids.astype(dtype).tobytes()
                file.write(content)
                digest.update(content)
                if finishes:
                    ends.write(np.int64(tokens).tobytes())
                    documents += 1
    if not tokens:
        raise ValueError("the data holds no text: every document in it is empty")
    with (folder / ENDS).open("rb") as ends:
        while content := ends.read(2**20):
            digest.update(content)
    return Manifest(len(files.files), documents, characters, replaced, tokens, str(dtype), digest.hexdigest())


def _all_pieces(files: Iterable[DataFile], field: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield the pieces of all documents: text, whether a document begins with it, and whether it ends with it."""
    begins = True
    for file in files:
        before = _state(file.path)
        for text, finishes in read_pieces(file, field):
            yield text, begins, finishes
            begins = finishes
        if _state(file.path) != before:
            raise ValueError(f"{file.path} changed while it was read: start again when nothing writes to it")


def _batches(pieces: Iterator[tuple[str, bool, bool]]) -> Iterator[list[tuple[str, bool, bool]]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
