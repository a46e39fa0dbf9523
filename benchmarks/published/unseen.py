"""Steps that were published after the time model was made, by which nothing in it was shaped: their errors by kind are
`usp.predict.seconds.PUBLISHED_ERRORS`."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

from usp.parallel import load_hardware
from usp.predict.job import Stack
from usp.predict.seconds import published_kind, step_seconds

from . import suites, trl
from .row import K, Row, Source, mean_error, step_job
from .stacks import AUTOMODEL, KEMPNER, MEGATRON

_TP: dict[str, Any] = {"tp_sequence_parallel": True}
_8, _8X2, _16 = ({"batch_size": size, "micro_batches": number} for size, number in ((8, 4), (8, 2), (16, 4)))
_FSDP: dict[str, Any] = {"seq_len": 4 * K, "zero": 3, "ac": "full", "compile": True, "attention_kernel": "flash2"}
_TWO = _FSDP | _TP | _8X2
_MEGATRON: dict[str, Any] = {"seq_len": 8 * K, "zero": 1, "compile": True, "attention_kernel": "cudnn"}
_CP = _MEGATRON | {"sp_ring": 2, "batch_size": 32, "micro_batches": 32}
_TP4 = _MEGATRON | _TP | {"tp": 4}
_PP = _TP4 | {"pp_schedule": "interleaved-1f1b", "batch_size": 64, "micro_batches": 64}
_SHORT = {"seq_len": 4 * K, "batch_size": 4, "micro_batches": 4}
_VP5, _VP6 = ({"pp_stages_per_rank": stages} for stages in (5, 6))
_EP8 = {"ep": 8, "batch_size": 64, "micro_batches": 16, "attention_kernel": "cudnn"}
_EP2 = {"seq_len": 4 * K, "ep": 2, "batch_size": 512, "micro_batches": 512}
_13B = {"hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40, "num_attention_heads": 40}
_15B = {"hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48, "vocab_size": 256000}
_175B = {"hidden_size": 12288, "intermediate_size": 32768, "num_hidden_layers": 96, "vocab_size": 51200}
_175B |= {"num_attention_heads": 96, "num_key_value_heads": 96}
_GROK = {"hidden_size": 6144, "intermediate_size": 32768, "num_hidden_layers": 2, "num_attention_heads": 48}
_GROK |= {"vocab_size": 131072}
STEPS: tuple[tuple[str, str, dict[str, int], str, Stack | None, int, dict[str, Any], float], ...] = (
    # name, preset, changes of it, node, its system, GPUs, options, seconds
    ("8B", "llama3-8b", {}, "h200", KEMPNER, 1, _FSDP | _8, 32768 / 10471),
    ("8B", "llama3-8b", {}, "h200", KEMPNER, 2, _FSDP | _8, 32768 / 9364),
    ("8B", "llama3-8b", {}, "h200", KEMPNER, 4, _FSDP | _8X2, 32768 / 9746),
    ("8B, tp 2", "llama3-8b", {}, "h200", KEMPNER, 2, _TWO | {"tp": 2}, 16384 / 6582),
    ("8B, tp 4", "llama3-8b", {}, "h200", KEMPNER, 4, _TWO | {"tp": 4}, 8192 / 6284),
    ("8B, tp 2", "llama3-8b", {}, "h200", KEMPNER, 4, _TWO | {"tp": 2}, 16384 / 6495),
    ("13B, eager", "llama3-8b", _13B, "h200", None, 8, _FSDP | _16 | {"compile": False}, 14.807),
    ("8B, ring 2", "llama3-8b", {}, "h100", MEGATRON, 8, _CP, 12.27),
    ("70B, tp 4, pp 4, ring 2", "llama3-70b", {}, "h100", MEGATRON, 64, _PP | _VP5 | {"pp": 4, "sp_ring": 2}, 14.66),
    ("8B", "llama3-8b", {}, "h100", MEGATRON, 8, _MEGATRON | _SHORT, 1.32),
    ("15B, tp 2", "llama3-8b", _15B, "h100", MEGATRON, 16, _TP4 | _SHORT | _8 | {"tp": 2}, 2.66),
    ("175B, tp 4, pp 8", "llama2-70b", _175B, "h100", MEGATRON, 128, _PP | _VP6 | {"seq_len": 2 * K, "pp": 8}, 8.31),
    ("8B, ring 2, float8", "llama3-8b", {}, "h100", MEGATRON, 8, _CP | {"fp8": "tensor"}, 9.33),
    ("30B-A3B, ep 8", "qwen3-30b-a3b", {}, "h100", AUTOMODEL, 8, _FSDP | _EP8, 21.8),
    ("Grok of two layers, tp 4, ep 2", "mixtral-8x7b", _GROK, "h100", MEGATRON, 8, _TP4 | _EP2, 24.0),
)  # fmt: skip
NOTES = (
    "Unseen: the first seven are KempnerForge's (torch FSDP2, four GPUs on a host; the last of them not compiled), "
    "30B-A3B is NeMo Automodel's (its kernel of attention is not stated), the rest Megatron's with TransformerEngine. "
    "What each fuses and hides is a `Stack` from its code or documentation (benchmarks/published/stacks.py): fused "
    "kernels read each input and write each output once. 175B's two matrices of an MLP are three of 2/3 of the width.",
    "Unseen, one GPU: its products alone would need 1.1 times the rate that the node file has, which eight busy GPUs "
    "sustain.",
)
REFERENCE = (
    "KempnerForge, benchmarks/mfu_scaling (2026-04); NVIDIA, dgxc-benchmarking (NeMo 24.12 to 25.02); NVIDIA-NeMo/"
    "Automodel, docs/performance-summary"
)


def by_kind() -> dict[str, list[Row]]:
    """Return the rows of each kind of `published_kind`; long ones are older, and set no constant either."""
    kinds = defaultdict[str, list[Row]](list)
    for name, preset, like, node, system, gpus, options, seconds in STEPS:
        hardware, job = load_hardware(node), step_job(preset, gpus, like=like, system=system, **options)
        if node == "h200":  # of KempnerForge
            inner, *outer = hardware.tiers
            hardware = replace(hardware, tiers=(replace(inner, devices=4), *outer), host_devices=4)
        title, took = f"{name}, {options['seq_len'] // K}K, {gpus} x {hardware.name}", step_seconds(job, hardware).total
        kinds[published_kind(job)].append(Row(title, "s", seconds, took, timed=False))
    long = (row for row in (*trl.source().rows, *suites.source().rows) if re.search(r"\b\d+M\b|64K", row.name))
    return kinds | {"long sequences": list(long)}


def source() -> Source:
    kinds = by_kind()
    errors = ", ".join(f"{kind} {mean_error(rows):.1%} ({len(rows)})" for kind, rows in kinds.items())
    summary = f"Unseen, mean error by kind: {errors}."
    rows = tuple(row for kind, rows in kinds.items() if kind != "long sequences" for row in rows)
    return Source("Unseen", REFERENCE, rows, NOTES, summary=summary)
