"""The documents of a file, in pieces of bounded size.

A document is read in pieces of about PIECE characters: a single record is held in memory, but no whole text file, and
no whole row group of Parquet. Text is cut after a newline where there is one, because tokenizers split words from line
breaks. A chat is one piece.
"""

from __future__ import annotations

import csv
import json
import mmap
import re
import sys
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from .chats import MESSAGES, Chat, Content, NoText, RowKind, content_of, kind_of, missing
from .sources import DataFile, open_text, read_json, sound_json, too_deep

PIECE = 2**16  # characters
# Rows of Parquet and Arrow that are read together: few, because their size is known only afterwards. A Parquet file
# says how much it stores, and stores repeated text once.
ROWS = 16
SHOWN_KINDS, SHOWN_FILES = 5, 100  # whose keys are shown
_NESTING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)  # strings, in which brackets do not count
_LINE, _WORD = re.compile(r"\n(?=\S)"), re.compile(r"\s(?=\S)")

REFUSE, DROP = "refuse", "drop"  # what becomes of bad rows

Piece = tuple[Content, bool]  # text, or a whole chat or completion; and whether a document ends with it
# Its kind, its values that are read, and where it is; or what is wrong with it.
Row = tuple[RowKind, Mapping[str, Any], str] | ValueError


def read_pieces(file: DataFile, field: str, bad_rows: str = REFUSE) -> Iterator[tuple[Content | ValueError, bool]]:
    """Yield the documents of a file, in order, and NoText for rows without one. Paths of images are relative to its
    folder.

    field: key or column of the text or the messages, for every format but text; see `kind_of`. bad_rows: with "drop", a
        row that does not hold what the first good one does is yielded as what is wrong with it.

    Raises ValueError, naming file and place, for a damaged file, and without "drop" for a bad row.
    """
    if file.format == "text":
        with open_text(file.path) as text:
            yield from _in_pieces(iter(lambda: text.read(PIECE), ""))
        return
    for row in _rows(file, field):
        try:
            if isinstance(row, ValueError):
                raise row
            kind, values, where = row
            content = content_of(values, kind, where)
            if isinstance(content, Chat):
                files = (str(file.path.absolute().parent / Path(image).expanduser()) for image in content.images)
                content = replace(content, images=tuple(files))
        except ValueError as error:
            if bad_rows != DROP and not isinstance(error, NoText):
                raise
            yield error, True
            continue
        if isinstance(content, str):
            yield from _in_pieces(content[at : at + PIECE] for at in range(0, len(content), PIECE))
        else:
            yield content, True


def kinds(files: Iterable[DataFile], field: str, bad_rows: str = REFUSE) -> Iterator[RowKind]:
    """Yield the kind of the first row of each file of records. Raises ValueError as `read_pieces` does for that row."""
    for file in files:
        if not file.has_fields:
            continue
        with closing(_rows(file, field)) as rows:
            for row in rows:
                if not isinstance(row, ValueError):
                    yield row[0]
                    break
                if bad_rows != DROP:
                    raise row


def holds_chats(files: Iterable[DataFile], field: str, bad_rows: str = REFUSE) -> bool:
    """Return whether any of the files holds chats, or prompts with completions, by the first row of each. Raises
    ValueError as `read_pieces` does for that row."""
    return any(kind.chat for kind in kinds(files, field, bad_rows))


def keys_of(files: Iterable[DataFile], field: str, bad_rows: str = REFUSE) -> list[str]:
    """Say which keys of records are read, and which are not, by the first row of each of the first files."""
    first = kinds(islice(files, SHOWN_FILES), field, bad_rows)
    return keys_lines(Counter(((*kind.keys, *kind.more), kind.unread) for kind in first), "files")


def keys_lines(found: Counter[tuple[tuple[str, ...], ...]], what: str) -> list[str]:
    """Say which keys are read and which are not, most frequent first. found: numbers of `what` by both."""
    return [
        f"keys of {number} {what}: {', '.join(keys)} read{'; not read: ' * bool(unread)}{', '.join(unread)}"
        for (keys, unread), number in found.most_common(SHOWN_KINDS)
    ]


