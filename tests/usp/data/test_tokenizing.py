"""Writing token stores: by many processes, after a kill, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import usp.data.documents
import usp.data.store
import usp.data.tokenizing
from usp.__main__ import main
from usp.data.batches import Part, read_batch
from usp.data.cache import cached_store, check_ids, find_data, open_data, sound_store
from usp.data.rows import PackedRows
from usp.data.sources import DataFiles, find_files
from usp.data.store import TokenStore, checksum
from usp.data.tokenizer import ByteTokenizer
from usp.data.tokenizing import _Output, write_store

BYTES = ByteTokenizer()


def corpus(folder: Path) -> DataFiles:
    """Documents in files of several formats, some longer than a piece."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": f"document {number}\n" * (number * 7 % 40)}) for number in range(60)]
    (folder / "a.jsonl").write_text("\n".join(lines[:30]))
    (folder / "b.json").write_text("[" + ",".join(lines[30:]) + "]")
    return find_files(str(folder))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usp.data.documents, "PIECE", 64)
    monkeypatch.setattr(usp.data.tokenizing, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(usp.data.store, "SUM_BYTES", 1000)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("save_every", "masked"), [(1, False), (4, True)])
@pytest.mark.slow
def test_a_store_is_the_same_after_a_kill_at_any_moment(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch, save_every: int, masked: bool, exhaustive: bool
) -> None:
    """What is on disk after each batch, without what is buffered, is what a kill at that moment leaves. Without
    --exhaustive after every fifth one, which is saved or not in turn."""
    files, moments, append = corpus(tmp_path / "data"), [], _Output.append
    if masked:
        rows = [json.dumps({"prompt": "document ", "completion": f"{number} " * number}) for number in range(40)]
        (tmp_path / "data" / "c.jsonl").write_text("\n".join(rows))
        files = find_files(str(tmp_path / "data"))

    def killed(self: _Output, encoded: usp.data.tokenizing.Encoded, place: usp.data.tokenizing.Place) -> None:
        saving = len(moments) % save_every == 0
        monkeypatch.setattr(usp.data.tokenizing, "SAVE_SECONDS", 0.0 if saving else 1e9)
        append(self, encoded, place)
        moments.append(tmp_path / f"killed-{len(moments)}")
        shutil.copytree(tmp_path / "whole", moments[-1])

    monkeypatch.setattr(_Output, "append", killed)
    assert write_store(files, "text", BYTES, tmp_path / "whole")
    monkeypatch.setattr(_Output, "append", append)
    whole = content(tmp_path / "whole")
    files_of_store = ["index.bin", "manifest.json", *(["mask.bin"] if masked else []), "tokens.bin"]
    assert sorted(whole) == files_of_store and len(moments) > 20
    for moment in moments[:: 1 if exhaustive else 5]:
        with pytest.raises(ValueError, match="is not finished: run the same"):
            TokenStore(moment)
        assert write_store(files, "text", BYTES, moment)
        assert content(moment) == whole
    assert not write_store(files, "text", BYTES, tmp_path / "whole")
    assert len(TokenStore(tmp_path / "whole").manifest.checksums["tokens.bin"]) > 10


def test_files_that_lost_what_was_recorded_are_written_again(tmp_path: Path, small_pieces: None) -> None:
    files = corpus(tmp_path / "data")
    write_store(files, "text", BYTES, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "lost")
    manifest = json.loads((tmp_path / "lost" / "manifest.json").read_text())
    (tmp_path / "lost" / "manifest.json").unlink()
    record = {"source": manifest["source"], **asdict(usp.data.tokenizing.StoreProgress(tokens=1000, documents=3))}
    (tmp_path / "lost" / "progress.json").write_text(json.dumps(record))
    (tmp_path / "lost" / "tokens.bin").write_bytes(b"")
    write_store(files, "text", BYTES, tmp_path / "lost")
    assert content(tmp_path / "lost") == content(tmp_path / "whole")


