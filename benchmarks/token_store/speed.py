"""Writing and reading a token store of a large corpus.

The corpus is Python source code of this machine in documents of 500 to 8,000 characters, as JSON lines. Measured are:

    writing    python -m usp tokenize with one process per core, against `encode_batch` of the package tokenizers alone,
               which is what tokenizes; before and after, on all cores
    a kill     the same command, killed at a random moment and started again: are the files the same, byte for byte?
    reading    8 ranks train the README's model on the store: time until the first step is done, part of the step that
               waits for data, and by how much the memory of a rank grows while it reads on

    python -m benchmarks.token_store.speed                         # 500 MB: about a quarter of an hour on two cores
    python -m benchmarks.token_store.speed --megabytes 20 --no-save
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoTokenizer

from benchmarks.data import Memory, train_tokenizer
from benchmarks.harness.record import Record, finish
from tests.harness.ranks import RankPool
from usp.config import TrainConfig
from usp.data.batches import BatchReader
from usp.run.launch import Launch
from usp.train.prepare import prepare
from usp.train.step import part_of
from usp.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
RANKS, STEPS, BATCHES = 8, 20, 2000
REFERENCE_BYTES = 24 * 10**6
BATCH_CHARACTERS = 10**6  # of one call of the reference: its result takes 100 times as many bytes
COLUMNS = ("what", "measured", "wanted")


def documents(size: int) -> Iterator[str]:
    """Yield documents of source code, of `size` characters in all, no two alike."""
    draw = random.Random(0)
    paths = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    draw.shuffle(paths)
    done = number = 0
    while True:
        for path in paths:
            text = path.read_text("utf-8", "replace")
            at = 0
            while at < len(text):
                length = draw.randint(500, 8000)
                document = f"# {number}\n{text[at : at + length]}"
                yield document
                at, number, done = at + length, number + 1, done + len(document)
                if done >= size:
                    return


def write_corpus(path: Path, size: int) -> None:
    with path.open("w") as file:
        for text in documents(size):
            file.write(json.dumps({"text": text}) + "\n")


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


def tokenize(corpus: Path, tokenizer: str, store: Path) -> subprocess.Popen[str]:
    flags = ["--data", str(corpus), "--tokenizer", tokenizer, "--output", str(store)]
    command = [sys.executable, "-m", "usp", "tokenize", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def seconds_of(running: subprocess.Popen[str]) -> float:
    """Return the seconds that it says it took to write the store, without the start of Python."""
    said, _ = running.communicate()
    if running.returncode:
        raise RuntimeError(f"tokenizing failed: {said}")
    return float(said.rsplit(" in ", 1)[1].split(" s")[0].replace(",", ""))


def hashes(store: Path) -> dict[str, str]:
    found = {}
    for path in sorted(store.iterdir()):
        digest = hashlib.blake2b()
        with path.open("rb") as file:
            while content := file.read(2**20):
                digest.update(content)
        found[path.name] = digest.hexdigest()
    return found


def killed_and_started_again(corpus: Path, tokenizer: str, store: Path, seconds: float) -> float:
    """Kill the writing of `store` after a random part of `seconds`, write the rest, and return that part."""
    part = random.SystemRandom().uniform(0.1, 0.9)
    running = tokenize(corpus, tokenizer, store)
    while not (store / "tokens.bin").exists():
        time.sleep(0.05)
    time.sleep(part * seconds)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    seconds_of(tokenize(corpus, tokenizer, store))
    return part


def train(config: TrainConfig) -> dict[str, Any]:
    """Train a few steps, then read on without training; return this rank's seconds and bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    begin = time.perf_counter()
    prepared = prepare(config, Launch(rank, size, rank, size))
    ready = time.perf_counter() - begin
    trainer = Trainer(prepared)
    store = prepared.begins_in.batches.packed.sources[0].store
    records = [trainer.step(1)]
    first = time.perf_counter() - begin
    before = store.token_bytes
    records += [trainer.step(number) for number in range(2, STEPS + 1)]
    read = (store.token_bytes - before) / (STEPS - 1)
    memory = Memory.now()
    for _ in islice(BatchReader(prepared.begins_in.batches, part_of(trainer.mesh, prepared.config)), BATCHES):
        pass
    grown = Memory.now().resident - memory.resident
    steps = records[1:]
    return {
        "ready": ready,
        "first_step": first,
        "step": sum(record.seconds for record in steps) / len(steps),
        "waiting": sum(record.data_seconds for record in steps) / sum(record.seconds for record in steps),
        "bytes_per_step": read,
        "grown": grown,
    }


