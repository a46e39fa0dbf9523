"""Find the files of a data set that hold documents, and open them as streams.

    lines     .jsonl, .ndjson   one JSON object per line; also files without a suffix that begin with such a line
    json      .json             an array of JSON objects, or one object after another
    csv       .csv, .tsv        a header, then one row per document
    parquet   .parquet
    arrow     .arrow            also folders of `save_to_disk` of the package datasets
    text      any other file    one document

Text, JSON and CSV files may be compressed (.gz, .bz2, .xz, .zst). Text is UTF-8, or UTF-16 or UTF-32 with a byte order
mark.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from usp.parallel import option
from usp.run.metrics import METRICS_FILE

STDLIB = "stdlib"
TEXT_FIELD = "text"  # default key or column of the text
FORMATS = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".tsv": "csv"}
FORMATS |= {".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SNIFF_BYTES = 8192
LONGEST = 2**24  # characters of a first line that is recognized as JSON
DEEPEST = 100  # lists and objects in each other: what reads or renders a row calls itself for each
_ESCAPED_SURROGATE, _SURROGATE = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")
# UTF-32 first: its little-endian mark begins with that of UTF-16.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
# Formats that a directory of text may hold for other reasons, such as the settings of a program.
AMBIGUOUS = ("json", "csv")
SUPPORTED = f"text, {', '.join(FORMATS)}, also with {', '.join(COMPRESSED)}"
# What `datasets` and hubs keep beside the data.
STATE = "state.json"
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", STATE}
ABOUT_DATA = {"readme", "license", "licence", "notice", "citation", "changelog", "authors", "contributing"}
TRAINING = {"train", "training"}
HELD_OUT = {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
# Excluded below the standard library's directory: installed packages, tests, and tables of data.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class DataFile:
    """A file of documents. format: a value of FORMATS, or text."""

    path: Path
    format: str

    @staticmethod
    def of(path: Path) -> DataFile:
        """Return a file with the format that its suffixes name, or without any its first line."""
        suffix = _suffix(path)
        return DataFile(path, FORMATS.get(suffix, "text" if suffix or not _has_json_lines(path) else "lines"))

    @property
    def has_fields(self) -> bool:
        return self.format != "text"


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set in the order of their names. root: the directory that names are relative to. left_out: by
    reason, the names of the files left out."""

    root: Path
    files: tuple[DataFile, ...]
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def left_out_line(self) -> str:
        """Say what was left out and why; nothing if no file was."""
        parts = []
        for reason, names in self.left_out.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} ({reason})")
        return f"left out: {'; '.join(parts)}" if parts else ""


def find_files(data: str, field: str = TEXT_FIELD, name: str = "data") -> DataFiles:
    """Return the files of `data`: "stdlib", a file, or a directory with everything below it, links included.

    A directory holds either records (JSON, CSV, Parquet, Arrow) or text. Text beside records is left out, because it
    describes them; so are hidden and binary files, metadata, runs of this program, held-out splits beside training
    splits, and JSON and CSV files beside text.

    name: of the parameter that holds `data`, for messages.

    Raises ValueError if `data` does not exist or is binary, if no file holds documents, or if `field` is set although
    only text files do.
    """
    root, given = Path(data).expanduser(), option(name, data)
    if data == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = DataFiles(root, tuple(DataFile(path, "text") for path in sorted(_library(root)) if path.stat().st_size))
    elif root.is_dir():
        files = _find_below(root)
    elif not root.is_file():
        raise ValueError(given + f" does not exist: give a file ({SUPPORTED}), a directory, or {STDLIB}")
    elif not DataFile.of(root).has_fields and is_binary(root):
        raise ValueError(given + f" is a binary file: give one of these: {SUPPORTED}")
    else:
        files = DataFiles(root.parent, (DataFile.of(root),) if root.stat().st_size else ())
    if field not in ("", TEXT_FIELD) and files.files and not any(file.has_fields for file in files.files):
        of_records = option("data_field", repr(field)) + " is for JSON, CSV, Parquet and Arrow files, and "
        raise ValueError(of_records + given + " has none: unset it")
    if not files.files:
        left_out = files.left_out_line()
        raise ValueError(given + f" is empty: no file in it holds documents{f' ({left_out})' if left_out else ''}")
    return files


