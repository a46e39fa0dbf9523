"""Steps of full fine-tuning and pretraining in the benchmark suites of three frameworks, 2025 and 2026."""

from __future__ import annotations

from typing import Any

from usp.parallel import load_hardware
from usp.predict.seconds import step_seconds

from .row import K, Row, Source, step_job
from .stacks import AUTOMODEL, PRIME_RL
from .trl import QWEN3_06B

QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN25_14B = {"intermediate_size": 13824, "num_hidden_layers": 48}
_TWO = {"batch_size": 2, "micro_batches": 2, "zero": 3, "ac": "full"}
_PRIME = {**_TWO, "compile": True}
_ZERO2 = {**_TWO, "zero": 2}
_NEMO = {**_PRIME, "seq_len": 8 * K, "sp_ring": 2, "batch_size": 4, "micro_batches": 4}
STEPS: tuple[tuple[str, str, dict[str, Any], str, int, dict[str, Any], float], ...] = (
    # name, preset, changes of it, node, GPUs, options, seconds
    ("prime-rl, Qwen3-0.6B, 8K", "qwen3-8b", QWEN3_06B, "h100", 1, {"seq_len": 8 * K, **_PRIME}, 0.62),
    ("prime-rl, Qwen3-0.6B, 16K", "qwen3-8b", QWEN3_06B, "h100", 1, {"seq_len": 16 * K, **_PRIME}, 1.28),
    ("prime-rl, Qwen3-4B, 16K", "qwen3-8b", QWEN3_4B, "h100", 8, {"seq_len": 16 * K, **_PRIME}, 5.01),
    ("prime-rl, Qwen3-4B, 16K", "qwen3-8b", QWEN3_4B, "h200", 8, {"seq_len": 16 * K, **_PRIME}, 4.71),
    ("prime-rl, Qwen3-4B, 16K", "qwen3-8b", QWEN3_4B, "b200", 8, {"seq_len": 16 * K, **_PRIME}, 3.74),
    ("prime-rl, Qwen3-4B, 64K", "qwen3-8b", QWEN3_4B, "b200", 8, {"seq_len": 64 * K, **_PRIME}, 39.61),
    ("NeMo Automodel, llama3-70b, 8K, ring 2", "llama3-70b", {}, "h100", 64, _NEMO, 18.90),
    ("ms-swift, Qwen2.5-14B, 8K, ZeRO-2", "qwen2.5-32b", QWEN25_14B, "a800", 8, {"seq_len": 8 * K, **_ZERO2}, 10.32),
    ("ms-swift, Qwen2.5-14B, 8K, ZeRO-3", "qwen2.5-32b", QWEN25_14B, "a800", 8, {"seq_len": 8 * K, **_TWO}, 10.56),
)
SYSTEMS = {"prime-rl": PRIME_RL, "NeMo": AUTOMODEL}  # ms-swift is eager
KERNELS = {"prime-rl, Qwen3-0.6B, 8K": "flash3", "prime-rl, Qwen3-0.6B, 16K": "flash3"}
NOTES = (
    "prime-rl: a step has two micro-batches of one sequence on each GPU, as its MFU says. NeMo: the kernel is not "
    "stated; cuDNN's is assumed. prime-rl and NeMo compile their layers: launches cost nothing, and memory-bound "
    "operators move what fused kernels must. With the bytes of eager ones these rows were 3 to 20% too fast: kernels "
    "inside a step run slower than alone, and no source says by how much.",
    "prime-rl, Qwen3-0.6B: what is missing, 0.12 s of 0.62 at 8K and 0.09 of 1.28 at 16K, does not grow with the "
    "tokens. Its AdamW and clipping on DTensors take a host 0.03 s (measured: torch 2.13, 308 parameters), and its "
    "trainer waits for the device twice in a micro-batch, in the middle (`isnan` of the loss) and at the end (`item`), "
    "after which launches are exposed (src/prime_rl/trainer/sft/train.py).",
    "Left out: rows in float8, those with LoRA (whose micro-batches are not all stated), with experts (likewise), and "
    "what Megatron's tables do not say of recomputation. DeepEP, which rows with experts use, sends a token once to a "
    "rank that has any of its experts, for 8 of 128 experts on 8 ranks to 4.6 others. The time model counts the 7.0 "
    "rows that this toolkit sends.",
)
REFERENCE = (
    "github.com/PrimeIntellect-ai/prime-rl, benchmarks/baselines @559b447; github.com/NVIDIA-NeMo/Automodel, "
    "docs/performance-summary @36044ad; github.com/modelscope/ms-swift @3602360"
)


def source() -> Source:
    rows = []
    for name, preset, like, node, gpus, options, seconds in STEPS:
        kernel = KERNELS.get(name, "cudnn" if name.startswith("NeMo") else "flash2")
        system = next((stack for start, stack in SYSTEMS.items() if name.startswith(start)), None)
        job = step_job(preset, gpus, like=like, attention_kernel=kernel, system=system, **options)
        hardware = load_hardware(node)
        rows.append(Row(f"{name}, {gpus} x {hardware.name}", "s", seconds, step_seconds(job, hardware).total))
    return Source("Suites of 2025 and 2026", REFERENCE, tuple(rows), NOTES)
