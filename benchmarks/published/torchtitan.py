"""torchtitan's tables: FSDP in bfloat16 without torch.compile on A100 and H100, and compiled steps with float8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from usp.parallel import Hardware, load_hardware
from usp.predict.seconds import sent_seconds, step_seconds
from usp.predict.traffic import step_traffic

from .row import K, Row, Source, step_job
from .stacks import TORCHTITAN

LLAMA2_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40}
LLAMA2_13B |= {"num_attention_heads": 40, "num_key_value_heads": 40}
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
POWER = (1 + 835 / 989) / 2  # of the peak, at 500 W
NOTES = (
    "torchtitan: `selective layer` recomputes every second layer, `selective op` every second matrix product and "
    "everything that is bound by memory, but not attention: mixtures of steps with and without recomputation.",
    "torchtitan, H100: the node file with what the source says of its cards, 96 GB at 2.4 TB/s and 500 W instead of "
    "700: their peak is between those of H100 SXM and NVL (989 and 835 TFLOP/s), here in the middle.",
    "torchtitan, on cards of 500 W: eager and compiled steps are both 15 to 21% too fast, so that what compiling "
    "gains, 15.7 and 16.2%, is predicted within 4%: these cards multiply more slowly than is assumed, and no source "
    "says how fast.",
    "torchtitan, compiled: float8 has tensor scales, weights are gathered in float8, and linears converted as here, "
    "though in 2024 perhaps the output head, too. Under tensor parallelism its ranks cast tokens before they gather "
    "them (torchao's Float8ColwiseParallel), so that gathers take half. Of torch.compile, the time model has "
    "fused operators, rotations excepted, and no waiting for launches. The kernel of "
    "attention is not stated, and flash-attn 2 is assumed. Context parallelism gathers keys and values there, and is a "
    "ring here.",
    "torchtitan, rings of 4 and 8: the source's own rows at 32K and 64K continue in a straight line, as attention "
    "does, to 1,499 and 824 tokens/s at 128K and 256K, where it measured 1,071 and 548. From ring 2 to 4 it loses 58%, "
    "its 405B with tp and pp 34% (47 to 31 tokens/s), and the prediction 41%. It does not say what else differs.",
)
FSDP: dict[str, Any] = {"seq_len": 8 * K, "batch_size": 2}
LLAMA_70B: dict[str, Any] = {"seq_len": 8 * K, "batch_size": 16, "tp": 8, "tp_sequence_parallel": True}
COMPILED: tuple[tuple[str, str, int, str, dict[str, Any], float, float], ...] = (
    # model, node, GPUs, recomputation, options, tokens/s of a GPU in bfloat16 (0: not given) and in float8
    ("llama3-8b", "h100", 8, "selective op", FSDP, 6667, 8532),
    ("llama3-8b", "h100", 128, "selective op", FSDP, 6514, 8380),
    ("llama3-8b", "h200", 32, "selective op", FSDP, 0, 10938),
    ("llama3-8b", "h200", 64, "selective op", FSDP, 0, 10753),
    ("llama3-70b", "h100", 256, "full", LLAMA_70B, 597.3, 809.8),
    ("llama3-8b", "h100", 64, "selective op", LLAMA_70B | {"batch_size": 12}, 4378, 5078),
    ("llama3-8b", "h100", 8, "full", {"seq_len": 32 * K}, 0, 3890),
    *(
        ("llama3-8b", "h100", 8, "full", {"seq_len": 32 * K * ring, "sp_ring": ring}, 0, measured)
        for ring, measured in ((2, 2540), (4, 1071), (8, 548))
    ),
)


def _seconds(hardware: Hardware, model: str, devices: int, recomputed: str, **options: Any) -> float:
    """Return the time of a step in which what `recomputed` names runs again in the backward."""

    def step(ac: str) -> tuple[float, float]:
        system = TORCHTITAN if options.get("compile") else None
        job = step_job(model, devices, ac=ac, zero=3, attention_kernel="flash2", system=system, **options)
        found = step_seconds(job, hardware)
        gathers = (sent for sent in step_traffic(job, 0) if sent.axis == "tp" and "gather" in sent.collective)
        saved = sum(sent_seconds(job, hardware, sent, 0) for sent in gathers) / 2 if job.config.fp8 != "none" else 0.0
        return found.total - saved, found.compute.matmul

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
    h100 = load_hardware("h100")
    peaks = {dtype: POWER * peak for dtype, peak in h100.peak_flops.items()}
    h100 = replace(h100, peak_flops=peaks, memory_bytes=96 * 10**9, memory_bytes_per_second=2.4e12)
    for devices, measured in H100:
        seconds = _seconds(h100, "llama3-8b", devices, "selective op", seq_len=8 * K, batch_size=2)
        title = f"llama3-8b, 8K, batch 2, selective op, {devices} x H100 of 500 W"
        rows.append(Row(title, "tokens/s", measured, 16 * K / seconds))
    compiled, gains = _compiled({"h100": h100, "h200": load_hardware("h200")})
    reference = (
        "github.com/pytorch/torchtitan: docs/performance.md (2024), benchmarks/llama3_h100_202412_torchtitan.md, "
        "asyncTP_llama3_h100_2025-06_torchtitan.md, llama3_8b_h200_2025-06_torchtitan.md"
    )
    return Source("torchtitan", reference, (*rows, *compiled), (*NOTES, gains))


def _compiled(nodes: dict[str, Hardware]) -> tuple[list[Row], str]:
    """Return the rows of compiled steps, and the note of what float8 gains."""
    rows, gains = [], []
    for model, node, devices, recomputed, options, *both in COMPILED:
        rates = []
        tp, ring = options.get("tp", 1), options.get("sp_ring", 1)
        size = f"{options['seq_len'] // K}K, batch {options.get('batch_size', 1)}"
        degrees = "".join(f", {name} {degree}" for name, degree in (("tp", tp), ("ring", ring)) if degree > 1)
        for fp8, measured in zip(("none", "tensor"), both, strict=True):
            if not measured:
                continue
            seconds = _seconds(nodes[node], model, devices, recomputed, compile=True, fp8=fp8, **options)
            rates.append(options["seq_len"] * options.get("batch_size", 1) / tp / ring / seconds)
            kind = "bfloat16" if fp8 == "none" else "float8"
            title = f"{model}, {size}, {recomputed}{degrees}, compiled, {kind}, {devices} x {node.upper()}"
            rows.append(Row(title, "tokens/s", measured, rates[-1], timed=fp8 == "none"))
        if len(rates) == 2:
            gains.append(f"{both[1] / both[0]:.2f} and {rates[1] / rates[0]:.2f} ({model}{degrees}, {devices} GPUs)")
    return rows, f"torchtitan, float8 over bfloat16, measured and predicted: {'; '.join(gains)}."
