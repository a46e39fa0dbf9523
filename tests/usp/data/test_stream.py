"""Documents, tokenizers and packing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import AutoTokenizer, ByT5Tokenizer

import usp.data.documents
import usp.data.stream
from usp.data.documents import JsonLinesUnit, TextUnit, open_source
from usp.data.packing import PackedSequences, ShuffleWindow, TokenStream
from usp.data.stream import BatchStream
from usp.data.tokenizer import BYTE_VOCAB, ByteTokenizer, Ids
from usp.hf.tokenizers import load_tokenizer, save_tokenizer


def documents_of(data: Path | str, field: str = "text") -> list[bytes]:
    return [document for unit in open_source(str(data), field) for document in unit.read()]


# Documents


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xff")
    assert documents_of(tmp_path / "a.txt") == [b"one\ntwo\xff"]


def test_json_lines_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": "zwei \\u00fc"}\n{"text": ""}')
    assert documents_of(tmp_path / "a.jsonl") == [b"one", "zwei ü".encode()]


@pytest.mark.parametrize("range_bytes", [1, 7, 20, 64, 1000])
def test_ranges_of_json_lines_hold_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, range_bytes: int
) -> None:
    texts = [f"document {'x' * (number % 5)}{number}" for number in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(usp.data.documents, "RANGE_BYTES", range_bytes)
    assert documents_of(tmp_path / "a.jsonl") == [text.encode() for text in texts]


def test_parquet_rows_are_documents_and_row_groups_are_units(tmp_path: Path) -> None:
    table = pa.table({"content": ["one", None, "two", "", "three"], "id": [1, 2, 3, 4, 5]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert len(open_source(str(tmp_path / "a.parquet"), "content")) == 3
    assert documents_of(tmp_path / "a.parquet", "content") == [b"one", b"two", b"three"]


def test_suffixes_are_case_insensitive(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["p"]}), tmp_path / "b.PARQUET")
    (tmp_path / "a.JSONL").write_text('{"text": "j"}\n')
    assert documents_of(tmp_path) == [b"j", b"p"]
    assert documents_of(tmp_path / "a.JSONL") == [b"j"]


def test_a_directory_is_all_its_visible_text_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub" / "a.md").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".git" / "d").write_text("hidden")
    assert documents_of(tmp_path) == [b"b", b"a"]


def test_stdlib_excludes_packages_and_tests() -> None:
    units = open_source("stdlib", "text")
    names = {unit.path.name for unit in units}
    with pytest.raises(ValueError, match="data_field='body' is for"):
        open_source("stdlib", "body")
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any({"site-packages", "test"} & set(unit.path.parts) for unit in units)


@pytest.mark.parametrize(
    ("name", "content", "field", "said"),
    [
        ("missing.txt", None, "text", "does not exist: give a text, .jsonl or .parquet file, a directory, or stdlib"),
        ("empty.txt", b"", "text", "is empty: no file in it holds text"),
        ("empty.jsonl", b"", "text", "is empty: no file in it holds text"),
        ("binary", b"\0\1", "text", "is a binary file"),
        ("a.jsonl", b'{"txt": "x"}', "text", r"no key data_field='text' \(did you mean 'txt'\?\); it has 'txt'"),
        ("a.jsonl", b'{"text": 3}', "text", "'text' must hold text, got int"),
        ("a.jsonl", b'{"text": "a"}\nnot json', "text", "line at byte 14: not JSON"),
        ("a.parquet", b"not parquet", "text", "is not a Parquet file"),
        ("A.PARQUET", b"not parquet", "text", "is not a Parquet file"),
        ("a.json", b'[{"text": "a"}]', "text", "is a single JSON document: convert it to .jsonl, one object per line"),
        (
            "a.txt",
            b"a",
            "body",
            "data_field='body' is for .jsonl and .parquet files, and data=.*a.txt has none: unset",
        ),
    ],
)
def test_data_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes | None, field: str, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        documents_of(tmp_path / name, field)


def test_a_missing_or_wrong_parquet_column_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"content": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"no column data_field='contents'.*did you mean 'content'"):
        open_source(str(tmp_path), "contents")
    with pytest.raises(ValueError, match=r"column 'id' must hold text \(string\), got int64"):
        open_source(str(tmp_path), "id")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty"):
        open_source(str(tmp_path), "text")


# Tokenizers


@given(st.text())
def test_byte_ids_are_those_of_byt5(text: str) -> None:
    if not any(special in text for special in ("</s>", "<pad>", "<unk>", "<extra_id_")):
        assert ByteTokenizer().encode(text.encode()).tolist() == BYT5.encode(text)


BYT5 = ByT5Tokenizer()


def test_the_byte_tokenizer_is_saved_next_to_the_checkpoint(tmp_path: Path) -> None:
    save_tokenizer(load_tokenizer("bytes"), tmp_path / "checkpoint")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert loaded.encode("grün") == ByteTokenizer().encode("grün".encode()).tolist()
    assert len(loaded) == BYTE_VOCAB


def test_a_local_tokenizer_ends_each_document(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "given")
    tokenizer = load_tokenizer(str(tmp_path / "given"))
    assert tokenizer.vocab_size == BYTE_VOCAB
    assert tokenizer.encode(b"ab").tolist() == [100, 101, 1]
    save_tokenizer(tokenizer, tmp_path / "checkpoint")
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint").encode("ab") == [100, 101, 1]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="transformers cannot read it"):
        load_tokenizer(str(tmp_path))


# Packing


def units_of(tmp_path: Path, lengths: list[int]) -> list[TextUnit]:
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_bytes(bytes([number]) * length)
    return [TextUnit(tmp_path / f"{number}.txt") for number in range(len(lengths))]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 16))
def test_packing_loses_nothing_and_marks_every_boundary(lengths: list[int], seq_len: int) -> None:
    documents = [np.full(length, number, dtype=np.int64) for number, length in enumerate(lengths)]
    packed = list(PackedSequences(iter(documents), seq_len))
    stream = np.concatenate(documents)
    whole = len(stream) // seq_len
    assert len(packed) == whole
    for number, (ids, boundaries) in enumerate(packed):
        assert ids.tolist() == stream[number * seq_len : (number + 1) * seq_len].tolist()
        changes = (np.flatnonzero(np.diff(ids)) + 1).tolist()
        assert boundaries == [0, *changes, seq_len]


def test_boundaries_are_padded_by_repeating_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usp.data.stream, "WINDOW_TOKENS", 2**12)
    batch = next(
        BatchStream(units_of(tmp_path, [3, 4, 30]), ByteTokenizer(), rows=3, seq_len=8, seed=0, vocab_size=384)
    )
    assert batch.ids.shape == (3, 8) and batch.ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    for ids, boundaries in zip(batch.ids, batch.cu_seqlens.tolist(), strict=True):
        assert boundaries[0] == 0 and boundaries[-1] == 8 and boundaries == sorted(boundaries)
        ends = {boundary for boundary in boundaries if 0 < boundary < 8}
        assert {int(place) + 1 for place in (ids[:-1] == 1).nonzero()} == ends  # the end of sequence is id 1


def stream_of(tmp_path: Path, seed: int) -> Iterator[Ids]:
    return TokenStream(units_of(tmp_path, [2] * 20), ByteTokenizer(), seed)


def test_an_epoch_has_each_document_once_and_the_next_another_order(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, seed=0)
    first, second = ([int(ids[0]) for ids in itertools.islice(stream, 20)] for _ in range(2))
    assert sorted(first) == sorted(second) == [number + 3 for number in range(20)]
    assert first != second


def test_the_seed_fixes_the_order(tmp_path: Path) -> None:
    orders = [[int(ids[0]) for ids in itertools.islice(stream_of(tmp_path, seed), 20)] for seed in (7, 7, 8)]
    assert orders[0] == orders[1] != orders[2]


def test_a_window_shuffles_and_loses_nothing() -> None:
    drawn = list(itertools.islice(ShuffleWindow(itertools.count(), 10, seed=0), 1000))
    assert len(set(drawn)) == 1000 and drawn != sorted(drawn)
    assert all(number <= place + 10 for place, number in enumerate(drawn))
    assert drawn == list(itertools.islice(ShuffleWindow(itertools.count(), 10, seed=0), 1000))
    assert list(itertools.islice(ShuffleWindow(itertools.count(), 1, seed=0), 5)) == [0, 1, 2, 3, 4]


def test_any_number_of_rows_yields_the_same_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usp.data.stream, "WINDOW_TOKENS", 2**12)
    units = units_of(tmp_path, [5, 17, 9, 30, 2])

    def rows(per_batch: int) -> torch.Tensor:
        batches = BatchStream(units, ByteTokenizer(), rows=per_batch, seq_len=8, seed=3, vocab_size=384)
        return torch.cat([batch.ids for batch in itertools.islice(batches, 12 // per_batch)])

    for per_batch in (2, 3, 4, 12):
        assert torch.equal(rows(per_batch), rows(1))


def test_rows_are_slices_and_digests_tell_batches_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usp.data.stream, "WINDOW_TOKENS", 2**12)
    batches = BatchStream(units_of(tmp_path, [5, 17, 9]), ByteTokenizer(), rows=4, seq_len=8, seed=0, vocab_size=384)
    batch = next(batches)
    part = batch.rows(1, 3)
    assert torch.equal(part.ids, batch.ids[1:3]) and torch.equal(part.cu_seqlens, batch.cu_seqlens[1:3])
    assert batch.digest() == batch.rows(0, 4).digest() != part.digest()
    assert next(batches).digest() != batch.digest()


def test_an_id_without_an_embedding_is_refused(tmp_path: Path) -> None:
    units = units_of(tmp_path, [50] * 8)
    batches = BatchStream(units, ByteTokenizer(), rows=1, seq_len=400, seed=0, vocab_size=10)
    with pytest.raises(ValueError, match=r"produced token id 10, .* ids 0 to 9 \(vocabulary size 10\): use the model"):
        next(batches)


def test_data_of_empty_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    batches = BatchStream(
        open_source(str(tmp_path), "text"), ByteTokenizer(), rows=1, seq_len=4, seed=0, vocab_size=384
    )
    with pytest.raises(ValueError, match="holds no text"):
        next(batches)


# Resuming


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[JsonLinesUnit]]:
    """Units of several documents each, some empty, some longer than a sequence, and one unit without text."""
    folder = tmp_path_factory.mktemp("units")
    lengths = [[3, 0, 41, 7], [0], [19], [2, 2, 2, 2, 0], [60, 1]]
    found = []
    for number, row in enumerate(lengths):
        path = folder / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": chr(65 + number) * length}) + "\n" for length in row))
        found.append(JsonLinesUnit(path, "text", 0, path.stat().st_size))
    with mock.patch("usp.data.stream.WINDOW_TOKENS", 64):
        yield found


@dataclass(frozen=True)
class CountingTokenizer(ByteTokenizer):
    """Byte tokenizer that records the documents it encodes."""

    documents: list[bytes] = field(default_factory=list)

    def encode(self, document: bytes) -> Ids:
        self.documents.append(document)
        return super().encode(document)


def batches_of(units: list[JsonLinesUnit], **changed: Any) -> BatchStream:
    options = {"tokenizer": ByteTokenizer(), "rows": 1, "seq_len": 8, "seed": 0, "vocab_size": 384} | changed
    return BatchStream(units, options.pop("tokenizer"), **options)


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a checkpoint restores it: JSON values, and tensors separately."""
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return json.loads(json.dumps({key: value for key, value in state.items() if key not in tensors})) | tensors


