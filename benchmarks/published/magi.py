"""MagiAttention's study of context parallelism on H100: Ulysses, ring and USP, by attention alone."""

from __future__ import annotations

from usp.parallel import Hardware, load_hardware, overlap_of
from usp.predict.job import Job
from usp.predict.seconds import attention_passes, sent_seconds
from usp.predict.traffic import attention_traffic

from .row import K, Row, Source, step_job

DEVICES = (8, 16, 32, 64)
MEASURED = {  # TFLOP/s of a GPU by number of GPUs, forward and backward, read off charts
    "Ulysses": ((600, 557, 580, 585), (582, 560, 573, 585)),
    "ring": ((421, 455, 450, 447), (432, 474, 469, 457)),
    "USP": ((592, 588, 593, 586), (572, 569, 573, 571)),
}
HEADS, HEAD_DIM, LOCAL = 64, 128, 8 * K  # tokens of a GPU
# Bytes that the study copies around a kernel, per element of q, in (forward, backward): 4 to gather an operand's rows,
# 6 to scatter a result's into zeros; keys and values together have a quarter of the elements.
COPIES = 4 + 6 + 4 / 4, 3 * 4 + 6 + (4 + 6) / 4
NOTES = (
    "MagiAttention: 64 query and 8 KV heads of dim 128, 8K tokens on each GPU, causal, flash-attn 3. The values are "
    "read off charts, to 5 TFLOP/s; work counts as in the source, visible pairs x 2 products, 5 in the backward.",
    "MagiAttention: the degrees of its USP are not stated; assumed are Ulysses in a host of 8 and the ring between "
    "hosts, on one host Ulysses 4 x ring 2.",
    "MagiAttention: its code (exps/dist_attn/baselines) gathers the rows of each kernel's operands and scatters its "
    "results into zeros, in every step of a ring: counted, with the rates of memory. Its rings remain slowest on one "
    "host, where 34 MB of keys and values pass in less than a tenth of a step's compute.",
)


def source() -> Source:
    hardware, rows = load_hardware("h100"), []
    for system, (forward, backward) in MEASURED.items():
        for devices, once, back in zip(DEVICES, forward, backward, strict=True):
            degrees = {"Ulysses": devices, "ring": 1, "USP": 8 if devices > 8 else 4}
            predicted = _rates(hardware, devices, degrees[system])
            for direction, measured, rate in zip(("forward", "backward"), (once, back), predicted, strict=True):
                rows.append(Row(f"{system}, {devices} x H100, {direction}", "TFLOP/s", measured, rate))
    reference = "github.com/SandAI-org/MagiAttention: docs/source/blog/cp_benchmark.md, charts for H100, causal mask"
    return Source("MagiAttention's study", reference, tuple(rows), NOTES)


def attention_seconds(job: Job, hardware: Hardware) -> tuple[float, float]:
    """Return the time of the first layer's attention and Ulysses on the slowest rank: in the forward, the backward."""
    rank = job.slowest_ranks[0]
    traffic = attention_traffic(job, rank, job.model.facts.windows[0])
    free = overlap_of(hardware, job.linked("ring", rank))
    once, back = (
        kernels + messages.with_free_part(free).exposed + sent_seconds(job, hardware, exchange, rank)
        for (kernels, messages), (exchange, *_) in zip(attention_passes(job, hardware, rank, 0), traffic, strict=True)
    )
    return once, back


def _rates(hardware: Hardware, devices: int, ulysses: int) -> tuple[float, float]:
    """Return TFLOP/s of a GPU in the forward and in the backward."""
    tokens = devices * LOCAL
    job = step_job(
        "llama2-70b",
        devices,
        seq_len=tokens,
        sp_ulysses=ulysses,
        sp_ring=devices // ulysses,
        zero=3,
        attention_kernel="flash3",
    )
    once, back = attention_seconds(job, hardware)
    elements = LOCAL * HEADS * HEAD_DIM * devices // ulysses  # of all steps
    copies, copies_back = (hardware.memory_seconds(nbytes * elements) for nbytes in COPIES)
    flops = 4 * tokens * (tokens + 1) / 2 * HEADS * HEAD_DIM / devices / 1e12
    return flops / (once + copies), 2.5 * flops / (back + copies_back)
