"""Documents from text, JSONL and Parquet files, directories of them, or the source code of Python's standard library.

A source is a list of units, each of which fits in memory and can be read independently:

    text file      one unit of one document
    JSONL file     one unit per RANGE_BYTES: the lines that begin in that range
    Parquet file   one unit per row group

Units are read lazily, so a source of any size opens at once, and ranks that read the same units in the same order see
the same documents. A document is its UTF-8 bytes.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from usp.run.failures import nearest

STDLIB = "stdlib"
TEXT_FIELD = "text"  # default key or column of the text
RANGE_BYTES = 16 * 2**20
SNIFF_BYTES = 8192
# Excluded below the standard library's directory: installed packages, tests, and tables of data.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class TextUnit:
    path: Path

    def read(self) -> list[bytes]:
        return [self.path.read_bytes()]


@dataclass(frozen=True)
class JsonLinesUnit:
    """Lines that begin at `begin <= offset < end`; the last may run past `end`."""

    path: Path
    field: str
    begin: int
    end: int

    def read(self) -> list[bytes]:
        with self.path.open("rb") as file:
            return [document for offset, line in self._lines(file) if (document := self._text(offset, line))]

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        file.seek(max(self.begin - 1, 0))
        if self.begin:
            file.readline()  # skip the line that began before this range, or its newline
        while (offset := file.tell()) < self.end and (line := file.readline()):
            if line.strip():
                yield offset, line

    def _text(self, offset: int, line: bytes) -> bytes:
        where = f"{self.path}, line at byte {offset}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); a .jsonl file holds one JSON object per line") from error
        if not isinstance(row, dict) or self.field not in row:
            raise _missing_field(where, "key", self.field, list(row) if isinstance(row, dict) else [])
        if not isinstance(row[self.field], str):
            raise ValueError(f"{where}: {self.field!r} must hold text, got {type(row[self.field]).__name__}")
        return row[self.field].encode("utf-8", "replace")


@dataclass(frozen=True)
class ParquetUnit:
    path: Path
    field: str
    row_group: int

    def read(self) -> list[bytes]:
        from pyarrow import parquet  # slow to import, and only Parquet files need it

        column = parquet.ParquetFile(self.path).read_row_group(self.row_group, columns=[self.field]).column(0)
        return [text.encode("utf-8", "replace") for text in column.to_pylist() if text]


Unit = TextUnit | JsonLinesUnit | ParquetUnit


def open_source(data: str, field: str) -> tuple[Unit, ...]:
    """Return the units of `data` ("stdlib", a file or a directory), in an order that depends only on file names.

    A directory stands for all visible files below it: *.jsonl and *.parquet in any case, and every other file as text
    unless it is binary (a NUL byte near its beginning). Raises ValueError if the path does not exist, is a .json or
    binary file, or holds no text; if a Parquet file has no column `field`; and if `field` is set without any JSONL or
    Parquet file.
    """
    files = _library_files() if data == STDLIB else _files_of(data)
    if field not in ("", TEXT_FIELD) and not any(map(_has_fields, files)):
        raise ValueError(f"data_field={field!r} is for .jsonl and .parquet files, and data={data} has none: unset it")
    units = tuple(unit for path in files for unit in _units_of(path, field))
    if not units:
        raise ValueError(f"data={data} is empty: no file in it holds text")
    return units


def _files_of(data: str) -> list[Path]:
    root = Path(data).expanduser()
    if root.is_dir():
        return [path for path in _visible_files(root) if _has_fields(path) or not _is_binary(path)]
    if not root.is_file():
        raise ValueError(f"data={data} does not exist: give a text, .jsonl or .parquet file, a directory, or {STDLIB}")
    if root.suffix.lower() == ".json":
        raise ValueError(f"data={data} is a single JSON document: convert it to .jsonl, one object per line")
    if not _has_fields(root) and _is_binary(root):
        raise ValueError(f"data={data} is a binary file: give a text, .jsonl or .parquet file")
    return [root]


def _library_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(root).parts))
    return sorted(path for path in files if path.stat().st_size)


def _visible_files(root: Path) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _has_fields(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".parquet")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(SNIFF_BYTES)


def _units_of(path: Path, field: str) -> list[Unit]:
    size = path.stat().st_size
    kind = path.suffix.lower()
    if kind == ".parquet":
        return _row_groups(path, field)
    if kind == ".jsonl":
        return [JsonLinesUnit(path, field, at, min(at + RANGE_BYTES, size)) for at in range(0, size, RANGE_BYTES)]
    return [TextUnit(path)] if size else []


def _row_groups(path: Path, field: str) -> list[Unit]:
    from pyarrow import ArrowInvalid, parquet, types

    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    names = file.schema_arrow.names
    if field not in names:
        raise _missing_field(str(path), "column", field, names)
    kind = file.schema_arrow.field(field).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise ValueError(f"{path}: column {field!r} must hold text (string), got {kind}")
    rows = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    return [ParquetUnit(path, field, index) for index, count in enumerate(rows) if count]


def _missing_field(where: str, kind: str, field: str, names: list[str]) -> ValueError:
    listed = ", ".join(map(repr, names)) or "none"
    return ValueError(
        f"{where}: no {kind} data_field={field!r}{nearest(field, names)}; it has {listed}: set data_field to "
        f"the {kind} that holds the text"
    )