def test_many_processes_write_the_store_of_one_and_train_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = corpus(tmp_path / "data")
    write_store(files, "text", BYTES, tmp_path / "one")
    flags = ["tokenize", "--data", str(tmp_path / "data"), "--tokenizer", "bytes", "--output", str(tmp_path / "many")]
    assert main([*flags, "--processes", "2"]) == 0
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert main(flags) == 0
    assert "there already" in capsys.readouterr().out
    store = open_data(find_data(str(tmp_path / "many")), "text", BYTES, tmp_path / "cache")
    assert store.manifest.digest == cached_store(files, "text", BYTES, tmp_path / "cache").manifest.digest


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow over so many bytes: for what writes it, the disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named_and_what_is_written_goes_on_when_there_is_room(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, cache = corpus(tmp_path / "data"), tmp_path / "cache"
    write_store(files, "text", BYTES, tmp_path / "whole")
    sizes = [len(each) for each in content(tmp_path / "whole").values()]
    monkeypatch.setattr(usp.data.tokenizing, "SAVE_SECONDS", 0.0)
    for size in (0, 500, min(sizes), sum(sizes) // 4, max(sizes) - 1):
        with largest_file(size), pytest.raises(OSError, match=rf"\[Errno 27\] File too large: '{cache}/\w+.partial"):
            cached_store(files, "text", BYTES, cache)
        assert not [path for path in cache.iterdir() if path.is_dir() and path.suffix != ".partial"]
    store = cached_store(files, "text", BYTES, cache)
    assert content(store.folder) == content(tmp_path / "whole")


# What is refused


def test_a_damaged_store_is_refused_by_its_checksums(tmp_path: Path, small_pieces: None) -> None:
    write_store(corpus(tmp_path / "data"), "text", BYTES, tmp_path / "store")
    sound_store(tmp_path / "store", tmp_path / "cache")
    for name, at in (("tokens.bin", 2500), ("index.bin", 80)):
        sound = (tmp_path / "store" / name).read_bytes()
        (tmp_path / "store" / name).write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        begin = at // 1000 * 1000
        with pytest.raises(ValueError, match=rf"{name} is damaged: bytes {begin} to \d+ do not have their checksum"):
            sound_store(tmp_path / "store", tmp_path / "cache")
        (tmp_path / "store" / name).write_bytes(sound)
    sound_store(tmp_path / "store", tmp_path / "cache")
    manifest = tmp_path / "store" / "manifest.json"
    lacking = json.loads(manifest.read_text()) | {"checksums": {"tokens.bin": [], "index.bin": []}}
    for text, said in (
        ('{"format": 2, "tok', "it is no manifest"),
        ("[" * 5000, "it is no manifest"),
        (json.dumps(lacking), "it lacks checksums of tokens.bin, index.bin"),
        (json.dumps(lacking | {"dtype": "text"}), "it is no manifest"),
    ):
        manifest.write_text(text)
        with pytest.raises(ValueError, match=rf"manifest.json is damaged: {said}"):
            sound_store(tmp_path / "store", tmp_path / "cache")
    manifest.write_text("[" * 5000)
    with pytest.raises(ValueError, match=r"manifest.json is damaged .*: remove "):
        write_store(find_files(str(tmp_path / "data")), "text", BYTES, tmp_path / "store")


def test_an_index_that_changes_under_its_time_stamp_is_refused_at_every_start(tmp_path: Path) -> None:
    write_store(corpus(tmp_path / "data"), "text", BYTES, tmp_path / "store")
    sound_store(tmp_path / "store", tmp_path / "cache")
    index = tmp_path / "store" / "index.bin"
    state, changed = index.stat(), np.frombuffer(index.read_bytes(), np.int64).copy()
    changed[3] += 1
    index.write_bytes(changed.tobytes())
    os.utime(index, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(ValueError, match=r"index.bin is damaged: bytes 0 to \d+ do not have their checksum"):
        sound_store(tmp_path / "store", tmp_path / "cache")


@pytest.mark.parametrize("name", ["manifest.json", "index.bin", "tokens.bin"])
def test_a_store_that_lacks_a_file_says_so(tmp_path: Path, name: str) -> None:
    write_store(corpus(tmp_path / "data"), "text", BYTES, tmp_path / "store")
    (tmp_path / "store" / name).unlink()
    with pytest.raises(ValueError, match=rf"token store .*store has no {name}: copy all of its files, or tokenize"):
        open_data(find_data(str(tmp_path / "store")), "text", BYTES, tmp_path / "cache")


def test_a_store_of_another_tokenizer_or_with_ids_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write_store(corpus(tmp_path / "data"), "text", BYTES, tmp_path / "store")
    found = find_data(str(tmp_path / "store"))
    with pytest.raises(ValueError, match=r"was tokenized with bytes .* and tokenizer=other is another one"):
        open_data(found, "text", ByteTokenizer("other", eos=2), tmp_path / "cache")
    store = open_data(found, "text", BYTES, tmp_path / "cache")
    check_ids(store, store.manifest.largest + 1)
    ids = store.read(0, store.manifest.tokens)
    first = int(np.argmax(ids >= 110))
    document = int((store.bounds(np.arange(store.manifest.documents))[1] <= first).sum())
    with pytest.raises(ValueError, match=rf"document {document} holds id {ids[first]}, and the model has a vocab"):
        check_ids(store, 110)
    with pytest.raises(ValueError, match="data_field='body' is for JSON"):
        find_data(str(tmp_path / "store"), "body")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    files = corpus(tmp_path / "data")
    write_store(files, "text", BYTES, tmp_path / "store")
    with pytest.raises(ValueError, match="is a token store of other data, or of another tokenizer"):
        write_store(files, "text", ByteTokenizer(eos=2), tmp_path / "store")
    before = content(tmp_path / "data")
    with pytest.raises(ValueError, match="is not empty, and no token store"):
        write_store(files, "text", BYTES, tmp_path / "data")
    assert content(tmp_path / "data") == before


def test_bad_data_leaves_nothing_and_those_that_wait_do_not_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = corpus(tmp_path / "data")
    (tmp_path / "data" / "b.json").write_text('[{"text": "a"}, {"txt": "b"}]')
    said = r"b.json, object 2: no key data_field='text'"
    with pytest.raises(ValueError, match=said):
        write_store(files, "text", BYTES, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    tries = []
    monkeypatch.setattr(usp.data.cache, "write_store", lambda *given: tries.append(given) or write_store(*given))
    locked, other = usp.data.cache.FileLock, []

    def waits(name: str) -> object:
        """A lock for which one waits while another process has it, and fails."""
        if not other:
            other.append(name)
            with pytest.raises(ValueError, match=said):
                cached_store(files, "text", BYTES, tmp_path / "cache")
        return locked(name)

    monkeypatch.setattr(usp.data.cache, "FileLock", waits)
    with pytest.raises(ValueError, match=said):
        cached_store(files, "text", BYTES, tmp_path / "cache")
    assert len(tries) == 1
    with pytest.raises(ValueError, match=said):  # started again later
        cached_store(files, "text", BYTES, tmp_path / "cache")
    assert len(tries) == 2


def test_a_masked_store_says_which_tokens_are_targets(tmp_path: Path) -> None:
    write_store(corpus(tmp_path / "data"), "text", BYTES, tmp_path / "store")
    plain = TokenStore(tmp_path / "store")
    mask = np.random.default_rng(0).integers(0, 2, plain.manifest.tokens, np.uint8)
    (tmp_path / "store" / "mask.bin").write_bytes(mask.tobytes())
    with (tmp_path / "store" / "mask.bin").open("rb") as file:
        sums = {**plain.manifest.checksums, "mask.bin": [checksum(file, 0)]}
    changed = replace(plain.manifest, masked=True, checksums=sums)
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(asdict(changed)))
    masked = TokenStore(tmp_path / "store")
    for number in (0, 3):
        rows = range(number, number + 2)
        with_mask, without = (
            read_batch(PackedRows(store, 128, None), rows, Part.whole(2, 128)).shift_labels for store in (masked, plain)
        )
        place = number * 128 + np.arange(256) + 1
        assert (with_mask.flatten().numpy() == np.where(mask[place] == 1, without.flatten(), -100)).all()
