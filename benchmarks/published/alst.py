"""The longest sequences that Arctic Long Sequence Training trains Llama-8B with, against those that fit here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from usp.config import TrainConfig
from usp.fields import flag
from usp.parallel import load_hardware
from usp.planning.step_report import StepReport
from usp.run.tables import GIB

from .row import K, Row, Source, step_job

TRAINED = ((1, 500_000), (8, 3_700_000), (32, 15_000_000))  # GPUs, tokens
TILE = 8 * K
# ALST's recipe: what the release at hand has of it.
OFFLOADS = tuple(
    name for name in ("ac_offload", "optim_offload") if name in {field.name for field in fields(TrainConfig)}
)


def source() -> Source:
    rows, notes = [], []
    for devices, trained in TRAINED:
        longest = longest_sequence(devices)
        found = _step(devices, trained)
        rows.append(Row(f"llama3-8b, {devices} x H100", "tokens", trained, longest, timed=False))
        peak = found.memory.peak
        host = found.memory.host * min(devices, 8) / 1e12
        notes.append(
            f"ALST, {devices} x H100: {trained:,} tokens need {peak.total / GIB:.1f} GiB on a GPU "
            f"({peak.transient / GIB:.1f} are temporary, in {peak.name}), where {found.limits.device / GIB:.1f} of "
            f"{found.hardware.memory_bytes / GIB:.1f} are usable, and {host:.2f} TB of a host's 1.9; {longest:,} fit."
        )
    notes.append(
        "ALST: ZeRO-3, everything recomputed, checkpoints and optimizer in host memory, tiled MLP and loss, Ulysses "
        f"over all GPUs; here with {' and '.join(map(flag, OFFLOADS))}, and 90% of a GPU's memory counted as usable, "
        "where ALST fills it. On one GPU ALST also keeps the weights in host memory, which this toolkit does not. The "
        "differences are between two systems, not errors of a prediction."
    )
    notes.append(
        "ALST: the times of these steps are missing. Searched: stored copies of the paper's abstract and summaries, "
        "the announcement, the project's README, recipes and usage notes; they name lengths only."
    )
    reference = (
        "arXiv 2506.13996; github.com/snowflakedb/ArcticTraining: projects/sequence-parallelism (recipes, hosts)"
    )
    return Source("ALST's longest sequences", reference, tuple(rows), tuple(notes))


def longest_sequence(devices: int) -> int:
    """Return the longest sequence, in multiples of 8K tokens on each GPU, whose step fits; 0 if none does."""
    low, high = 0, 1
    while _step(devices, high * TILE * devices).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _step(devices, middle * TILE * devices).fits else (low, middle)
    return low * TILE * devices


def _step(devices: int, tokens: int) -> StepReport:
    whole = -(-tokens // (TILE * devices)) * TILE * devices
    options: dict[str, Any] = {"zero": 3, "ac": "full", "mlp_tile": TILE, **dict.fromkeys(OFFLOADS, True)}
    return StepReport(
        step_job("llama3-8b", devices, seq_len=whole, sp_ulysses=devices, **options), load_hardware("h100")
    )
