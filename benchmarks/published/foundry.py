"""MosaicML's tables of MPT models under FSDP on H100 and A100, of 2023."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from usp.parallel import Hardware, load_hardware
from usp.predict.seconds import step_seconds

from .row import K, Row, Source, step_job

# layers, width; heads of 128
SHAPES = {"1b": (24, 2048), "3b": (32, 2560), "7b": (32, 4096), "13b": (40, 5120), "30b": (48, 7168), "70b": (80, 8192)}
# model, tokens, GPUs, sequences of a micro-batch, micro-batches, everything recomputed, tokens/s of a GPU
MEASURED: dict[str, list[tuple[str, int, int, int, int, bool, int]]] = json.loads(
    Path(__file__).with_name("foundry.json").read_text()
)
SHORT = 4 * K  # tokens up to which attention is a small part of a step
REFERENCE = "github.com/mosaicml/llm-foundry: scripts/train/benchmarking/README.md, yamls/pretrain"
NOTES = (
    "MosaicML: MPT is counted as Llama of the same width, with an MLP of three matrices of 8/3 of it, which has as "
    "many FLOPs and weights as MPT's two of 4, and with flash-attn 2. MPT's attention was a Triton kernel of 2023 "
    "whose rates are not stated, so rows above 4K are a source of their own: they hold that kernel against this one.",
    "MosaicML: the network of the H100 is not stated; assumed is that of the node file.",
)


def _seconds(hardware: Hardware, model: str, tokens: int, gpus: int, rows: int, number: int, recomputed: bool) -> float:
    layers, width = SHAPES[model]
    like = {
        "hidden_size": width,
        "intermediate_size": -(-8 * width // 3),
        "num_hidden_layers": layers,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 128,
        "vocab_size": 50368,
        "tie_word_embeddings": True,
    }
    batch: dict[str, Any] = {"batch_size": rows * number, "micro_batches": number}
    job = step_job(
        "llama2-7b",
        gpus,
        like=like,
        seq_len=tokens,
        zero=3,
        ac="full" if recomputed else "none",
        attention_kernel="flash2",
        **batch,
    )
    return step_seconds(job, hardware).total


def sources() -> tuple[Source, ...]:
    rows: dict[bool, list[Row]] = {True: [], False: []}
    for name, measured in MEASURED.items():
        hardware = load_hardware(name)
        for model, tokens, gpus, size, number, recomputed, rate in measured:
            took = _seconds(hardware, model, tokens, gpus, size, number, recomputed)
            title = f"MPT-{model}, {_length(tokens)}, {number} x {size}{', full' if recomputed else ''}, "
            row = Row(f"{title}{gpus} x {hardware.name}", "tokens/s", rate, tokens * size * number / took)
            rows[tokens <= SHORT].append(row)
    short = Source("MosaicML, up to 4K", REFERENCE, tuple(rows[True]), NOTES, year=2023)
    return short, Source("MosaicML, above 4K", REFERENCE, tuple(rows[False]), year=2023)


def _length(tokens: int) -> str:
    return f"{tokens // K}K" if tokens >= K else str(tokens)
