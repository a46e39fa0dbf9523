"""TRL's steps of a million tokens and more: transformers, FSDP2 and torch's context parallelism on H100."""

from __future__ import annotations

from typing import Any

from usp.parallel import load_hardware
from usp.predict.seconds import step_seconds

from .row import M, Row, Source, step_job

QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
STEPS: tuple[tuple[str, dict[str, Any], int, int, str, float], ...] = (
    # model, changes of the preset, million tokens, GPUs, kernel, seconds
    ("qwen3-8b", {}, 1, 8, "cudnn", 380),
    ("qwen3-8b", {}, 1, 8, "cudnn", 364),
    ("qwen3-8b", {}, 2, 16, "cudnn", 696),
    ("qwen3-8b", {}, 4, 32, "cudnn", 1346),
    ("qwen3-8b", {}, 1, 8, "flash2", 606),
    ("qwen3-8b", QWEN3_06B, 1, 8, "cudnn", 137),
    ("qwen3-8b", QWEN3_06B, 4, 8, "cudnn", 2135),
    ("qwen3-32b", {}, 1, 8, "cudnn", 1295),
)
NOTES = (
    "TRL: one sequence over all GPUs in a ring, ZeRO-3, everything recomputed, checkpoints in host memory. 380 s is "
    "the documented example (pull request 6846), 606 s the same with torch's flash attention (transformers, 48324), "
    "the rest the first version of the guide (6845). Its author writes later that a missing cuDNN had inflated times "
    "posted first; 364 s beside 380 s says that these are not meant.",
    "TRL: Qwen3-30B-A3B (483 s, 1M tokens) is left out: with transformers' experts the step is not the one modelled.",
)


def source() -> Source:
    hardware, rows = load_hardware("h100"), []
    for model, like, millions, devices, kernel, measured in STEPS:
        job = step_job(
            model,
            devices,
            like=like,
            seq_len=millions * M,
            sp_ring=devices,
            zero=3,
            ac="full",
            ac_offload=True,
            attention_kernel=kernel,
        )
        title = f"{'qwen3-0.6b' if like else model}, {millions}M, {devices} x H100, {kernel}"
        rows.append(Row(title, "s", measured, step_seconds(job, hardware).total))
    reference = "github.com/huggingface/trl, pull requests 6845 and 6846; huggingface/transformers, pull request 48324"
    return Source("TRL", reference, tuple(rows), NOTES)