def measure(folder: Path, size: int) -> Iterator[tuple[str, str, str]]:
    """Yield what is measured, what it is and what it should be, with a corpus of `size` characters below `folder`."""
    corpus, bpe = folder / "corpus.jsonl", folder / "BPE"
    write_corpus(corpus, size)
    train_tokenizer(bpe)
    before = reference(corpus, bpe)
    yield "tokenizers alone, before: MB/s", f"{before / 1e6:.2f}", ""
    seconds = seconds_of(tokenize(corpus, str(bpe), folder / "store"))
    after = reference(corpus, bpe)
    yield "tokenizers alone, after: MB/s", f"{after / 1e6:.2f}", ""
    yield "tokenize: MB/s", f"{size / seconds / 1e6:.2f}", ""
    yield "tokenize / tokenizers alone", f"{2 * size / seconds / (before + after):.2f}", ">= 0.9"
    part = killed_and_started_again(corpus, str(bpe), folder / "killed", seconds)
    same = hashes(folder / "store") == hashes(folder / "killed")
    yield f"killed after {part:.0%}: files", "the same" if same else "DIFFERENT", "the same"
    seconds_of(tokenize(corpus, "bytes", folder / "bytes"))
    yield from reading(TrainConfig(data=str(folder / "bytes"), data_cache=str(folder), output=str(folder / "run")))


def reading(config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the same of 8 ranks that train on a store."""
    config = replace(config, sp_ulysses=4, sp_ring=2, device="cpu", dtype="float32", steps=STEPS)
    for _ in range(2):  # the first time, the store is compared with its checksums
        with RankPool(preload=("usp.train.trainer",)) as pool:
            ranks = pool.run(train, RANKS, config, timeout=3600.0)
    most = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    yield "s until the data is open", f"{most['ready']:.2f}", ""
    yield "s until step 1 is done", f"{most['first_step']:.2f}", "<= 3"
    yield "s per step", f"{most['step']:.2f}", ""
    yield "waiting for data, of a step", f"{most['waiting']:.3%}", "<= 1%"
    own = config.seq_len * 2 // RANKS
    yield "bytes read per rank and step", f"{most['bytes_per_step']:,.0f}", f"{own:,} and a token per span"
    yield f"MiB that a rank grows by in {BATCHES:,} batches", f"{most['grown'] / 2**20:.1f}", "< 64"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the corpus, in units of 10^6 characters")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    parser.add_argument("--no-save", action="store_true", help="print the result without saving it")
    options = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    rows = []
    with tempfile.TemporaryDirectory(prefix="token-store-") as folder:
        for row in measure(Path(folder), options.megabytes * 10**6):
            rows.append(row)
            print(*filter(None, row), sep="  ", flush=True)
    question = f"Writing and reading a token store of {options.megabytes} MB of text"
    notes = (
        f"{RANKS} ranks of this machine: the README's model (tiny, 4,096 tokens, ulysses 4 x ring 2), {STEPS} steps. "
        "Figures of ranks are those of the slowest, or the largest.",
        "tokenizers alone: encode_batch on all cores, of texts in memory, before and after.",
    )
    command = "python -m benchmarks.token_store.speed"
    record = Record.of("token_store", question, COLUMNS, rows, notes, [], command=command)
    finish(record, options.output, save=not options.no_save)


if __name__ == "__main__":
    main()
