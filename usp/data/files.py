"""The files of a data set: which hold documents, in which format, and what is left out.

    lines     .jsonl, .ndjson   one JSON object per line
    json      .json             an array of JSON objects, or one object after another
    csv       .csv, .tsv        a header, then one row per document
    parquet   .parquet
    arrow     .arrow            as written by `save_to_disk` of the package datasets
    text      any other file    one document

Text, JSON and CSV files may be compressed (.gz, .bz2, .xz, .zst). Text is UTF-8, or UTF-16 or UTF-32 with a byte order
mark.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from usp.run.metrics import METRICS_FILE

from .reading import COMPRESSED, is_binary

STDLIB = "stdlib"
TEXT_FIELD = "text"  # default key or column of the text
FORMATS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# Formats that a directory of text may hold for other reasons, such as the settings of a program.
AMBIGUOUS = ("json", "csv")
SUPPORTED = f"text, {', '.join(FORMATS)}, also with {', '.join(COMPRESSED)}"
# What `datasets` and hubs keep beside the data.
METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
ABOUT_DATA = {"readme", "license", "licence", "notice", "citation", "changelog", "authors", "contributing"}
TRAINING = {"train", "training"}
HELD_OUT = {"test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"}
# Excluded below the standard library's directory: installed packages, tests, and tables of data.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class DataFile:
    """A file of documents; `format` is a value of FORMATS, or text."""

    path: Path
    format: str

    @property
    def has_fields(self) -> bool:
        return self.format != "text"


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set in the order of their names, and by reason the names of those left out.

    root: the directory that the names are relative to.
    """

    root: Path
    files: tuple[DataFile, ...]
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [os.path.relpath(file.path, self.root) for file in self.files]

    def left_out_line(self) -> str:
        """Say what was left out and why; nothing if all files were taken."""
        parts = []
        for reason, names in self.left_out.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} ({reason})")
        return f"left out: {'; '.join(parts)}" if parts else ""


def find_files(data: str, field: str = TEXT_FIELD, name: str = "data") -> DataFiles:
    """Return the files of `data`: "stdlib", a file, or a directory with all that is below it, links included.

    A directory holds either records (JSON, CSV, Parquet, Arrow) or text. Text beside records is left out, because it
    describes them; so are hidden and binary files, metadata, runs of this program, held-out splits beside training
    splits, and JSON and CSV files beside text.

    name: of the parameter that holds `data`, for messages.

    Raises:
        ValueError: if `data` does not exist or is binary, if no file holds documents, or if `field` is set although
            only text files do.
    """
    found = _library() if data == STDLIB else _find(data, name)
    if field not in ("", TEXT_FIELD) and found.files and not any(file.has_fields for file in found.files):
        raise ValueError(
            f"data_field={field!r} is for JSON, CSV, Parquet and Arrow files, and {name}={data} has none: unset it"
        )
    if not found.files:
        left_out = found.left_out_line()
        raise ValueError(f"{name}={data} is empty: no file in it holds documents{f' ({left_out})' if left_out else ''}")
    return found


def without(files: DataFiles, others: DataFiles, reason: str) -> DataFiles:
    """Leave out the files that are also in `others`.

    Raises:
        ValueError: if none are left.
    """
    named = {file.path.resolve() for file in others.files}
    kept = tuple(file for file in files.files if file.path.resolve() not in named)
    if not kept:
        raise ValueError(f"all files of {files.root} are {reason}: no other data is left")
    if len(kept) == len(files.files):
        return files
    gone = (os.path.relpath(file.path, files.root) for file in files.files if file not in kept)
    return replace(files, files=kept, left_out={**files.left_out, reason: tuple(gone)})


def _find(data: str, name: str) -> DataFiles:
    root = Path(data).expanduser()
    if root.is_dir():
        return _find_below(root)
    if not root.is_file():
        raise ValueError(f"{name}={data} does not exist: give a file ({SUPPORTED}), a directory, or {STDLIB}")
    file = DataFile(root, format_of(root))
    if file.format == "text" and is_binary(root):
        raise ValueError(f"{name}={data} is a binary file: give one of these: {SUPPORTED}")
    return DataFiles(root.parent, (file,) if root.stat().st_size else ())


def format_of(path: Path) -> str:
    """Return the format of a file by its suffixes."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return FORMATS.get(Path(name).suffix, "text")


def _library() -> DataFiles:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path for path in root.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(root).parts))
    return DataFiles(root, tuple(DataFile(path, "text") for path in sorted(paths) if path.stat().st_size))


def _find_below(root: Path) -> DataFiles:
    left_out: dict[str, list[str]] = defaultdict(list)
    files = []
    for path, reason in sorted(_walk(root)):
        if reason:
            left_out[reason].append(os.path.relpath(path, root))
        else:
            files.append(DataFile(path, format_of(path)))
    taken = []
    rules = (_held_out(files, root), _of_another_kind(files))
    for file in files:
        reason = next((rule[file] for rule in rules if file in rule), "")
        if reason:
            left_out[reason].append(os.path.relpath(file.path, root))
        else:
            taken.append(file)
    return DataFiles(root, tuple(taken), {reason: tuple(names) for reason, names in left_out.items()})


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield what is below `root`, each file and directory once, with the reason to leave it out or nothing."""
    seen: set[Path] = set()
    for name, subfolders, names in os.walk(root, followlinks=True):
        folder = Path(name)
        if folder.resolve() in seen:  # a link to a directory that is above or was visited
            subfolders.clear()
            continue
        seen.add(folder.resolve())
        if (folder / METRICS_FILE).exists() and (folder / "config.yaml").exists():
            subfolders.clear()
            yield folder, "a run of this program"
            continue
        yield from ((folder / hidden, "hidden") for hidden in (*subfolders, *names) if hidden.startswith("."))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from ((folder / name, _unusable(folder / name)) for name in names if not name.startswith("."))


def _unusable(path: Path) -> str:
    if not path.is_file():
        return "not a file"
    if not path.stat().st_size:
        return "empty"
    if path.name.lower() in METADATA:
        return "metadata"
    return "binary" if format_of(path) == "text" and is_binary(path) else ""


def _held_out(files: list[DataFile], root: Path) -> dict[DataFile, str]:
    """Return the files of held-out splits, by the words in their names, if others are of a training split."""
    words = {
        file: set(re.split(r"[^a-z]+", str(file.path.relative_to(root)).lower())) for file in files if file.has_fields
    }
    if not any(TRAINING & found for found in words.values()):
        return {}
    return {file: "held-out split" for file, found in words.items() if HELD_OUT & found and not TRAINING & found}


def _of_another_kind(files: list[DataFile]) -> dict[DataFile, str]:
    """Return the text files of a directory of records, or the records of a directory of text."""
    texts = [file for file in files if not file.has_fields]
    certain = [file for file in files if file.has_fields and file.format not in AMBIGUOUS]
    ambiguous = [file for file in files if file.format in AMBIGUOUS]
    only_about = all(file.path.name.lower().partition(".")[0] in ABOUT_DATA for file in texts)
    if certain or (ambiguous and only_about):
        return dict.fromkeys(texts, "text beside records")
    return dict.fromkeys(ambiguous, "records beside text") if texts else {}
