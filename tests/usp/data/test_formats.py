"""Every format on four ranks: the same documents give the same batches, on every rank."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist
from pyarrow import csv, ipc, parquet

from tests.harness.ranks import RankPool
from usp.config import TrainConfig
from usp.data.batches import BatchReader, Part, TokenBatch
from usp.run.launch import Launch
from usp.train.prepare import PreparedRun, prepare

DOCUMENTS = [
    "def one():\n\treturn 1\n",
    "größer, \"语言\"\r\nund '🙂'",
    *(f"{number} " * number for number in range(1, 40)),
]
TABLE = pa.table({"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
ROWS = TABLE.to_pylist()
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_beside_readme(folder: Path) -> None:
    half = LINES.index(b'{"id": 20')
    (folder / "train-00000-of-00002.jsonl.gz").write_bytes(gzip.compress(LINES[:half]))
    (folder / "train-00001-of-00002.jsonl.gz").write_bytes(gzip.compress(LINES[half:]))
    (folder / "README.md").write_text("About the data.")


def write_as_save_to_disk(folder: Path) -> None:
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        ipc.new_stream(file, TABLE.schema) as writer,
    ):
        writer.write_table(TABLE, max_chunksize=7)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


def write_texts(folder: Path) -> None:
    for number, document in enumerate(DOCUMENTS):
        (folder / f"{number:02}.txt").write_bytes(document.encode("utf-16"))


def write_linked(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "data.jsonl").write_bytes(LINES)
    (folder / "all").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(folder)


WRITERS: dict[str, Callable[[Path], object]] = {
    "JSON lines": lambda folder: (folder / "data.jsonl").write_bytes(LINES),
    "compressed JSON lines beside a README": write_beside_readme,
    "zstd": lambda folder: (folder / "data.jsonl.zst").write_bytes(pa.compress(LINES, codec="zstd", asbytes=True)),
    "NDJSON": lambda folder: (folder / "data.ndjson").write_bytes(LINES),
    "JSON": lambda folder: (folder / "data.json").write_text(json.dumps(ROWS, indent=1)),
    "CSV": lambda folder: csv.write_csv(TABLE, folder / "data.csv"),
    "Parquet": lambda folder: parquet.write_table(TABLE, folder / "data.parquet", row_group_size=15),
    "Arrow": write_as_save_to_disk,
    "UTF-16": write_texts,
    "links": write_linked,
}


def digests_of(config: TrainConfig, data: list[str]) -> list[list[str]]:
    """The first batches of each data set."""
    launch = Launch(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    prepared = (prepare(replace(config, data=each), launch) for each in data)
    return [[digest(batch) for batch in islice(whole_batches(run), 3)] for run in prepared]


def whole_batches(run: PreparedRun) -> BatchReader:
    return BatchReader(run.begins_in.batches, Part.whole(run.begins_in.batches.rows, run.config.seq_len))


def digest(batch: TokenBatch) -> str:
    return hashlib.sha256(
        b"".join(each.numpy().tobytes() for each in batch.to(torch.device("cpu")).values())
    ).hexdigest()


def test_every_format_gives_the_same_batches_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    folders = [tmp_path / name.replace(" ", "-") for name in WRITERS]
    for folder, write in zip(folders, WRITERS.values(), strict=True):
        folder.mkdir()
        write(folder)
    config = TrainConfig(sp_ulysses=2, dp_shard=2, batch_size=2, seq_len=64, device="cpu")
    config = replace(config, data_cache=str(tmp_path / "cache"), output=str(tmp_path / "run"))
    found = ranks.run(digests_of, 4, config, [str(folder) for folder in folders])
    first = found[0][0]
    assert len(set(first)) == 3
    for rank, digests in enumerate(found):
        assert [name for name, each in zip(WRITERS, digests, strict=True) if each != first] == [], f"on rank {rank}"
