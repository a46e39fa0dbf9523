"""How fast text becomes tokens and batches, and how much memory that takes.

writing    python -m usp tokenize with one process per core, against `encode_batch` of the package tokenizers alone,
           which is what tokenizes; before and after, on all cores. The corpus is JSON lines of Python source code
reading    8 ranks train the README's model on the store: time until the first step is done, part of the step that
           waits for data, and by how much the memory of a rank grows while it reads on
memory     4 ranks prepare a run on one file as train.py does: one tokenizes it, the others wait. By how much each
           grows at most. Text is one document, with line breaks or without; Parquet has a single row group, of
           documents of 2,000 or 100 characters

python -m benchmarks.data                         # files of 500 MB: half an hour on two idle cores
python -m benchmarks.data --megabytes 20 --output /tmp/data.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pyarrow as pa
import torch.distributed as dist
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.harness.record import ROOT, Record, finish, parser_of
from tests.harness.ranks import RankPool
from usp.config import TrainConfig
from usp.data.batches import BatchReader, Part
from usp.data.sources import STDLIB, find_files
from usp.data.tokenizer import BYTES
from usp.run.launch import Launch
from usp.train.prepare import prepare
from usp.train.step import part_of
from usp.train.trainer import Trainer

STEPS, BATCHES = 20, 2000
REFERENCE_BYTES = 24 * 10**6
BATCH_CHARACTERS = 10**6  # of one call of the reference: its result takes 100 times as many bytes
MODELS = {BYTES: "tiny", "BPE": "llama2-7b"}  # with vocabularies of the tokenizers' sizes; nothing is computed
FILES = ("text", "text, one line", "parquet", "parquet, short")
QUESTION = "Does data keep up with training, and how much memory does it take?"
Cells = Iterator[tuple[str, str]]


def source_code() -> Iterator[str]:
    """Yield the files of the standard library, over and over."""
    return cycle([file.path.read_text("utf-8", "replace") for file in find_files(STDLIB, "text").files])


def documents(characters: int, size: int) -> Iterator[str]:
    """Yield documents of so many characters, of `size` in all, each with its number, so that no two are alike."""
    texts = (text[at : at + characters] for text in source_code() for at in range(0, len(text), characters))
    cut = (text for text in texts if len(text) == characters)
    yield from (f"{number:>8} {text[9:]}" for number, text in enumerate(islice(cut, size // characters)))


def write(kind: str, path: Path, size: int) -> None:
    """Write a file of `size` bytes before compression."""
    if kind.startswith("parquet"):
        table = pa.table({"text": pa.array(documents(100 if "short" in kind else 2_000, size), pa.large_string())})
        parquet.write_table(table, path, row_group_size=len(table))
        return
    with path.open("wb") as file:
        for text in source_code():
            content = (text.replace("\n", " ") if "one line" in kind else text).encode()
            if not file.write(content[: size - file.tell()]):
                return


def train_tokenizer(folder: Path, vocabulary: int = 32_000) -> None:
    """Save a byte-level BPE tokenizer of the standard library in `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(file.path) for file in find_files(STDLIB, "text").files], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


# Writing


def reference(corpus: Path, folder: Path) -> float:
    """Return the characters per second of the package tokenizers alone, in batches, on all cores."""
    backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    texts, size = [], 0
    with corpus.open() as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
            if size > REFERENCE_BYTES:
                break
    begin, first, held = time.perf_counter(), 0, 0
    for number, text in enumerate(texts, start=1):
        held += len(text)
        if held > BATCH_CHARACTERS or number == len(texts):
            backend.encode_batch(texts[first:number], add_special_tokens=False)
            first, held = number, 0
    return size / (time.perf_counter() - begin)


def tokenize(corpus: Path, tokenizer: str, store: Path) -> float:
    """Return the seconds that the command says it took to write the store, without the start of Python."""
    flags = ["--data", str(corpus), "--tokenizer", tokenizer, "--output", str(store)]
    command = [sys.executable, "-m", "usp", "tokenize", *flags]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(said.rsplit(" in ", 1)[1].split(" s")[0].replace(",", ""))


def writing(folder: Path, size: int) -> Cells:
    corpus, bpe = folder / "corpus.jsonl", folder / "BPE"
    with corpus.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents(4_000, size))
    train_tokenizer(bpe)
    before = reference(corpus, bpe)
    seconds = tokenize(corpus, str(bpe), folder / "store")
    alone = (before + reference(corpus, bpe)) / 2
    yield "tokenizers alone: MB/s", f"{alone / 1e6:.2f}"
    yield "tokenize: MB/s", f"{size / seconds / 1e6:.2f}"
    yield "tokenize / tokenizers alone", f"{size / seconds / alone:.2f}"


# Reading


def train(config: TrainConfig) -> dict[str, float]:
    """Train a few steps, then read on without training; return this rank's seconds and bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    begin = time.perf_counter()
    prepared = prepare(config, Launch(rank, size, rank, size))
    ready, trainer = time.perf_counter() - begin, Trainer(prepared)
    records = [trainer.step(1)]
    first = time.perf_counter() - begin
    records = [trainer.step(number) for number in range(2, STEPS + 1)]
    seconds, memory = sum(record.seconds for record in records), status()["VmRSS"]
    for _ in islice(BatchReader(prepared.begins_in.batches, part_of(trainer.mesh, prepared.config)), BATCHES):
        pass
    return {
        "s until the data is open": ready,
        "s until step 1 is done": first,
        "s per step": seconds / len(records),
        "waiting for data, % of a step": 100 * sum(record.data_seconds for record in records) / seconds,
        f"MiB that a rank grows by in {BATCHES:,} batches": (status()["VmRSS"] - memory) / 2**20,
    }


def reading(folder: Path) -> Cells:
    tokenize(folder / "corpus.jsonl", BYTES, folder / "bytes")
    config = TrainConfig(data=str(folder / "bytes"), data_cache=str(folder), output=str(folder / "run"))
    config = replace(config, sp_ulysses=4, sp_ring=2, device="cpu", dtype="float32", steps=STEPS)
    for _ in range(2):  # the first time, the store is compared with its checksums
        with RankPool(preload=("usp.train.trainer",)) as pool:
            ranks = pool.run(train, 8, config, timeout=3600.0)
    yield from ((name, f"{max(rank[name] for rank in ranks):.2f}") for name in ranks[0])


# Memory


def status() -> dict[str, int]:
    """Return what the kernel says of this process: bytes by name."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def growth(config: TrainConfig) -> tuple[int, int]:
    """Prepare a run and read its first batches; return by how many bytes this rank grew at most, and all tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's own peak
    before = status()["VmRSS"]
    batches = prepare(config, Launch(rank, size, rank, size)).begins_in.batches
    for _ in islice(BatchReader(batches, Part.whole(batches.rows, config.seq_len)), 4):
        pass
    return status()["VmHWM"] - before, batches.packed.sources[0].store.manifest.tokens


def memory(folder: Path, size: int, files: Iterable[str] = FILES, tokenizers: Iterable[str] = MODELS) -> Cells:
    config = TrainConfig(seq_len=32768, sp_ulysses=2, sp_ring=2, device="cpu", data_cache=str(folder / "cache"))
    for kind in files:
        path = folder / f"file.{'parquet' if kind.startswith('parquet') else 'txt'}"
        write(kind, path, size)
        for name in tokenizers:
            tokenizer = name if name == BYTES else str(folder / name)
            asked = replace(config, data=str(path), model=MODELS[name], tokenizer=tokenizer)
            # New processes each time: a process keeps memory that it has freed, and would seem to grow less.
            with RankPool(preload=("usp.train.trainer",)) as pool:
                found = pool.run(growth, 4, replace(asked, output=str(folder / "run")), timeout=3600.0)
            writer, *others = sorted((peak / 2**20 for peak, _ in found), reverse=True)
            yield f"{kind}, {name}: MiB of the rank that tokenizes, of others", f"{writer:.0f}, {max(others):.0f}"
        path.unlink()


def answer(rows: Iterable[tuple[str, str]]) -> str:
    value = dict(rows)
    most = max(int(cell.split(",")[0]) for name, cell in value.items() if "that tokenizes" in name)
    return (
        f"Text is tokenized at {value['tokenize / tokenizers alone']} times the rate of the `tokenizers` package in "
        f"memory; a step waits {value['waiting for data, % of a step']}% of its time for data. Reading a file, of text "
        f"or Parquet, takes at most {most} MiB on a rank."
    )


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--megabytes", type=int, default=500, help="size of each file, in units of 10^6 bytes")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # else it is off in the forked ranks, with a warning
    rows, size = [], options.megabytes * 10**6
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        folder = Path(name)
        for part in (writing(folder, size), reading(folder), memory(folder, size)):
            for row in part:
                rows.append(row)
                print(*row, sep="  ", flush=True)
    notes = (
        f"Files of {options.megabytes} MB. Figures of ranks are those of the slowest, or the largest.",
        f"Training: the README's model (tiny, 4,096 tokens, ulysses 4 x ring 2), {STEPS} steps.",
        "Memory: resident memory at its peak, less that before the data, until 4 batches of 32,768 tokens are read.",
    )
    finish(Record.of("data", QUESTION, answer(rows), ("what", "measured"), rows, notes), options)


if __name__ == "__main__":
    main()
