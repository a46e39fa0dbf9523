"""Which files of a data set hold documents, and reading them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, ipc, parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import usp.data.documents
from usp.data.chats import NoText
from usp.data.documents import read_pieces
from usp.data.sources import find_files

TEXTS = ["one", "zwei ü, with a comma", 'three\nlines "quoted"\n语言']
TABLE = pa.table({"text": TEXTS, "id": [1, 2, 3]})


def documents_of(data: Path | str, field: str = "text") -> list[str]:
    documents, begun = [], ""
    for file in find_files(str(data), field).files:
        for text, finishes in (piece for piece in read_pieces(file, field) if not isinstance(piece[0], NoText)):
            begun += text
            if finishes:
                documents.append(begun)
                begun = ""
    assert not begun
    return documents


def lines(rows: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def arrow_stream(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, ipc.new_stream(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)


def arrow_file(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, ipc.new_file(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)


def tsv(path: Path) -> None:
    csv.write_csv(TABLE, path, csv.WriteOptions(delimiter="\t"))


ROWS: list[dict[str, object]] = TABLE.to_pylist()
WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "a.JSONL": lambda path: path.write_bytes(lines(ROWS)),
    "a.ndjson": lambda path: path.write_bytes(lines(ROWS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(lines(ROWS))),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(lines(ROWS))),
    "a.jsonl.zst": lambda path: path.write_bytes(zstd(lines(ROWS))),
    "array.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": lambda path: path.write_bytes(lines(ROWS)),
    "array.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.csv": lambda path: csv.write_csv(TABLE, path),
    "a.csv.gz": lambda path: csv.write_csv(TABLE, pa.CompressedOutputStream(str(path), "gzip")),
    "a.tsv": tsv,
    "a.parquet": lambda path: parquet.write_table(TABLE, path, row_group_size=2),
    "a.PARQUET": lambda path: parquet.write_table(TABLE, path),
    "stream.arrow": arrow_stream,
    "file.arrow": arrow_file,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_holds_the_same_documents(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert documents_of(tmp_path / name) == documents_of(tmp_path) == TEXTS


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd])
def test_text_is_read_in_its_encoding(tmp_path: Path, coding: str, compress: Callable[[bytes], bytes]) -> None:
    suffix = {bytes: "", gzip.compress: ".gz", zstd: ".zst"}[compress]
    (tmp_path / f"a.txt{suffix}").write_bytes(compress("größer\r\n语言".encode(coding)))
    assert documents_of(tmp_path) == ["größer\r\n语言"]


def test_bytes_that_are_not_utf8_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xff")
    assert documents_of(tmp_path / "a.txt") == ["one\ntwo\ufffd"]


def test_csv_has_long_rows_and_encodings(tmp_path: Path) -> None:
    long = "a long line\n" * 20_000
    content = f'id,text\r\n1,"{long}"\r\n\r\n2,ü\r\n'
    for coding in ("utf-8-sig", "utf-16"):
        (tmp_path / "a.csv").write_bytes(content.encode(coding))
        assert documents_of(tmp_path) == [long, "ü"]


def test_empty_and_missing_texts_are_skipped(tmp_path: Path) -> None:
    rows = [{"text": ""}, {"text": None}, {"text": "a"}]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    parquet.write_table(pa.table({"text": ["", None, "b"]}), tmp_path / "b.parquet")
    assert documents_of(tmp_path) == ["a", "b"]


# Cutting into pieces


@pytest.mark.slow
@given(st.lists(st.text(alphabet="ab \n", max_size=30), max_size=5), st.integers(1, 12))
def test_pieces_are_the_text_and_are_bounded(chunks: list[str], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usp.data.documents, "PIECE", piece)
        found = list(usp.data.documents._in_pieces(chunks))
    whole = "".join(chunks)
    assert "".join(text for text, _ in found) == whole
    assert [finishes for _, finishes in found] == [False] * (len(found) - 1) + [True] * bool(whole)
    assert all(text for text, _ in found)


def test_text_is_cut_where_a_line_begins_or_else_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usp.data.documents, "PIECE", 8)
    cut = usp.data.documents._place_to_cut
    assert cut("one two\nthree") == len("one two\n")
    assert cut("one two three") == len("one two ")
    assert cut("one\n\n\n\n  two") == len("one\n\n\n\n  ")
    assert cut("onetwothree") == len("onetwothre")


# Memory

TEXT = "some words of a line\n" * 50_000  # 1 MiB
# Prints the peak memory in KiB after tokenizing each file: not getrusage's, which includes the process that started it.
TOKENIZE = r"""
import re, shutil, sys
from pathlib import Path
from usp.data.cache import cached_store
from usp.data.sources import find_files
from usp.data.tokenizer import ByteTokenizer

folder, cache, *files = sys.argv[1:]
tokenizer = ByteTokenizer()
if folder:
    from usp.hf.tokenizers import load_tokenizer
    tokenizer = load_tokenizer(folder)
