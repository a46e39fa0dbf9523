"""Documents out of files: text, JSONL, Parquet, folders of them, or the Python standard library's own sources.

A source is a list of units, each small enough to hold in memory and readable on its own:

    text file      one unit of one document
    JSONL file     one unit per RANGE_BYTES: the lines that begin in that range
    Parquet file   one unit per row group

Units are read only when their turn comes, so a source of any size opens at once, and two ranks that walk the same
units in the same order see the same documents. A document is its UTF-8 bytes.
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
TEXT_FIELD = "text"  # of documents, where nothing else is asked for
RANGE_BYTES = 16 * 2**20
SNIFF_BYTES = 8192
# Below the standard library's folder: other people's packages, tests, and files that are tables more than text.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class TextUnit:
    path: Path

    def read(self) -> list[bytes]:
        return [self.path.read_bytes()]


@dataclass(frozen=True)
class JsonLinesUnit:
    """The lines that begin at `begin <= offset < end`; a line may run past `end`."""

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
            file.readline()  # the line that began before this range, or the newline that ended it
        while (offset := file.tell()) < self.end and (line := file.readline()):
            if line.strip():
                yield offset, line

    def _text(self, offset: int, line: bytes) -> bytes:
        where = f"{self.path}, line at byte {offset}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); a .jsonl file holds one JSON object a line") from error
        if not isinstance(row, dict) or self.field not in row:
            keys = list(row) if isinstance(row, dict) else []
            raise ValueError(
                f"{where}: no key data-field={self.field!r}{nearest(self.field, keys)}; "
                f"it has {_listed(keys)}: name the one that holds the text with --data-field"
            )
        if not isinstance(row[self.field], str):
            raise ValueError(f"{where}: {self.field!r} holds {type(row[self.field]).__name__}, it must hold text")
        return row[self.field].encode("utf-8", "replace")


@dataclass(frozen=True)
class ParquetUnit:
    path: Path
    field: str
    row_group: int

    def read(self) -> list[bytes]:
        from pyarrow import parquet  # heavy, and only this kind of file needs it

        column = parquet.ParquetFile(self.path).read_row_group(self.row_group, columns=[self.field]).column(0)
        return [text.encode("utf-8", "replace") for text in column.to_pylist() if text]


Unit = TextUnit | JsonLinesUnit | ParquetUnit


def open_source(data: str, field: str) -> tuple[Unit, ...]:
    """The units of `data`, in an order that depends on names alone.

    `data` is "stdlib", a file or a folder. Every visible file below a folder counts: *.jsonl and *.parquet, whatever
    the case, by their kind, any other as text unless it is binary (a NUL byte near its beginning). Raises ValueError
    when the path is missing or a .json file, when nothing in it holds a byte of text, when `field` is not in a Parquet
    file, and for one other than the default that no file could have.
    """
    files = _library_files() if data == STDLIB else _files_of(data)
    if field not in ("", TEXT_FIELD) and not any(map(_has_fields, files)):
        raise ValueError(f"data-field={field!r} is for .jsonl and .parquet files: leave it out, data={data} has none")
    units = tuple(unit for path in files for unit in _units_of(path, field))
    if not units:
        raise ValueError(f"data={data} is empty: no file in it holds text")
    return units


def _files_of(data: str) -> list[Path]:
    root = Path(data).expanduser()
    if root.is_dir():
        return [path for path in _visible_files(root) if _has_fields(path) or not _is_binary(path)]
    if not root.is_file():
        raise ValueError(f"data={data} does not exist: give a text, .jsonl or .parquet file, a folder, or {STDLIB}")
    if root.suffix.lower() == ".json":
        raise ValueError(f"data={data} is JSON as a whole: write one object a line into a .jsonl file")
    if not _has_fields(root) and _is_binary(root):
        raise ValueError(f"data={data} is a binary file: text, .jsonl or .parquet can be read")
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
        raise ValueError(
            f"{path}: no column data-field={field!r}{nearest(field, names)}; "
            f"it has {_listed(names)}: name the one that holds the text with --data-field"
        )
    kind = file.schema_arrow.field(field).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise ValueError(f"{path}: column {field!r} holds {kind}, it must hold text (string)")
    rows = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    return [ParquetUnit(path, field, index) for index, count in enumerate(rows) if count]


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
