"""Finding the token store of a data set: one that the user names, or one in a cache, written there the first time.

    CACHE/KEY/              a store; KEY is `source_of` the data
    CACHE/KEY.partial/      an unfinished one, which the next process continues
    CACHE/KEY.failed        why the last process could not write it
    CACHE/KEY.sound         empty: a store somewhere, whose names, sizes and times give KEY, agrees with its checksums

On each host one process writes or verifies, and the others wait for it. They wait for a file, before any of them
communicates, so that no collective runs out of time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from .files import TEXT_FIELD, DataFiles, find_files
from .progress import DataProgress
from .store import MANIFEST, TokenStore, is_store
from .tokenizer import Tokenizer, fingerprint
from .tokenizing import LARGE, source_of, write_store

Say = Callable[[str], None]


@dataclass(frozen=True)
class StoreFolder:
    """A token store that the user names."""

    folder: Path


def find_data(data: str, field: str = TEXT_FIELD, name: str = "data") -> DataFiles | StoreFolder:
    """Return the token store, or the files of documents, that `data` names; see `find_files`.

    Raises:
        ValueError: as `find_files` does, and if `field` is set for a store.
    """
    folder = Path(data).expanduser()
    if not is_store(folder):
        return find_files(data, field, name)
    if field not in ("", TEXT_FIELD):
        raise ValueError(
            f"data_field={field!r} is for JSON, CSV, Parquet and Arrow files, not for a token store: unset it"
        )
    return StoreFolder(folder)


def open_data(
    found: DataFiles | StoreFolder, field: str, tokenizer: Tokenizer, cache: Path, say: Say = lambda line: None
) -> TokenStore:
    """Open a token store, or that of files in `cache`, which is written if there is none; see `cached_store`.

    Raises:
        ValueError: as `cached_store` and `sound_store` do, and for a store of another tokenizer.
        OSError: if the cache cannot be written.
    """
    if isinstance(found, DataFiles):
        return cached_store(found, field, tokenizer, cache, say)
    store = sound_store(found.folder, cache, say)
    given = fingerprint(tokenizer, store.manifest.masked)
    if store.manifest.fingerprint != given:
        raise ValueError(
            f"token store {found.folder} was tokenized with {store.manifest.tokenizer} ({store.manifest.fingerprint}), "
            f"and tokenizer={tokenizer.name} is another one ({given}): use the same tokenizer, chat_template, bos and "
            f"parse_special_tokens, or tokenize the data again"
        )
    return store


def check_ids(store: TokenStore, vocabulary: int) -> None:
    """Raise ValueError, naming a document of the store, if it holds an id that a vocabulary of this size lacks."""
    if found := store.first_id_from(vocabulary):
        raise ValueError(
            f"{store.folder}: document {found[1]} holds id {found[0]}, and the model has a vocabulary of {vocabulary}: "
            f"tokenize the data with the model's own tokenizer, or use a model with a larger vocabulary"
        )


def cached_store(
    files: DataFiles, field: str, tokenizer: Tokenizer, cache: Path, say: Say = lambda line: None
) -> TokenStore:
    """Open the token store of `files` in `cache`, and write it first if there is none.

    Args:
        field: key or column of the text in `files`.
        cache: directory of stores; created.
        say: gets a line before more than LARGE bytes are tokenized.

    Raises:
        ValueError: for data that cannot be read, holds no text, or changes while it is read.
        OSError: if the cache cannot be written.
    """
    folder = cache / source_of(files, field, tokenizer)
    if not folder.is_dir():
        with _one_at_a_time(folder):
            if not folder.is_dir():
                partial = folder.with_name(f"{folder.name}.partial")
                if sum(file.path.stat().st_size for file in files.files) > LARGE:
                    again = "the rest of " if partial.is_dir() else ""
                    say(f"tokenizing {again}{len(files.files)} files below {files.root} into {folder}")
                write_store(files, field, tokenizer, partial)
                partial.rename(folder)
                _note(cache, TokenStore(folder)).touch()
    return sound_store(folder, cache, say)


def sound_store(folder: Path, cache: Path, say: Say = lambda line: None) -> TokenStore:
    """Open the token store in `folder`, and compare it with its checksums if that was not done on this host before.

    Args:
        cache: directory in which it is noted that a store is sound; created.
        say: gets a line before more than LARGE bytes are read.

    Raises:
        ValueError: for a store that is not finished, or damaged.
    """
    store = TokenStore(folder)
    note = _note(cache, store)
    if not note.exists():
        with _one_at_a_time(note.with_suffix("")):
            if not note.exists():
                size = sum(store.manifest.sizes.values())
                if size > LARGE:
                    say(f"comparing token store {folder} with its checksums")
                    with DataProgress("verifying", size) as show:
                        store.verify(show.update)
                else:
                    store.verify()
                note.touch()
    return store


def _note(cache: Path, store: TokenStore) -> Path:
    names = (*store.manifest.sizes, MANIFEST)
    found = [(store.folder / name).stat() for name in names]
    states = [str(store.folder.resolve()), *((state.st_size, state.st_mtime_ns) for state in found)]
    key = hashlib.blake2b(json.dumps(states).encode(), digest_size=12).hexdigest()
    return cache / f"{key}.sound"


@contextmanager
def _one_at_a_time(name: Path) -> Iterator[None]:
    """Lock `name` during the block. Where the block fails, all that wait for it fail alike, without trying again."""
    name.parent.mkdir(parents=True, exist_ok=True)
    failed = name.with_name(f"{name.name}.failed")
    before = _written(failed)
    with FileLock(f"{name}.lock"):
        if _written(failed) not in (None, before):
            raise ValueError(failed.read_text())
        try:
            yield
        except ValueError as error:
            failed.write_text(str(error))
            raise
        failed.unlink(missing_ok=True)


def _written(path: Path) -> int | None:
    """Return when a file was written; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