def _library(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        below[:] = set(below) - NOT_LIBRARY  # installed packages are many: they are not even listed
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def without(files: DataFiles, others: DataFiles, reason: str) -> DataFiles:
    """Leave out the files that are also in `others`. Raises ValueError if no file is left."""
    excluded = {file.path.resolve() for file in others.files}
    remaining = tuple(file for file in files.files if file.path.resolve() not in excluded)
    if not remaining:
        raise ValueError(f"all files of {files.root} are {reason}: no other data is left")
    if len(remaining) == len(files.files):
        return files
    names = tuple(os.path.relpath(file.path, files.root) for file in files.files if file not in remaining)
    return replace(files, files=remaining, left_out={**files.left_out, reason: names})


def _find_below(root: Path) -> DataFiles:
    reasons = dict(sorted(_walk(root)))
    files = [DataFile.of(path) for path, reason in reasons.items() if not reason]
    texts = [file for file in files if not file.has_fields]
    if texts and not _only_about(texts):  # lines of JSON without a suffix are text like the others
        files = [file if _suffix(file.path) else replace(file, format="text") for file in files]
    by_file = _of_another_kind(files) | _held_out(files, root)
    left_out: dict[str, list[str]] = defaultdict(list)
    for path, reason in (*reasons.items(), *((file.path, reason) for file, reason in by_file.items())):
        if reason:
            left_out[reason].append(os.path.relpath(path, root))
    documents = tuple(file for file in files if file not in by_file)
    return DataFiles(root, documents, {reason: tuple(names) for reason, names in left_out.items()})


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield what is below `root`, each file and directory once, with the reason to leave it out or nothing."""
    visited: set[Path] = set()
    for name, subfolders, names in os.walk(root, followlinks=True):
        folder = Path(name)
        if folder.resolve() in visited:  # a link to a directory that is above or was visited
            subfolders.clear()
            continue
        visited.add(folder.resolve())
        if (folder / METRICS_FILE).exists() and (folder / "config.yaml").exists():
            subfolders.clear()
            yield folder, "a run of this program"
            continue
        yield from ((folder / hidden, "hidden") for hidden in (*subfolders, *names) if hidden.startswith("."))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from ((folder / name, _unusable(folder / name)) for name in names if not name.startswith("."))


def _unusable(path: Path) -> str:
    """Return why a file holds no documents; nothing if it may hold some."""
    if not path.is_file():
        return "not a file"
    if not path.stat().st_size:
        return "empty"
    if path.name.lower() in METADATA:
        return "metadata"
    state = path.with_name(STATE)  # of a folder of `save_to_disk`, in which `map` and `shuffle` put files of their own
    if path.suffix == ".arrow" and state.is_file() and f'"{path.name}"' not in state.read_text("utf-8", "replace"):
        return f"not in {STATE}"
    return "binary" if not DataFile.of(path).has_fields and is_binary(path) else ""


def _held_out(files: list[DataFile], root: Path) -> dict[DataFile, str]:
    """Return the files of held-out splits, by the words in their names, if others are of a training split."""
    words = {
        file: set(re.split(r"[^a-z]+", str(file.path.relative_to(root)).lower())) for file in files if file.has_fields
    }
    if not any(TRAINING & in_name for in_name in words.values()):
        return {}
    return {file: "held-out split" for file, in_name in words.items() if HELD_OUT & in_name and not TRAINING & in_name}


def _of_another_kind(files: list[DataFile]) -> dict[DataFile, str]:
    """Return the text files of a directory of records, or the records of a directory of text."""
    texts = [file for file in files if not file.has_fields]
    certain = [file for file in files if file.has_fields and file.format not in AMBIGUOUS]
    ambiguous = [file for file in files if file.format in AMBIGUOUS]
    if certain or (ambiguous and _only_about(texts)):
        return dict.fromkeys(texts, "text beside records")
    return dict.fromkeys(ambiguous, "records beside text") if texts else {}


def _only_about(texts: list[DataFile]) -> bool:
    return all(file.path.name.lower().partition(".")[0] in ABOUT_DATA for file in texts)


def _suffix(path: Path) -> str:
    """Return the last suffix of a file, before those of its compression."""
    name = path.name.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    return Path(name).suffix


def _has_json_lines(path: Path) -> bool:
    """Return whether the first line of a file is a JSON object."""
    try:
        with open_text(path, newline="\n") as file:
            return file.read(1) == "{" and isinstance(read_json(f"{{{file.readline(LONGEST)}"), dict)
    except (ValueError, OSError):
        return False


def read_json(text: str) -> Any:
    """Return the value of JSON text, as `sound_json` does. Raises ValueError for other text."""
    try:
        return sound_json(json.loads(text), text)
    except RecursionError as error:
        raise too_deep() from error


def sound_json(value: Any, text: str) -> Any:
    """Return the value of JSON text with U+FFFD for every half of a surrogate pair, as for bytes that are not UTF-8.
    Raises ValueError for one that is more than DEEPEST deep."""
    if text.count("[") + text.count("{") > DEEPEST:
        level = [value]
        for _ in range(DEEPEST + 1):
            inside = (each.values() if isinstance(each, dict) else each for each in level)
            level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if level:
            raise too_deep()
    if _ESCAPED_SURROGATE.search(text):
        value = json.loads(_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    return value


def too_deep() -> ValueError:
    return ValueError(f"lists and objects are more than {DEEPEST} deep in each other")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the file system in the block say `path`, such as of a full disk, unless they say another."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, decompressed according to its suffix. Raises ValueError, naming the file, if it is
    damaged."""
    try:
        with naming(path), _decompressed(path) as file, io.BufferedReader(file, 2**20) as buffered:
            yield buffered
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system
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
    return next((name for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), "utf-8")


def is_binary(path: Path) -> bool:
    """Return whether a file has a NUL byte near its beginning and no byte order mark."""
    with open_bytes(path) as file:
        return encoding(file) == "utf-8" and b"\0" in file.peek(SNIFF_BYTES)[:SNIFF_BYTES]
