"""MosaicML's tables of MPT models under FSDP on H100 and A100, of 2023."""

from __future__ import annotations

from usp.parallel import Hardware, load_hardware
from usp.predict.seconds import step_seconds

from .row import K, Row, Source, step_job

SHAPES = {  # layers, width; heads of 128
    "1b": (24, 2048),
    "3b": (32, 2560),
    "7b": (32, 4096),
    "13b": (40, 5120),
    "30b": (48, 7168),
    "70b": (80, 8192),
}
Measured = tuple[str, int, int, int, int, bool, int]
# model, tokens, GPUs, sequences of a micro-batch, micro-batches, everything recomputed, tokens/s of a GPU
H100: tuple[Measured, ...] = (
    ("70b", 2048, 64, 8, 4, True, 1039), ("70b", 2048, 32, 2, 16, True, 882), ("30b", 4096, 8, 1, 21, True, 1802),
    ("30b", 2048, 32, 14, 3, True, 2308), ("30b", 2048, 16, 10, 3, True, 2263), ("30b", 2048, 8, 3, 21, True, 2002),
    ("30b", 1024, 8, 6, 21, True, 2084), ("13b", 4096, 8, 10, 3, True, 4717), ("13b", 2048, 64, 2, 1, False, 4800),
    ("13b", 2048, 32, 2, 1, False, 4811), ("13b", 2048, 16, 2, 1, False, 4767), ("13b", 2048, 8, 2, 1, False, 4792),
    ("13b", 1024, 8, 40, 3, True, 5502), ("7b", 4096, 8, 16, 2, True, 8611), ("7b", 2048, 8, 6, 1, False, 10643),
    ("7b", 1024, 8, 64, 2, True, 10203), ("3b", 4096, 8, 5, 6, False, 20964), ("3b", 2048, 64, 6, 3, False, 22525),
    ("3b", 2048, 32, 6, 3, False, 23021), ("3b", 2048, 16, 10, 3, False, 24142), ("3b", 1024, 8, 20, 6, False, 27046),
    ("3b", 512, 8, 40, 6, False, 27965), ("1b", 4096, 8, 7, 4, False, 38535), ("1b", 2048, 64, 20, 1, False, 44402),
    ("1b", 2048, 32, 20, 1, False, 45130), ("1b", 2048, 16, 20, 1, False, 46037),
    ("1b", 2048, 8, 14, 1, False, 45455), ("1b", 1024, 8, 18, 4, False, 48910), ("1b", 512, 8, 56, 4, False, 52275),
    ("30b", 8192, 8, 1, 21, True, 1384), ("13b", 32768, 8, 1, 3, True, 1976), ("13b", 16384, 8, 3, 3, True, 2985),
    ("7b", 65536, 8, 1, 2, True, 1956), ("7b", 32768, 8, 2, 2, True, 3318), ("7b", 8192, 8, 8, 2, True, 6935),
    ("3b", 65536, 8, 1, 2, True, 3262), ("3b", 32768, 8, 3, 6, True, 5873), ("3b", 16384, 8, 1, 6, False, 11152),
    ("3b", 8192, 8, 3, 6, False, 16578), ("1b", 65536, 8, 1, 2, True, 5506), ("1b", 32768, 8, 1, 4, False, 12025),
    ("1b", 16384, 8, 2, 4, False, 19649), ("1b", 8192, 8, 3, 4, False, 29157),
)  # fmt: skip
A100: tuple[Measured, ...] = (
    ("70b", 2048, 64, 8, 4, True, 410), ("70b", 2048, 32, 2, 16, True, 373), ("30b", 4096, 8, 1, 21, True, 814),
    ("30b", 2048, 8, 3, 21, True, 916), ("30b", 1024, 8, 6, 21, True, 946), ("13b", 4096, 8, 10, 3, True, 2060),
    ("13b", 2048, 8, 2, 3, False, 2262), ("13b", 1024, 8, 40, 3, True, 2330), ("7b", 4096, 8, 16, 2, True, 3684),
    ("7b", 2048, 8, 6, 2, False, 4641), ("7b", 1024, 8, 64, 2, True, 4357), ("3b", 4096, 8, 5, 6, False, 9457),
    ("3b", 2048, 8, 10, 2, False, 10811), ("3b", 1024, 8, 20, 6, False, 11580), ("1b", 4096, 8, 7, 4, False, 17807),
    ("1b", 2048, 8, 14, 4, False, 20513), ("1b", 1024, 8, 18, 4, False, 22112), ("30b", 8192, 8, 1, 21, True, 574),
    ("13b", 32768, 8, 1, 3, True, 1016), ("13b", 16384, 8, 3, 3, True, 1431), ("13b", 8192, 8, 5, 3, True, 1795),
    ("7b", 65536, 8, 1, 2, True, 1013), ("7b", 32768, 8, 2, 2, True, 1672), ("7b", 16384, 8, 4, 2, True, 2453),
    ("7b", 8192, 8, 8, 2, True, 3206),
)  # fmt: skip
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
    batch: dict[str, int] = {"batch_size": rows * number, "micro_batches": number}
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
    for name, measured in (("h100", H100), ("a100", A100)):
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