for data in files:
    cached_store(find_files(data, "text"), "text", tokenizer, Path(cache))
    shutil.rmtree(cache)
    print(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
"""


def table(size: int) -> pa.Table:
    """So many MiB, in documents of about 1,000 characters."""
    return pa.table({"text": [f"{number} {TEXT[:1000]}" for number in range(1000 * size)]})


def write_text(path: Path, size: int) -> None:
    with path.open("w") as file:
        file.writelines([TEXT] * size)


def write_line(path: Path, size: int) -> None:
    with path.open("w") as file:
        file.writelines([TEXT.replace("\n", " ")] * size)


def write_lines(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.writelines(lines([{"text": TEXT}]) for _ in range(size))


def write_array(path: Path, size: int) -> None:
    path.write_text(json.dumps([{"text": TEXT}] * size, indent=1))


def write_parquet(path: Path, size: int) -> None:
    """One row group."""
    parquet.write_table(table(size), path, compression="none", row_group_size=10**9)


def write_repeated(path: Path, size: int) -> None:
    """One row group of equal documents, which Parquet stores once."""
    parquet.write_table(pa.table({"text": [TEXT[: len(TEXT) // 8]] * 8 * size}), path, row_group_size=10**9)


def write_arrow(path: Path, size: int) -> None:
    """One record batch."""
    with pa.OSFile(str(path), "wb") as file, ipc.new_file(file, TABLE.schema.remove(1)) as writer:
        writer.write_table(table(size))


LARGE_WRITERS: dict[str, Callable[[Path, int], None]] = {
    "text.txt": write_text,
    "one-line.txt": write_line,
    "lines.jsonl": write_lines,
    "array.json": write_array,
    "table.csv": lambda path, size: csv.write_csv(table(size), path),
    "one-group.parquet": write_parquet,
    "repeated.parquet": write_repeated,
    "one-batch.arrow": write_arrow,
}


def peaks(files: list[Path], tokenizer: Path | str = "") -> list[float]:
    """Tokenize the files one after another in a process of its own, and return its peak memory in MiB after each."""
    command = [sys.executable, "-c", TOKENIZE, str(tokenizer), str(files[0].parent / "cache"), *map(str, files)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(line) / 1024 for line in ended.stdout.splitlines() if line.isdigit()]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Files of 48 MiB in each format are tokenized with less than 32 MiB more than files of 8 MiB.

    Files of 1 MiB do not fill the buffers of Arrow's allocator, which grow to 50 MiB whatever the size of a file.
    """
    files = []
    for size in (8, 48):
        for name, write in LARGE_WRITERS.items():
            files.append(tmp_path / f"{size}-{name}")
            write(files[-1], size)
    found = peaks(files)
    small, *large = found[len(LARGE_WRITERS) - 1 :]
    growth = dict(zip(LARGE_WRITERS, (peak - small for peak in large), strict=True))

    assert all(each < 32 for each in growth.values()), str(growth)


@pytest.mark.slow
def test_a_tokenizer_gets_little_text_at_a_time(tmp_path: Path) -> None:
    """Tokenizers of transformers need more than 100 bytes of memory for a character."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    bpe.train_from_iterator([TEXT], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(tmp_path / "tokenizer")
    files = [tmp_path / "small.txt", tmp_path / "large.txt"]
    files[0].write_text(TEXT[:1000])
    write_text(files[1], 4)
    small, large = peaks(files, tmp_path / "tokenizer")

    assert large - small < 160


# Directories


def test_lines_of_json_without_a_suffix_are_records(tmp_path: Path) -> None:
    for name, content in (("part-00000", lines(ROWS[:2])), ("part-00001.gz", gzip.compress(lines(ROWS[2:])))):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "README").write_text("about")
    assert documents_of(tmp_path) == TEXTS and documents_of(tmp_path / "part-00000") == TEXTS[:2]
    (tmp_path / "main.py").write_text("print()")  # now a directory of text, which may have such files
    assert len(documents_of(tmp_path)) == 4 and documents_of(tmp_path)[2].startswith('{"text"')
    for content in ("{\n", "{broken}\n{}", "[1]", "text"):
        (tmp_path / "other").write_text(content)
        assert documents_of(tmp_path / "other") == [content]


def test_records_beside_a_readme_are_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines([{"text": "a"}])))
    (tmp_path / "README.md").write_text("about")
    assert documents_of(tmp_path) == ["a"]
    assert find_files(str(tmp_path), "text").left_out_line() == "left out: README.md (text beside records)"


def test_csv_beside_a_license_is_the_data_and_settings_beside_text_are_not(tmp_path: Path) -> None:
    for name in ("table", "program"):
        (tmp_path / name).mkdir()
    (tmp_path / "table" / "a.csv").write_text("text\na\n")
    (tmp_path / "table" / "LICENSE").write_text("about")
    (tmp_path / "program" / "main.py").write_text("print()")
    (tmp_path / "program" / "package.json").write_text("{}")
    assert documents_of(tmp_path / "table") == ["a"]
    assert documents_of(tmp_path / "program") == ["print()"]
    assert find_files(str(tmp_path / "program"), "text").left_out == {"records beside text": ("package.json",)}


def test_a_folder_of_save_to_disk_is_the_files_in_its_state(tmp_path: Path) -> None:
    """Without what `map` and `shuffle` cache beside them; of several splits, those that are not held out."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for name in ("data-00000-of-00001.arrow", "cache-26c35cbd4a5c331a.arrow"):
            arrow_stream(tmp_path / split / name)
        (tmp_path / split / "dataset_info.json").write_text('{"description": "not a document"}')
        (tmp_path / split / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert documents_of(tmp_path) == documents_of(tmp_path / "train") == documents_of(tmp_path / "test") == TEXTS
    assert len(find_files(str(tmp_path), "text").left_out["not in state.json"]) == 2


@pytest.mark.parametrize("name", ["{}-00000-of-00001.jsonl", "{}.jsonl", "{}/part.jsonl", "data/my-{}.jsonl"])
def test_held_out_splits_are_left_out_beside_training_splits(tmp_path: Path, name: str) -> None:
    for split in ("train", "test", "validation"):
        path = tmp_path / name.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines([{"text": split}]))
    assert documents_of(tmp_path) == ["train"]
    assert len(find_files(str(tmp_path), "text").left_out["held-out split"]) == 2


def test_test_files_of_a_program_are_text(tmp_path: Path) -> None:
    for name in ("train.py", "test_model.py"):
        (tmp_path / name).write_text(name)
    assert documents_of(tmp_path) == ["test_model.py", "train.py"]


def test_linked_directories_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "broken").symlink_to(tmp_path / "nothing")
    assert documents_of(tmp_path / "data") == ["a"]
    assert find_files(str(tmp_path / "data"), "text").left_out["not a file"] == ("broken",)