def rows_of(batches: BatchStream, count: int) -> list[tuple[list[int], list[int]]]:
    chosen = itertools.islice(batches, count)
    return [
        (ids, sorted(set(boundaries)))
        for batch in chosen
        for ids, boundaries in zip(batch.ids.tolist(), batch.cu_seqlens.tolist(), strict=True)
    ]


@settings(deadline=None)
@given(
    seq_len=st.sampled_from([1, 3, 8, 25, 100]),
    seed=st.integers(0, 3),
    rows=st.integers(1, 4),
    batches_before=st.integers(0, 40),
    rows_after=st.integers(1, 4),
    peek=st.booleans(),
)
def test_a_stream_resumes_at_any_batch_with_any_number_of_rows(
    units: list[JsonLinesUnit], seq_len: int, seed: int, rows: int, batches_before: int, rows_after: int, peek: bool
) -> None:
    """Nothing is lost or repeated, whatever the batch size before the checkpoint."""
    first = batches_of(units, seq_len=seq_len, seed=seed, rows=rows)
    before = rows_of(first, batches_before)
    if peek:
        assert first.peek() is first.peek()
    state = stored(first.state_dict())
    assert state["sequences"] == len(before)
    second = batches_of(units, seq_len=seq_len, seed=seed, rows=rows_after)
    second.load_state_dict(state)
    after = rows_of(second, 12)
    whole = rows_of(batches_of(units, seq_len=seq_len, seed=seed), len(before) + len(after))
    assert before + after == whole
    rest = rows_of(first, 3)
    assert rest == rows_of(batches_of(units, seq_len=seq_len, seed=seed), len(before) + len(rest))[len(before) :]


