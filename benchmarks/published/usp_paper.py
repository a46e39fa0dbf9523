"""Tables 6 and 7 of the USP paper: Llama3-8B on 16 A800, tensor parallelism beside Ulysses and ring."""

from __future__ import annotations

from unittest.mock import patch

from usp.parallel import load_hardware
from usp.predict import compute
from usp.predict.compute import merge_bytes
from usp.predict.seconds import step_seconds

from .row import K, Row, Source, step_job

STEPS: tuple[tuple[str, int, int, tuple[tuple[int, int, int, float], ...]], ...] = (
    # table, tokens in units of 1,024, sequences of a step, (tp, ulysses, ring, TFLOP/s of a GPU)
    (
        "Table 6", 64, 1,
        (
            (1, 8, 2, 136.31), (1, 4, 4, 137.48), (1, 2, 8, 129.44), (1, 1, 16, 121.83), (8, 1, 2, 129.75),
            (4, 2, 2, 122.45), (2, 4, 2, 87.67), (2, 2, 4, 89.35), (4, 1, 4, 122.57), (2, 1, 8, 101.35),
        ),
    ),
    ("Table 6", 64, 2, ((8, 1, 1, 141.20),)),
    (
        "Table 6", 80, 1,
        (
            (1, 8, 2, 147.46), (1, 4, 4, 148.90), (1, 2, 8, 140.13), (1, 1, 16, 132.86), (8, 1, 2, 136.16),
            (4, 2, 2, 137.49), (2, 4, 2, 111.05), (2, 2, 4, 110.81), (4, 1, 4, 130.27), (2, 1, 8, 121.14),
        ),
    ),
    ("Table 6", 80, 2, ((8, 1, 1, 144.40),)),
    ("Table 6", 120, 1, ((4, 2, 2, 152.51), (2, 4, 2, 136.63), (8, 1, 2, 145.92), (4, 1, 4, 150.96))),
    ("Table 7", 160, 1, ((4, 2, 2, 158.64), (8, 1, 2, 156.63))),
    ("Table 7", 208, 1, ((8, 1, 2, 147.26),)),
    ("Table 7", 160, 1, ((4, 1, 4, 159.37),)),
    ("Table 7", 190, 1, ((4, 1, 4, 157.08),)),
)  # fmt: skip
GPUS = 16
WHY = (
    "USP, Table 6: tp 2 alone breaks the order, and is lowest at every length. From tp 1 to 2 to 4 the traffic of tp "
    "grows by 1 and 2 parts, that of Ulysses shrinks by 1 and 2, that of parameters by 2 and 1, and the ring's stays: "
    "no sum of them is largest at 2. What tp 2 x ulysses 4 x ring 2 takes beyond its prediction shrinks with the "
    "length, while traffic and compute grow. Memory is no cause, for tp 1 needs more of it and is on time. The paper "
    "does not say why."
)


def source() -> Source:
    node, rows = load_hardware("a800"), []
    for table, length, sequences, measured in STEPS:
        for tp, ulysses, ring, rate in measured:
            size = f"{length}K" + (f" batch {sequences}" if sequences > 1 else "")
            job = step_job(
                "llama3-8b",
                GPUS,
                seq_len=length * K,
                sp_ulysses=ulysses,
                sp_ring=ring,
                tp=tp,
                tp_sequence_parallel=tp > 1,
                batch_size=sequences * tp * ulysses * ring // GPUS,
                zero=1,
            )
            # the paper's system, yunchang, casts outputs before it adds them up (`update_out_and_lse`)
            with patch.object(compute, "merge_bytes", lambda size, back, _: merge_bytes(size, back, fused=False)):
                step = step_seconds(job, node, prefetches=False)
            name = f"{table}, {size}, tp {tp} x ulysses {ulysses} x ring {ring}"
            rows.append(Row(name, "TFLOP/s", rate, step.causal_flops / step.total / 1e12))
    reference = "arXiv 2405.07719v5, Tables 6 and 7"
    return Source("USP, Llama3-8B on 16 x A800", reference, tuple(rows), (WHY,))