def test_hidden_binary_and_empty_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d").write_text("hidden")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.md").write_text("a")
    assert documents_of(tmp_path) == ["a"]
    left_out = {"hidden": (".git",), "binary": ("c.png",), "empty": ("empty.txt",)}
    assert find_files(str(tmp_path), "text").left_out == left_out


def test_the_files_of_a_run_are_not_data(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "a"}]))
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "runs" / "first" / name).write_text("{}")
    assert documents_of(tmp_path) == ["a"]
    assert find_files(str(tmp_path), "text").left_out["a run of this program"] == (str(Path("runs", "first")),)


def test_stdlib_excludes_packages_and_tests() -> None:
    files = find_files("stdlib", "text").files
    with pytest.raises(ValueError, match="data_field='body' is for"):
        find_files("stdlib", "body")
    assert {"argparse.py", "dataclasses.py"} <= {file.path.name for file in files}
    assert not any({"site-packages", "test"} & set(file.path.parts) for file in files)


# Data that cannot be read


@pytest.mark.parametrize(
    ("name", "content", "field", "said"),
    [
        ("missing.txt", None, "text", "does not exist: give a file"),
        ("empty.txt", b"", "text", "is empty: no file in it holds documents"),
        ("empty.jsonl", b"", "text", "is empty: no file in it holds documents"),
        ("binary", b"\0\1", "text", "is a binary file"),
        (
            "a.jsonl",
            b'{"txt": "x"}',
            "text",
            r"line 1: no key data_field='text' \(did you mean 'txt'\?\); it has 'txt'",
        ),
        ("a.jsonl", b'{"text": 3}', "text", "'text' must hold text, got int"),
        ("a.jsonl", b'{"text": "a"}\nnot json', "text", "line 2: not JSON"),
        ("a.json", b'[{"text": "a"}, {"body": "b"}]', "text", "object 2: no key data_field='text'"),
        ("a.json", b'[{"text": "a"}, {"text": ', "text", "not JSON"),
        ("a.json", b'{"data": [{"text": "a"}]}', "text", "no key data_field='text'; it has 'data'"),
        ("a.csv", b"body\nx\n", "text", "no column data_field='text'; it has 'body'"),
        ("a.csv", b"text,id\nx\n", "text", "line 2: not CSV .1 values instead of 2"),
        ("a.csv", b'text\n"x', "text", "line 2: not CSV .unexpected end of data"),
        ("a.jsonl.gz", b"not gzip", "text", "is damaged"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS))[:-9], "text", "is damaged"),
        ("a.jsonl.zst", b"not zstd", "text", "is damaged"),
        ("a.parquet", b"not parquet", "text", "is not a Parquet file"),
        ("A.PARQUET", b"not parquet", "text", "is not a Parquet file"),
        ("a.arrow", b"not arrow at all", "text", "is not an Arrow file"),
        ("a.txt", b"a", "body", "data_field='body' is for JSON, CSV, Parquet and Arrow files, and data=.*a.txt has"),
    ],
)
def test_data_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes | None, field: str, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        documents_of(tmp_path / name, field)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_a_missing_or_wrong_column_is_refused(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    with pytest.raises(ValueError, match=r"no column data_field='texts'.*did you mean 'text'"):
        documents_of(tmp_path, "texts")
    with pytest.raises(ValueError, match=r"column 'id' must hold text \(string\), got int64"):
        documents_of(tmp_path, "id")


def test_an_empty_directory_is_refused_and_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(ValueError, match=r"is empty: no file in it holds documents \(left out: c.png \(binary\)\)"):
        find_files(str(tmp_path), "text")
