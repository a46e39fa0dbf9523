"""Memory of reading large files: how much a rank grows from before the data until it has read its first batches.

Four ranks prepare a training run on one file, as train.py does. One of them tokenizes the file into the token store and
the others wait for it; then all read batches. The text is the source code of Python's standard library, repeated:

    text            one document with line breaks
    text, one line  one document without any line break
    parquet         documents of 2,000 characters in a single row group
    parquet, short  documents of 100 characters in a single row group

    python -m benchmarks.data                         # files of 500 MB, about a quarter of an hour on two idle cores
    python -m benchmarks.data --megabytes 20 --no-save
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch.distributed as dist
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.harness.record import Record, finish
from tests.harness.ranks import RankPool
from usp.config import TrainConfig
from usp.data.batches import BatchReader, Part, TokenBatch
from usp.data.sources import STDLIB, find_files
from usp.data.tokenizer import BYTES
from usp.run.launch import Launch
from usp.train.prepare import prepare

RANKS = 4
BATCHES = 4
BOUND = 256  # MiB that a rank may grow by
VOCABULARY = 32_000
MODELS = {BYTES: "tiny", "BPE": "llama2-7b"}  # with vocabularies of the tokenizers' sizes; nothing is computed
COLUMNS = (
    "file",
    "tokenizer",
    "documents",
    "M tokens",
    "peak MiB, writer",
    "others",
    "MiB after, writer",
    "others",
)


@dataclass(frozen=True)
class Memory:
    """Resident bytes of this process: all, and those not backed by a file."""

    resident: int
    anonymous: int

    @staticmethod
    def now() -> Memory:
        fields = _status()
        return Memory(fields["VmRSS"], fields["RssAnon"])


def _status() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


class Peak(threading.Thread):
    """Peak memory while the `with` block runs: exact for `resident`, sampled for `anonymous`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.resident = 0
        self._end = threading.Event()

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's own peak, VmHWM
        self.start()
        return self

    def run(self) -> None:
        while not self._end.wait(0.005):
            self.anonymous = max(self.anonymous, Memory.now().anonymous)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()
        self.resident = _status()["VmHWM"]


# On each rank