def _rows(file: DataFile, field: str) -> Generator[Row]:
    readers = {"lines": _json_lines, "json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow}
    yield from readers[file.format](file.path, field)


def _in_pieces(chunks: Iterable[str]) -> Iterator[Piece]:
    text = ""
    for chunk in chunks:
        text += chunk
        if len(text) > PIECE:
            cut = _place_to_cut(text)
            yield text[:cut], False
            text = text[cut:]
    if text:
        yield text, True


def _place_to_cut(text: str) -> int:
    """Return the last beginning of a line, or else of a word, that leaves something on both sides."""
    for between in (_LINE, _WORD):
        for begin in (len(text) - 1024, len(text) // 2):  # near the end first, because finding all words takes long
            if last := max((match.end() for match in between.finditer(text, max(begin, len(text) // 2))), default=0):
                return last
    return len(text) - 1


def _json_lines(path: Path, field: str) -> Iterator[Row]:
    kind = None
    with open_text(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    row = read_json(line)
                except ValueError as error:
                    yield ValueError(f"{where}: not JSON ({error})")
                    continue
                kind = yield from _of_kind(row, kind, field, where)


def _json(path: Path, field: str) -> Iterator[Row]:
    """Yield the objects of a JSON array, or objects one after another, without holding all of them."""
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    kind, number = None, 0
    with open_text(path) as file:
        text = file.read(PIECE).lstrip()
        at = int(in_array := text.startswith("["))
        while True:
            begin = between.match(text, at).end()  # type: ignore[union-attr]
            if in_array and text.startswith("]", begin):
                if text[begin + 1 :].strip() or any(more.strip() for more in iter(lambda: file.read(PIECE), "")):
                    raise ValueError(f"{path}: more behind the end of the array, after object {number}")
                return
            where = f"{path}, object {number + 1}"
            try:
                row, at = decoder.raw_decode(text, begin)
                row = sound_json(row, text[begin:at])
            except (ValueError, RecursionError) as error:
                at = begin if isinstance(error, json.JSONDecodeError) else max(at, _end_of(text, begin))
                if at > begin:
                    number += 1
                    yield ValueError(f"{where}: {error if isinstance(error, ValueError) else too_deep()}")
                elif more := file.read(max(PIECE, len(text) - begin)):
                    text, at = text[begin:] + more, 0
                elif begin < len(text):
                    raise ValueError(f"{where}: not JSON ({error})") from error
                elif in_array:
                    raise ValueError(
                        f"{path} is damaged: it ends after object {number}, without the array's ]"
                    ) from error
                else:
                    return
                continue
            number += 1
            kind = yield from _of_kind(row, kind, field, where)


def _end_of(text: str, begin: int) -> int:
    """Return where the JSON list or object that begins in a text ends; 0 if it does not."""
    depth = 0
    for found in _NESTING.finditer(text, begin):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if not depth and found[0] in "]}":
            return found.end()
    return 0


def _of_kind(row: Any, kind: RowKind | None, field: str, where: str) -> Generator[Row, None, RowKind | None]:
    """Yield a JSON value as a row, and return its kind; `kind` is that of the rows before it, None for the first."""
    keys = row if isinstance(row, dict) else {}
    try:
        kind = kind or kind_of(keys, field, [key for key in keys if isinstance(keys[key], list)], where)
    except ValueError as error:
        yield error
        return None
    absent = [key for key in kind.keys if key not in keys]
    if absent:
        yield missing(where, "key", absent[0], keys, before=kind.chat)
    elif not (kind.chat or field) and isinstance(keys.get(MESSAGES), list):
        yield ValueError(f"{where}: {MESSAGES!r} beside 'text', which the rows before it lack: set data_field to one")
    else:
        values = {key: without_nulls(keys[key], ("arguments",)) for key in keys} if kind.chat else keys
        yield kind, values, where
    return kind


def _csv(path: Path, field: str) -> Iterator[Row]:
    with open_text(path) as file:
        rows = csv.reader(file, delimiter="\t" if ".tsv" in path.name.lower() else ",", strict=True)
        limit = csv.field_size_limit(sys.maxsize)  # by default 128 KiB
        try:
            names = next(rows)
            kind = kind_of(names, field, (), str(path), "column")
            columns = {name: names.index(name) for name in (*kind.keys, *kind.more) if name in names}
            for row in rows:
                if len(row) not in (0, len(names)):
                    where = f"{path}, line {rows.line_num}"
                    yield ValueError(f"{where}: not CSV ({len(row)} values instead of {len(names)})")
                elif row:
                    yield kind, {name: row[column] for name, column in columns.items()}, f"{path}, line {rows.line_num}"
        except (csv.Error, StopIteration) as error:
            raise ValueError(f"{path}, line {rows.line_num}: not CSV ({error})") from error
        finally:
            csv.field_size_limit(limit)


def _parquet(path: Path, field: str) -> Iterator[Row]:
    with _open_parquet(path) as file:
        kind, columns = _columns(path, field, file.schema_arrow)
        batches = file.iter_batches(batch_size=ROWS, columns=columns, use_threads=False)
        yield from _rows_of(batches, columns, kind, path)


def json_rows(file: DataFile) -> Generator[str | ValueError]:
    """Yield a file's JSON lines, or its rows of Parquet as such, with text for what JSON lacks; or what is wrong with
    one. Raises ValueError for a damaged file."""
    if file.format == "lines":
        with open_text(file.path, newline="\n") as lines:
            yield from lines
        return
    with _open_parquet(file.path) as table:
        names, batches = table.schema_arrow.names, table.iter_batches(batch_size=ROWS, use_threads=False)
        for row in (row for batch in batches for row in _values(batch, range(len(names)))):
            values = {} if isinstance(row, ValueError) else dict(zip(names, map(without_nulls, row), strict=True))
            yield json.dumps(values, ensure_ascii=False, default=str) if values else row


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            yield file
    except (ArrowException, OSError, RecursionError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} is not a Parquet file, or is damaged: {error}") from error


def _arrow(path: Path, field: str) -> Iterator[Row]:
    from pyarrow import ArrowException, BufferReader, ipc, py_buffer

    with path.open("rb") as file:  # mapped, because a batch may be as large as the file
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        source = BufferReader(py_buffer(mapped))
        if mapped[:6] == b"ARROW1":
            reader = ipc.open_file(source)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            reader = ipc.open_stream(source)
            batches = iter(reader)
        kind, columns = _columns(path, field, reader.schema)
        yield from _rows_of(_slices(batches, mapped, columns), columns, kind, path)
    except (ArrowException, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not an Arrow file, or is damaged: {error}") from error


def _slices(batches: Iterable[Any], mapped: mmap.mmap, columns: Sequence[str]) -> Iterator[Any]:
    for batch in batches:
        for column in (batch.column(name) for name in columns):
            column.validate(full=not _is_flat(column))  # a slice of lists would validate the lists of all others
        for at in range(0, batch.num_rows, ROWS):
            yield batch.slice(at, ROWS)
            mapped.madvise(mmap.MADV_DONTNEED)  # what has been read would count as memory of the process


def _is_flat(column: Any) -> bool:
    return not column.type.num_fields and not hasattr(column, "dictionary")


def _columns(path: Path, field: str, schema: Any) -> tuple[RowKind, list[str]]:
    """Return the kind of the rows of a schema, and which columns of it to read."""
    from pyarrow import types

    of_lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)
    of_text = (types.is_string, types.is_large_string, types.is_string_view)
    lists = [column.name for column in schema if any(is_kind(column.type) for is_kind in of_lists)]
    kind = kind_of(schema.names, field, lists, str(path), "column")
    column = schema.field(kind.keys[0]).type
    text = column.value_type if types.is_dictionary(column) else column
    if not kind.chat and not any(is_kind(text) for is_kind in of_text):
        raise ValueError(f"{path}: column {kind.keys[0]!r} must hold text (string), got {column}")
    return kind, [name for name in (*kind.keys, *kind.more) if name in schema.names]


def _rows_of(batches: Iterable[Any], columns: list[str], kind: RowKind, path: Path) -> Iterator[Row]:
    for number, row in enumerate((row for batch in batches for row in _values(batch, columns)), start=1):
        where = f"{path}, row {number}"
        if isinstance(row, ValueError):
            yield ValueError(f"{where}: {row}")
        else:
            yield kind, dict(zip(columns, map(without_nulls, row) if kind.chat else row, strict=True)), where


def _values(batch: Any, columns: Sequence[str | int]) -> list[Any]:
    """Return the values of each row of a batch, or what is wrong with it."""
    try:
        found = [batch.column(name) for name in columns]
        for column in filter(_is_flat, found):
            column.validate(full=True)
        return list(zip(*(column.to_pylist() for column in found), strict=True))
    except (ValueError, OverflowError) as error:  # not UTF-8, places outside of the file, a time in no calendar
        if batch.num_rows == 1:
            return [ValueError(str(error))]
        return [row for at in range(batch.num_rows) for row in _values(batch.slice(at, 1), columns)]


def without_nulls(value: Any, data: Collection[str] = ()) -> Any:
    """Drop the keys of objects that are null, which tables add because other rows have them; but not those inside of
    the keys `data`."""
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if item is not None}
        return {name: item if name in data else without_nulls(item, data) for name, item in kept.items()}
    return [without_nulls(item, data) for item in value] if isinstance(value, list) else value