def test_the_state_of_a_resumed_stream_is_that_of_the_unbroken_one(units: list[JsonLinesUnit]) -> None:
    unbroken, continued = batches_of(units), batches_of(units)
    rows_of(unbroken, 37)
    for step in (0, 9, 11, 17):
        rows_of(continued, step)
        again = batches_of(units)
        again.load_state_dict(stored(continued.state_dict()))
        continued = again
    expected, state = unbroken.state_dict(), continued.state_dict()
    for name in ("window_ids", "window_borders"):
        assert torch.equal(expected.pop(name), state.pop(name))
    assert expected == state


def test_resuming_tokenizes_only_one_document_again(units: list[JsonLinesUnit]) -> None:
    tokenizer = CountingTokenizer()
    batches = batches_of(units, tokenizer=tokenizer)
    rows_of(batches, 200)
    last, read = tokenizer.documents[-1], len(tokenizer.documents)
    second = CountingTokenizer()
    continued = batches_of(units, tokenizer=second)
    continued.load_state_dict(batches.state_dict())
    probed = len(second.documents)
    next(continued)
    assert read > 100 and second.documents[probed] == last and len(second.documents) <= probed + 10


def test_a_moved_directory_is_the_same_data(units: list[JsonLinesUnit], tmp_path: Path) -> None:
    moved = []
    for unit in units:
        (tmp_path / unit.path.name).write_bytes(unit.path.read_bytes())
        moved.append(replace(unit, path=tmp_path / unit.path.name))
    batches = batches_of(moved)
    batches.load_state_dict(batches_of(units).state_dict())


def test_another_stream_cannot_be_resumed(units: list[JsonLinesUnit]) -> None:
    state = batches_of(units).state_dict()
    other = batches_of(units[:-1], seq_len=16, seed=5, tokenizer=replace(ByteTokenizer(), vocab_size=300))
    before = rows_of(other, 3)
    with pytest.raises(ValueError, match="has seq_len = 8") as caught:
        other.load_state_dict(state)
    said = str(caught.value)
    for part in (
        "seq_len = 16, but the stream to resume has seq_len = 8",
        "seed = 5, but the stream to resume has seed = 0",
        "data = 4 units",
        "has data = 5 units",
        "tokenizer = vocabulary size 300",
        "has tokenizer = vocabulary size 384",
    ):
        assert part in said
    assert (
        rows_of(other, 3)
        == rows_of(batches_of(units[:-1], seq_len=16, seed=5, tokenizer=replace(ByteTokenizer(), vocab_size=300)), 6)[
            len(before) :
        ]
    )
