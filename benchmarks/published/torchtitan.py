"""torchtitan's tables of FSDP in bfloat16 without torch.compile, on A100 and H100."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel import Hardware, load_hardware
from usp.predict.seconds import step_seconds

from .row import K, Row, Source, step_job

LLAMA2_13B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}
A100: tuple[tuple[str, dict[str, Any], int, int, str, float], ...] = (
    # model, changes of the preset, tokens, sequences of a GPU, recomputation, tokens/s of a GPU
    ("llama3-8b", {}, 8 * K, 1, "selective layer", 2904),
    ("llama3-8b", {}, 8 * K, 1, "selective op", 2973),
    ("llama3-70b", {}, 8 * K, 1, "full", 331),
    ("llama2-7b", LLAMA2_13B, 4 * K, 2, "none", 2162),
    ("llama2-7b", LLAMA2_13B, 4 * K, 2, "selective layer", 1914),
    ("llama2-7b", LLAMA2_13B, 4 * K, 2, "selective op", 1904),
    ("llama2-70b", {}, 4 * K, 1, "selective op", 355),
    ("llama2-70b", {}, 4 * K, 2, "full", 353),
)
H100 = ((8, 5762), (128, 5605))  # GPUs, tokens/s of a GPU
NOTES = (
    "torchtitan: `selective layer` recomputes every second layer, `selective op` every second matrix product and "
    "everything that is bound by memory, but not attention: mixtures of steps with and without recomputation.",
    "torchtitan, H100: the node file with what the source says of its cards, 96 GB at 2.4 TB/s; that they run at 500 W "
    "instead of 700 W is not modelled. The source gives its own MFU as too low for that reason.",
    "torchtitan: rows in float8 are left out, and those of this report with torch.compile.",
)


def _seconds(hardware: Hardware, model: str, devices: int, recomputed: str, **options: Any) -> float:
    """Return the time of a step in which what `recomputed` names runs again in the backward."""

    def step(ac: str) -> tuple[float, float]:
        job = step_job(model, devices, ac=ac, zero=3, attention_kernel="flash2", **options)
        found = step_seconds(job, hardware)
        return found.total, found.compute.matmul

    if recomputed in ("none", "full"):
        return step(recomputed)[0]
    (least, products), (most, all_products) = step("none"), step("full" if "layer" in recomputed else "attention-saved")
    return (least + most) / 2 if "layer" in recomputed else most - (all_products - products) / 2


def source() -> Source:
    a100 = load_hardware("a100")
    rows = []
    for model, like, tokens, batch, recomputed, measured in A100:
        seconds = _seconds(a100, model, 64, recomputed, like=like, seq_len=tokens, batch_size=batch)
        name = "llama2-13b" if like else model
        title = f"{name}, {tokens // K}K, batch {batch}, {recomputed}, 64 x A100"
        rows.append(Row(title, "tokens/s", measured, tokens * batch / seconds))
    h100 = replace(load_hardware("h100"), memory_bytes=96 * 10**9, memory_bytes_per_second=2.4e12)
    for devices, measured in H100:
        seconds = _seconds(h100, "llama3-8b", devices, "selective op", seq_len=8 * K, batch_size=2)
        title = f"llama3-8b, 8K, batch 2, selective op, {devices} x H100 of 500 W"
        rows.append(Row(title, "tokens/s", measured, 16 * K / seconds))
    reference = "github.com/pytorch/torchtitan: docs/performance.md (2024), benchmarks/llama3_h100_202412_torchtitan.md"
    return Source("torchtitan", reference, tuple(rows), NOTES)
