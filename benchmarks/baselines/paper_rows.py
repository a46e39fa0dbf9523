"""Measurements from the USP paper: every row of Tables 3 to 7 of arXiv 2405.07719v5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.predict.job import Job
from usp.train.resolve import job_of

THIRD = 3  # every third row is used for calibration
K = 1024


@dataclass(frozen=True)
class Row:
    """One measurement: TFLOP/s per GPU in Tables 5 to 7, iterations per second in Tables 3 and 4."""

    table: str
    seq_len: int
    tp: int
    ulysses: int
    ring: int
    measured: float
    node: str = "a800"
    model: str = "llama3-8b"
    devices: int = 16
    batch: int = 1
    micro_batches: int = 1
    layout: str = "zigzag"
    backward: bool = False

    @property
    def attention_only(self) -> bool:
        return self.table in ("Table 3", "Table 4")

    @property
    def name(self) -> str:
        size = f"{self.seq_len // K}K" + (f" batch {self.batch}" if self.batch > 1 else "")
        kind = {"contiguous": " basic-ring", "zigzag": " lb-ring"}[self.layout] if self.attention_only else ""
        return f"{self.table}, {size}, tp {self.tp} x ulysses {self.ulysses} x ring {self.ring}{kind}"


def _attention_rows(
    table: str, node: str, seq_len: int, by_ulysses: Mapping[int, tuple[float, float]], backward: bool = False
) -> list[Row]:
    return [
        Row(table, seq_len, 1, u, 8 // u, measured, node, devices=8, layout=layout, backward=backward)
        for u, pair in by_ulysses.items()
        for layout, measured in zip(("contiguous", "zigzag"), pair, strict=True)
    ]


def _training_rows(table: str, seq_len: int, rows: Sequence[tuple[int, int, int, float]], **shared: Any) -> list[Row]:
    return [Row(table, seq_len, tp, u, r, measured, **shared) for tp, u, r, measured in rows]


L20_8K = {8: (57.346, 57.098), 4: (153.134, 152.189), 2: (415.5, 454.93), 1: (358.595, 361.969)}
L20_32K = {8: (15.229, 14.262), 4: (28.584, 32.818), 2: (44.348, 62.754), 1: (40.478, 58.377)}
L20_128K = {8: (2.563, 2.586), 4: (3.217, 4.235), 2: (3.399, 5.476), 1: (3.131, 5.186)}
A100_32K = {8: (135.569, 136.375), 4: (103.525, 132.979), 2: (91.365, 132.979), 1: (81.985, 113.79)}
A100_128K = {8: (2.782, 2.785), 4: (2.024, 2.771), 2: (1.73, 2.89), 1: (1.628, 2.91)}
T5_64K = ((4, 2, 1, 154.49), (4, 1, 2, 151.40), (8, 1, 1, 141.85))
T5_30K = (
    *((2, 4, 1, 155.98), (2, 1, 4, 147.77), (4, 1, 1, 150.05)),
    *((1, 8, 1, 163.42), (1, 1, 8, 142.16), (8, 1, 1, 129.12)),
)
T6_64K = (
    *((1, 8, 2, 136.31), (1, 4, 4, 137.48), (1, 2, 8, 129.44), (1, 1, 16, 121.83), (8, 1, 2, 129.75)),
    *((4, 2, 2, 122.45), (2, 4, 2, 87.67), (2, 2, 4, 89.35), (4, 1, 4, 122.57), (2, 1, 8, 101.35)),
)
T6_80K = (
    *((1, 8, 2, 147.46), (1, 4, 4, 148.90), (1, 2, 8, 140.13), (1, 1, 16, 132.86), (8, 1, 2, 136.16)),
    *((4, 2, 2, 137.49), (2, 4, 2, 111.05), (2, 2, 4, 110.81), (4, 1, 4, 130.27), (2, 1, 8, 121.14)),
)
T6_120K = ((4, 2, 2, 152.51), (2, 4, 2, 136.63), (8, 1, 2, 145.92), (4, 1, 4, 150.96))
SEVEN = {"model": "llama2-7b", "devices": 8}

ROWS = (
    *_attention_rows("Table 3", "l20", 8 * K, L20_8K),
    *_attention_rows("Table 3", "l20", 32 * K, L20_32K),
    *_attention_rows("Table 3", "l20", 128 * K, L20_128K),
    *_attention_rows("Table 4", "a100", 32 * K, A100_32K),
    *_attention_rows("Table 4", "a100", 128 * K, A100_128K, backward=True),
    *_training_rows("Table 5", 64 * K, T5_64K, **SEVEN),
    *_training_rows("Table 5", 30 * K, T5_30K, batch=16, micro_batches=16, **SEVEN),
    *_training_rows("Table 6", 64 * K, T6_64K),
    *_training_rows("Table 6", 64 * K, ((8, 1, 1, 141.20),), batch=2),
    *_training_rows("Table 6", 80 * K, T6_80K),
    *_training_rows("Table 6", 80 * K, ((8, 1, 1, 144.40),), batch=2),
    *_training_rows("Table 6", 120 * K, T6_120K),
    *_training_rows("Table 7", 160 * K, ((4, 2, 2, 158.64), (8, 1, 2, 156.63))),
    *_training_rows("Table 7", 208 * K, ((8, 1, 2, 147.26),)),
    *_training_rows("Table 7", 160 * K, ((4, 1, 4, 159.37),)),
    *_training_rows("Table 7", 190 * K, ((4, 1, 4, 157.08),)),
)
TABLES = tuple(dict.fromkeys(row.table for row in ROWS))


def calibrated(row: Row) -> bool:
    """Return whether the constants are fitted on this row."""
    same = [other for other in ROWS if other.table == row.table]
    return same.index(row) % THIRD == 0


def job(row: Row) -> Job:
    copies = row.devices // (row.tp * row.ulysses * row.ring)
    config = TrainConfig(
        model=row.model,
        seq_len=row.seq_len,
        sp_ulysses=row.ulysses,
        sp_ring=row.ring,
        sp_layout=row.layout,
        tp=row.tp,
        tp_sequence_parallel=row.tp > 1,
        batch_size=row.batch // copies,
        micro_batches=max(1, row.micro_batches // copies),
        zero=1,
    )
    return job_of(config, load_model_config(row.model), row.devices)
