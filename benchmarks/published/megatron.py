"""Megatron-Bridge's pretraining steps in FP8 on H100: tensor, pipeline and context parallelism."""

from __future__ import annotations

from typing import Any

from usp.parallel import load_hardware
from usp.predict.seconds import step_seconds

from .row import K, Row, Source, step_job

STEPS: tuple[tuple[str, int, int, dict[str, Any], float], ...] = (
    # model, GPUs, sequences of a step, degrees, tokens/s of a GPU
    ("llama3-70b", 64, 256, {"tp": 4, "pp": 8}, 1664),
    ("llama3-405b", 1024, 1536, {"tp": 8, "pp": 8, "sp_ring": 2}, 328),
)
NOTE = (
    "Megatron-Bridge: tensor scales; products, casts and attention are Transformer Engine's: here torchao's compiled "
    "casts, and cuDNN's attention. Nothing is recomputed, and the optimizer is sharded (ZeRO-1). Its products add to "
    "the float32 sum of gradients by themselves (gradient_accumulation_fusion), which FSDP2 reads and writes once more."
)


def source() -> Source:
    rows, exposed = [], []
    for model, devices, sequences, degrees, measured in STEPS:
        each = sequences * degrees["tp"] * degrees["pp"] * degrees.get("sp_ring", 1) // devices
        job = step_job(
            model,
            devices,
            seq_len=8 * K,
            batch_size=each,
            micro_batches=each,
            zero=1,
            pp_schedule="interleaved-1f1b",
            tp_sequence_parallel=True,
            attention_kernel="cudnn",
            fp8="tensor",
            compile=True,
            **degrees,
        )
        step = step_seconds(job, load_hardware("h100"))
        rate = sequences * 8 * K / devices / step.total
        messages, bubble = step.parts["exposed tensor parallelism"] / step.total, step.bubble / step.total
        exposed.append(f"{bubble:.0%}, {messages:.0%} and {rate / (1 - messages) / measured - 1:+.0%}")
        listed = ", ".join(f"{name} {degree}" for name, degree in degrees.items())
        title = f"{model}, 8K, global batch {sequences}, {listed}, float8, {devices} x H100"
        rows.append(Row(title, "tokens/s", measured, rate, timed=False))
    overlap = (
        "Megatron-Bridge: its 5 and 8 stages on a rank make a smaller bubble than the two that are predicted, and its "
        "messages of tensor parallelism overlap with products, which the prediction exposes. The bubble, these "
        f"messages, and the error if all of them were hidden: {'; '.join(exposed)}."
    )
    return Source("Megatron-Bridge", "github.com/NVIDIA-NeMo/Megatron-Bridge @067f987", tuple(rows), (NOTE, overlap))
