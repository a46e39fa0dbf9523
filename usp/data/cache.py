"""Finding the token store of a data set: one that the user names, or one in a cache, written there the first time.

    CACHE/KEY/              a store; KEY is `source_of` the data
    CACHE/KEY.partial/      an unfinished one, which the next process continues
    CACHE/KEY.failed        why the last process could not write it
    CACHE/KEY.sound         empty: the store whose path, sizes and times give KEY agrees with its checksums

On each host one process writes or verifies, and the others wait for it. They wait for a file, before any of them
communicates, so that no collective runs out of time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from usp.parallel import option

from .documents import REFUSE
from .sources import TEXT_FIELD, DataFiles, find_files
from .store import INDEX, LARGE, MANIFEST, TokenStore, is_store, show_progress
from .tokenizer import ByteTokenizer, Tokenizer, fingerprint, unended_line
from .tokenizing import source_of, write_store

SHOWN = 2**18  # tokens that are looked through for special tokens written out


def find_data(data: str, field: str = TEXT_FIELD, name: str = "data") -> DataFiles | Path:
    """Return the folder of the token store, or the files of documents, that `data` names; see `find_files`. Raises
    ValueError as `find_files` does, and if `field` is set for a store."""
    folder = Path(data).expanduser()
    if not is_store(folder):
        return find_files(data, field, name)
    if field not in ("", TEXT_FIELD):
        given = option("data_field", repr(field))
        raise ValueError(given + " is for JSON, CSV, Parquet and Arrow files, not for stores")
    return folder


def open_data(
    data: DataFiles | Path, field: str, tokenizer: Tokenizer, cache: Path, bad_rows: str = REFUSE
) -> TokenStore:
    """Open a token store, or the one of files in `cache`, which is written if there is none. Raises ValueError and
    OSError as `cached_store` and `sound_store` do, and ValueError for a store of another tokenizer."""
    if isinstance(data, DataFiles):
        return cached_store(data, field, tokenizer, cache, bad_rows)
    store = sound_store(data, cache)
    expected = fingerprint(tokenizer, store.manifest.masked)
    if store.manifest.fingerprint != expected:
        raise ValueError(
            f"token store {data} was tokenized with {store.manifest.tokenizer} ({store.manifest.fingerprint}), "
            f"and " + option("tokenizer", tokenizer.name) + f" is another one ({expected}): use the same tokenizer, "
            f"chat_template, bos and parse_special_tokens, or tokenize the data again"
        )
    return store


def check_ids(store: TokenStore, vocabulary: int) -> None:
    """Raise ValueError, naming a document of the store, if it holds an id that a vocabulary of this size lacks."""
    if first := store.first_id_from(vocabulary):
        raise ValueError(
            f"{store.folder}: document {first[1]} holds id {first[0]}, and the model has a vocabulary of {vocabulary}: "
            f"tokenize the data with the model's own tokenizer, or use a model with a larger vocabulary"
        )


def token_lines(store: TokenStore, tokenizer: Tokenizer) -> Iterator[str]:
    """Say which special tokens of the tokenizer the first SHOWN tokens of a store hold as text, and how many answers of
    its chats have no token that ends a response."""
    if not isinstance(tokenizer, ByteTokenizer) and not tokenizer.parse_special:
        text = tokenizer.decode(store.read(0, min(store.manifest.tokens, SHOWN)).tolist())
        if found := ", ".join(token for token in tokenizer.special_tokens if token in text):
            advice = "give --parse-special-tokens to make them tokens"
            yield f"special tokens of the tokenizer that are written out, {found}, remain text: {advice}"
    yield from filter(None, [unended_line(store.manifest.unended, tokenizer)])


def cached_store(files: DataFiles, field: str, tokenizer: Tokenizer, cache: Path, bad_rows: str = REFUSE) -> TokenStore:
    """Open the token store of `files` in the directory `cache`, and write it first if there is none. Raises ValueError
    and OSError as `write_store`."""
    folder = cache / source_of(files, field, tokenizer, bad_rows)
    if not folder.is_dir():
        with _one_at_a_time(folder):
            if not folder.is_dir():
                partial = folder.with_name(f"{folder.name}.partial")
                if sum(file.path.stat().st_size for file in files.files) > LARGE:
                    again = "the rest of " if partial.is_dir() else ""
                    print(f"tokenizing {again}{len(files.files)} files below {files.root} into {folder}")
                write_store(files, field, tokenizer, partial, 0, bad_rows)
                partial.rename(folder)
                _note(cache, TokenStore(folder)).touch()
    return sound_store(folder, cache)


def sound_store(folder: Path, cache: Path) -> TokenStore:
    """Open the token store in `folder`, and compare it with its checksums. If a note in the directory `cache`, which is
    created, says that this host has done so, only its index is read, which says where documents are. Raises ValueError
    for a store that is not finished, or damaged."""
    store = TokenStore(folder)
    note = _note(cache, store)
    if not note.exists():
        with _one_at_a_time(note.with_suffix("")):
            if not note.exists():
                size = sum(store.manifest.sizes.values())
                if size > LARGE:
                    print(f"comparing token store {folder} with its checksums")
                with show_progress("verifying", size) as show:
                    store.verify(store.manifest.sizes, show)
                note.touch()
                return store
    store.verify([INDEX])
    return store


def _note(cache: Path, store: TokenStore) -> Path:
    files = [(store.folder / name).stat() for name in (*store.manifest.sizes, MANIFEST)]
    states = [str(store.folder.resolve()), *((file.st_size, file.st_mtime_ns) for file in files)]
    key = hashlib.blake2b(json.dumps(states).encode(), digest_size=12).hexdigest()
    return cache / f"{key}.sound"


@contextmanager
def _one_at_a_time(name: Path) -> Iterator[None]:
    """Lock `name` during the block. If the block fails, all that wait for the lock fail alike, without trying again."""
    name.parent.mkdir(parents=True, exist_ok=True)
    failed = name.with_name(f"{name.name}.failed")
    before = _written(failed)
    with FileLock(f"{name}.lock"):
        if _written(failed) not in (None, before):
            raise ValueError(failed.read_text() or f"{name} could not be written")  # of a full disk
        try:
            yield
        except (ValueError, OSError) as error:
            with suppress(OSError):
                failed.write_text(str(error))
            raise
        failed.unlink(missing_ok=True)


def _written(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
