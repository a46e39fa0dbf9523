"""The documents of a file, in pieces of bounded size.

A document is read as pieces of about PIECE characters, so that neither a text file nor a Parquet row group of any size
is held in memory; only a single record is. Text is cut after a newline where there is one, because tokenizers split
words from line breaks.
"""

from __future__ import annotations

import csv
import json
import mmap
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from usp.run.failures import nearest

from .files import DataFile
from .reading import open_text

PIECE = 2**16  # characters
# Rows of Parquet and Arrow that become text together. Their size is known only afterwards: a Parquet file says how much
# it stores, and stores repeated text once.
ROWS = 16

Piece = tuple[str, bool]  # text, and whether a document ends with it


def read_pieces(file: DataFile, field: str) -> Iterator[Piece]:
    """Yield the documents of a file, in order; empty ones are skipped.

    field: key or column of the text, for every format but text.

    Raises:
        ValueError: naming file and place, for a damaged file, a row without `field`, or a value that is not text.
    """
    if file.format == "text":
        yield from _in_pieces(_chunks(file.path))
        return
    readers = {"lines": _lines, "json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow}
    for text in readers[file.format](file.path, field):
        yield from _in_pieces(text[at : at + PIECE] for at in range(0, len(text), PIECE))


_LINE, _WORD = re.compile(r"\n(?=\S)"), re.compile(r"\s(?=\S)")


def _in_pieces(chunks: Iterable[str]) -> Iterator[Piece]:
    kept = ""
    for chunk in chunks:
        kept += chunk
        if len(kept) > PIECE:
            cut = _place_to_cut(kept)
            yield kept[:cut], False
            kept = kept[cut:]
    if kept:
        yield kept, True


def _place_to_cut(text: str) -> int:
    """Return the last beginning of a line, or else of a word, that leaves something on both sides."""
    for between in (_LINE, _WORD):
        for begin in (len(text) - 1024, len(text) // 2):  # near the end first, because finding all words takes long
            if last := max((match.end() for match in between.finditer(text, max(begin, len(text) // 2))), default=0):
                return last
    return len(text) - 1


def _chunks(path: Path) -> Iterator[str]:
    with open_text(path) as file:
        while chunk := file.read(PIECE):
            yield chunk


def _lines(path: Path, field: str) -> Iterator[str]:
    with open_text(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
                yield _text_of(row, field, f"{path}, line {number}")


def _json(path: Path, field: str) -> Iterator[str]:
    with open_text(path) as file:
        for number, row in enumerate(_values(file, path), start=1):
            yield _text_of(row, field, f"{path}, object {number}")


def _values(file: TextIO, path: Path) -> Iterator[Any]:
    """Yield the values of a JSON array, or JSON values one after another, without holding all of them."""
    decoder = json.JSONDecoder()
    text, between = file.read(PIECE), re.compile(r"[\s,\]]*")
    at = len(text) - len(text.lstrip())
    at += text[at : at + 1] == "["
    while True:
        at = between.match(text, at).end()  # type: ignore[union-attr]
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError as error:
            if not (more := file.read(max(PIECE, len(text) - at))):
                if at < len(text):
                    raise ValueError(f"{path}: not JSON ({error})") from error
                return
            text, at = text[at:] + more, 0
        else:
            yield value
            at = end


def _text_of(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or field not in row:
        raise _missing_field(where, "key", field, list(row) if isinstance(row, dict) else [])
    if not isinstance(row[field], str | None):
        raise ValueError(f"{where}: {field!r} must hold text, got {type(row[field]).__name__}")
    return row[field] or ""


def _csv(path: Path, field: str) -> Iterator[str]:
    with open_text(path) as file:
        rows = csv.reader(file, delimiter="\t" if ".tsv" in path.name.lower() else ",", strict=True)
        limit = csv.field_size_limit(sys.maxsize)  # by default 128 KiB
        try:
            names = next(rows)
            if field not in names:
                raise _missing_field(str(path), "column", field, names)
            column = names.index(field)
            for row in rows:
                if len(row) not in (0, len(names)):
                    raise csv.Error(f"{len(row)} values instead of {len(names)}")
                yield row[column] if row else ""
        except (csv.Error, StopIteration) as error:
            raise ValueError(f"{path}, line {rows.line_num}: not CSV ({error})") from error
        finally:
            csv.field_size_limit(limit)


def _parquet(path: Path, field: str) -> Iterator[str]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            _check_column(path, field, file.schema_arrow)
            for batch in file.iter_batches(batch_size=ROWS, columns=[field], use_threads=False):
                yield from (text or "" for text in batch.column(0).to_pylist())
    except (ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path} is not a Parquet file, or is damaged: {error}") from error


def _arrow(path: Path, field: str) -> Iterator[str]:
    from pyarrow import ArrowInvalid, BufferReader, ipc, py_buffer

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
        _check_column(path, field, reader.schema)
        for batch in batches:
            column = batch.column(field)
            for at in range(0, len(column), ROWS):
                yield from (text or "" for text in column.slice(at, ROWS).to_pylist())
                mapped.madvise(mmap.MADV_DONTNEED)  # what has been read would count as memory of the process
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not an Arrow file, or is damaged: {error}") from error


def _check_column(path: Path, field: str, schema: Any) -> None:
    from pyarrow import types

    if field not in schema.names:
        raise _missing_field(str(path), "column", field, schema.names)
    kind = schema.field(field).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise ValueError(f"{path}: column {field!r} must hold text (string), got {kind}")


def _missing_field(where: str, kind: str, field: str, names: list[str]) -> ValueError:
    listed = ", ".join(map(repr, names)) or "none"
    return ValueError(
        f"{where}: no {kind} data_field={field!r}{nearest(field, names)}; it has {listed}: set data_field to "
        f"the {kind} that holds the text"
    )
