"""Open compressed and encoded files as streams."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SNIFF_BYTES = 8192
# UTF-32 first: its little-endian mark begins with that of UTF-16.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, decompressed according to its suffix.

    Raises ValueError, naming the file, if it is damaged.
    """
    try:
        with _decompressed(path) as file, io.BufferedReader(file, 2**20) as buffered:
            yield buffered
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, with the path in it
        raise ValueError(f"{path} is damaged: {error}") from error


def _decompressed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow  # slow to import, and the standard library reads zstd only from Python 3.14 on

        return pyarrow.input_stream(str(path), compression="zstd")
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers.get(suffix, open)(path, "rb")


@contextmanager
def open_text(path: Path, newline: str = "") -> Iterator[TextIO]:
    """Open a file as text, with the encoding of its byte order mark or UTF-8; invalid bytes become U+FFFD."""
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding(file), "replace", newline) as text:
        yield text


def encoding(file: io.BufferedReader) -> str:
    """Return the encoding of an opened file by its byte order mark; UTF-8 without one."""
    head = file.peek(4)[:4]
    return next((name for mark, name in MARKS if head.startswith(mark)), "utf-8")


def is_binary(path: Path) -> bool:
    """Return whether a file has a NUL byte near its beginning and no byte order mark."""
    with open_bytes(path) as file:
        return encoding(file) == "utf-8" and b"\0" in file.peek(SNIFF_BYTES)[:SNIFF_BYTES]
