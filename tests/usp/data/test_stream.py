"""Token stores, packing and batches."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import usp.data.cache
import usp.data.documents
import usp.data.tokenizing
from usp.data.batches import BatchReader, BatchStream, Part, one_epoch, read_batch
from usp.data.cache import cached_store
from usp.data.rows import PackedRows
from usp.data.sources import find_files
from usp.data.store import TokenStore
from usp.data.tokenizer import ByteTokenizer

LENGTHS = [3, 0, 41, 7, 0, 19, 2, 2, 2, 2, 60, 1]


def store_of(tmp_path: Path, lengths: list[int] = LENGTHS) -> TokenStore:
    """A store of documents of these many letters, A, B, C, ..., one letter each."""
    rows = [{"text": chr(65 + number) * length} for number, length in enumerate(lengths)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return opened(tmp_path / "data.jsonl", tmp_path / "cache")


def opened(data: Path, cache: Path) -> TokenStore:
    return cached_store(find_files(str(data), "text"), "text", ByteTokenizer(), cache)


def ends_of(store: TokenStore) -> np.ndarray:
    return store.bounds(np.arange(store.manifest.documents))[1]


def read(packed: PackedRows, number: int) -> tuple[np.ndarray, list[int]]:
    """The ids of a row and its boundaries."""
    batch = read_batch(packed, range(number, number + 1), Part.whole(1, packed.seq_len))
    return batch.input_ids[0].numpy(), batch.cu_seqlens[0].tolist()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return store_of(tmp_path_factory.mktemp("store"))


# Stores


def test_a_store_holds_every_document_with_its_end(store: TokenStore) -> None:
    documents = np.split(store.read(0, store.manifest.tokens), ends_of(store)[:-1])
    expected = [[65 + 3 + number] * length + [1] for number, length in enumerate(LENGTHS) if length]
    assert [document.tolist() for document in documents] == expected
    manifest = store.manifest
    assert (manifest.files, manifest.documents, manifest.characters) == (1, len(expected), sum(LENGTHS))
    assert manifest.dtype == "uint16" and manifest.tokens == sum(LENGTHS) + len(expected)


def test_long_documents_are_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usp.data.documents, "PIECE", 16)
    monkeypatch.setattr(usp.data.tokenizing, "BATCH_CHARACTERS", 32)
    text = "some words\nand lines " * 20
    (tmp_path / "a.txt").write_text(text)
    found = opened(tmp_path / "a.txt", tmp_path / "cache")
    assert found.read(0, found.manifest.tokens).tolist() == [*ByteTokenizer().encode(text), 1]
    assert ends_of(found).tolist() == [len(text) + 1]


def test_data_is_tokenized_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(usp.data.cache, "LARGE", 0)
    first = store_of(tmp_path, [5, 5])
    assert "tokenizing 1 files" in capsys.readouterr().out
    again = opened(tmp_path / "data.jsonl", tmp_path / "cache")
    assert not capsys.readouterr().out and again.manifest == first.manifest
    content = (tmp_path / "data.jsonl").read_bytes()
    (tmp_path / "data.jsonl").write_bytes(content.replace(b"AAAAA", b"AAXAA"))  # of the same size
    os.utime(tmp_path / "data.jsonl", ns=(0, 0))
    changed = opened(tmp_path / "data.jsonl", tmp_path / "cache")
    assert "tokenizing" in capsys.readouterr().out and changed.manifest.digest != first.manifest.digest
    assert first.read(0, 5).tolist() == [68] * 5  # a run goes on with what it began with


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert store_of(tmp_path / "a").manifest.digest == store_of(tmp_path / "b").manifest.digest


def test_data_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')

    def append(line: str) -> None:
        with (tmp_path / "a.jsonl").open("a") as file:
            file.write('{"text": "b"}\n')

    (file,) = find_files(str(tmp_path / "a.jsonl"), "text").files
    pieces = usp.data.tokenizing._pieces(file, "text", usp.data.tokenizing.Place())
    next(pieces)
    append("")
    with pytest.raises(ValueError, match=r"a.jsonl changed while it was read"):
        list(pieces)


def test_data_of_empty_documents_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no text"):
        store_of(tmp_path, [0, 0])
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_truncated_store_is_refused(tmp_path: Path) -> None:
    store_of(tmp_path)
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"tokens.bin is damaged: it has 296 bytes instead of 298"):
        opened(tmp_path / "data.jsonl", tmp_path / "cache")


# Rows


@pytest.mark.slow
@given(seq_len=st.sampled_from([1, 3, 8, 25, 100, 1000]), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_an_epoch_has_every_token_and_marks_every_boundary(
    store: TokenStore, seq_len: int, seed: int, epoch: int
) -> None:
    packed = PackedRows(store, seq_len, seed)
    rows = [read(packed, epoch * packed.per_epoch + place) for place in range(packed.per_epoch)]
    counts = sum(np.bincount(ids, minlength=100) for ids, _ in rows)
    once = np.bincount(store.read(0, store.manifest.tokens), minlength=100)
    extra = packed.per_epoch * seq_len - store.manifest.tokens
    assert (counts >= once).all() and (counts - once).sum() == extra
    for ids, boundaries in rows:
        assert boundaries[0] == 0 and boundaries[-1] == seq_len and boundaries == sorted(set(boundaries))
        ends = {boundary for boundary in boundaries if 0 < boundary < seq_len}
        assert {int(place) + 1 for place in (ids[:-1] == 1).nonzero()[0]} == ends  # the end of sequence is id 1
        for begin, end in itertools.pairwise(boundaries):
            assert len(set(ids[begin:end]) - {1}) <= 1  # one letter


def test_the_seed_and_the_epoch_fix_the_order(store: TokenStore) -> None:
    def epoch(seed: int, number: int) -> list[list[int]]:
        packed = PackedRows(store, 8, seed)
        return [read(packed, number * packed.per_epoch + place)[0].tolist() for place in range(packed.per_epoch)]

    assert epoch(7, 0) == epoch(7, 0)
    assert len({str(epoch(seed, number)) for seed in (7, 8) for number in (0, 1)}) == 4


def test_a_batch_of_a_sorted_corpus_has_documents_of_all_its_parts(tmp_path: Path) -> None:
    """Long documents too: their rows are not neighbors."""
    packed = PackedRows(store_of(tmp_path, [2000] * 20), 100, seed=0)
    parts = {int(letter) for number in range(32) for letter in read(packed, number)[0] if letter != 1}
    assert len(parts) >= 14  # 32 draws of 20: 16 are expected


# Batches


def rows_of(batches: BatchStream, count: int) -> list[tuple[list[int], list[int]]]:
    chosen = itertools.islice(BatchReader(batches, Part.whole(batches.rows, batches.packed.seq_len)), count)
    return [
        (ids, sorted(set(boundaries)))
        for batch in chosen
        for ids, boundaries in zip(batch.input_ids.tolist(), batch.cu_seqlens.tolist(), strict=True)
    ]


def batches_of(store: TokenStore, *, rows: int = 1, seq_len: int = 8, seed: int = 0) -> BatchStream:
    return BatchStream(PackedRows(store, seq_len, seed), rows)


def test_boundaries_are_padded_by_repeating_the_last(store: TokenStore) -> None:
    packed = PackedRows(store, 8, seed=0)
    batch = read_batch(packed, range(12), Part.whole(12, 8))
    assert batch.input_ids.shape == (12, 8) and batch.input_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    for number, boundaries in enumerate(batch.cu_seqlens.tolist()):
        expected = read(packed, number)[1]
        assert boundaries == expected + [8] * (len(boundaries) - len(expected))


@pytest.mark.slow
@given(rows=st.integers(1, 5), seq_len=st.sampled_from([1, 3, 8, 25, 100, 1000]))
def test_one_epoch_has_a_target_for_every_token_once_and_in_order(store: TokenStore, rows: int, seq_len: int) -> None:
    """Except for the tokens that begin a document or a row."""
    batches = list(one_epoch(PackedRows(store, seq_len, seed=None), rows, Part.whole(rows, seq_len)))
    assert all(batch.input_ids.shape == batch.shift_labels.shape == (rows, seq_len) for batch in batches)
    ids, found = (
        torch.cat([getattr(each, name) for each in batches]).flatten() for name in ("input_ids", "shift_labels")
    )
    tokens = store.manifest.tokens
    whole = store.read(0, tokens)
    assert ids[:tokens].tolist() == whole.tolist() and len(ids) < tokens + rows * seq_len
    begins = {0, *ends_of(store).tolist(), *range(0, tokens, seq_len)}
    expected = [-100 if place + 1 in begins else int(whole[place + 1]) for place in range(tokens - 1)]
    assert found[: tokens - 1].tolist() == expected and (found[tokens - 1 :] == -100).all()


@pytest.mark.slow
@settings(max_examples=30)
@given(
    seq_len=st.sampled_from([1, 3, 8, 25, 100]),
    seed=st.integers(0, 3),
    rows=st.integers(1, 4),
    batches_before=st.integers(0, 40),
    rows_after=st.integers(1, 4),
)
def test_a_stream_resumes_at_any_batch_with_any_number_of_rows(
    store: TokenStore, seq_len: int, seed: int, rows: int, batches_before: int, rows_after: int
) -> None:
    """Nothing is lost or repeated, whatever the batch size before the checkpoint."""
    options = {"seq_len": seq_len, "seed": seed}
    first = batches_of(store, rows=rows, **options)
    before = rows_of(first, batches_before)
    second = batches_of(store, rows=rows_after, **options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict() and second.epoch == first.epoch
    after = rows_of(second, 12)
    assert before + after == rows_of(batches_of(store, **options), len(before) + len(after))


def test_a_moved_directory_is_the_same_data(store: TokenStore, tmp_path: Path) -> None:
    first = batches_of(store)
    rows_of(first, 3)
    moved = batches_of(store_of(tmp_path))
    moved.load_state_dict(first.state_dict())
    assert rows_of(moved, 5) == rows_of(first, 5)


def test_another_stream_cannot_be_resumed(store: TokenStore, tmp_path: Path) -> None:
    first = batches_of(store)
    rows_of(first, 3)
    other = batches_of(store_of(tmp_path, [5, 5]), seq_len=16, seed=5)
    with pytest.raises(ValueError, match="seq_len = 16, but the checkpoint has 8") as caught:
        other.load_state_dict(first.state_dict())
    assert "seed = 5, but the checkpoint has 0" in str(caught.value)
    assert "data = 2 documents, 12 tokens, digest" in str(caught.value)
    assert other.state_dict()["row"] == 0