def measure(config: TrainConfig) -> dict[str, Any]:
    """Prepare a run and read its first batches; return by how many bytes the memory of this rank grew."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before = Memory.now()
    with Peak() as peak:
        prepared = prepare(config, Launch(rank, size, rank, size))
        whole = Part.whole(prepared.begins_in.batches.rows, config.seq_len)
        digests = [digest(batch) for batch in islice(BatchReader(prepared.begins_in.batches, whole), BATCHES)]
    after = Memory.now()
    manifest = prepared.begins_in.batches.packed.sources[0].store.manifest
    return {
        "peak": peak.resident - before.resident,
        "peak_anonymous": peak.anonymous - before.anonymous,
        "after": after.resident - before.resident,
        "after_anonymous": after.anonymous - before.anonymous,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "digests": digests,
    }


def digest(batch: TokenBatch) -> str:
    tensors = (batch.input_ids, batch.shift_labels, batch.cu_seqlens)
    return hashlib.blake2b(b"".join(tensor.numpy().tobytes() for tensor in tensors), digest_size=8).hexdigest()


# In the parent process


def source_code() -> Iterator[str]:
    """Yield the files of the standard library, over and over."""
    texts = [file.path.read_text("utf-8", "replace") for file in find_files(STDLIB, "text").files]
    return cycle(texts)


def write_text(path: Path, size: int, change: Callable[[str], str] = str) -> None:
    """Write one document of `size` bytes."""
    written = 0
    with path.open("wb") as file:
        for text in source_code():
            content = change(text).encode()[: size - written]
            written += file.write(content)
            if written == size:
                return


def write_parquet(path: Path, size: int, characters: int) -> None:
    """Write documents of so many characters in one row group of `size` bytes before compression.

    Each has its number in it, so that none is a repetition that Parquet would store once.
    """
    documents = islice(_cut(source_code(), characters), size // characters)
    numbered = [f"{number:>8} {text[9:]}" for number, text in enumerate(documents)]
    table = pa.table({"text": pa.array(numbered, pa.large_string())})
    parquet.write_table(table, path, row_group_size=len(numbered))
    assert parquet.ParquetFile(path).num_row_groups == 1


def _cut(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield from (text[at : at + characters] for at in range(0, len(text) - characters + 1, characters))


FILES: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "text": ("lines.txt", write_text),
    "text, one line": ("line.txt", lambda path, size: write_text(path, size, lambda text: text.replace("\n", " "))),
    "parquet": ("long.parquet", lambda path, size: write_parquet(path, size, 2_000)),
    "parquet, short": ("short.parquet", lambda path, size: write_parquet(path, size, 100)),
}


def train_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Save a byte-level BPE tokenizer of the standard library in `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(file.path) for file in find_files(STDLIB, "text").files], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def run(
    folder: Path, size: int, files: Iterable[str] = FILES, tokenizers: Iterable[str] = MODELS
) -> Iterator[dict[str, Any]]:
    """Yield a row of data for each file and tokenizer; files are written below `folder`, and removed again."""
    config = TrainConfig(seq_len=32768, sp_ulysses=2, sp_ring=2, device="cpu")
    config = replace(config, data_cache=str(folder / "cache"), output=str(folder / "run"))
    if "BPE" in tokenizers:
        train_tokenizer(folder / "BPE")
    for kind in files:
        name, write = FILES[kind]
        write(folder / name, size)
        for tokenizer in tokenizers:
            asked = replace(
                config,
                data=str(folder / name),
                model=MODELS[tokenizer],
                tokenizer=BYTES if tokenizer == BYTES else str(folder / tokenizer),
            )
            # New processes each time: a process keeps memory that it has freed, and would seem to grow less.
            with RankPool(preload=("usp.train.trainer",)) as pool:
                ranks = pool.run(measure, RANKS, asked, timeout=3600.0)
            assert all(rank["digests"] == ranks[0]["digests"] for rank in ranks), "ranks read different batches"
            yield {"file": kind, "tokenizer": tokenizer, "bytes": size, "ranks": ranks}
        (folder / name).unlink()


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    ranks = sorted(row["ranks"], key=lambda rank: rank["peak"], reverse=True)
    memory = []
    for name in ("peak", "after"):
        for some in (ranks[:1], ranks[1:]):
            both = (max(rank[measured] for rank in some) / 2**20 for measured in (name, f"{name}_anonymous"))
            memory.append(" / ".join(f"{size:.0f}" for size in both))
    return (
        row["file"],
        row["tokenizer"],
        f"{ranks[0]['documents']:,}",
        f"{ranks[0]['tokens'] / 1e6:,.0f}",
        *memory,
    )


def notes(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    most = max(rank["peak"] for row in rows for rank in row["ranks"]) / 2**20
    held = "less than" if most < BOUND else "MORE than"
    return (
        f"Files of {rows[0]['bytes'] / 1e6:,.0f} MB, {RANKS} ranks. MiB: by how much resident memory has grown since "
        f"before the data, at its peak and after {BATCHES} batches of 32,768 tokens. All of it / anonymous memory, "
        "which leaves out mapped files and libraries.",
        "Writer: the rank that tokenizes. Others: the largest of those that wait for it. Both load the tokenizer.",
        f"The largest growth of a rank is {most:.0f} MiB, {held} {BOUND} MiB.",
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="size of each file, in units of 10^6 bytes")
    parser.add_argument("--file", choices=FILES, action="append", help="only this file; may be repeated")
    parser.add_argument("--tokenizer", choices=MODELS, action="append", help="only this tokenizer")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    parser.add_argument("--no-save", action="store_true", help="print the result without saving it")
    options = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # else it is off in the forked ranks, with a warning
    rows = []
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        size = options.megabytes * 10**6
        for row in run(Path(folder), size, options.file or FILES, options.tokenizer or MODELS):
            rows.append(row)
            print(*cells(row), sep="  ", flush=True)
    question = f"Memory of a rank that reads a file of {options.megabytes} MB"
    record = Record.of("data", question, COLUMNS, map(cells, rows), notes(rows), rows)
    finish(record, options.output, save=not options.no_save)


if __name__ == "__main__":
    main()
