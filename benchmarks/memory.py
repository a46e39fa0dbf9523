"""Peak memory of a training step on each rank, by sequence length and grid, and the longest sequence that fits.

Every allocation in one forward and backward of a small llama is counted (tests/harness/memory.py) on each rank.
Systems, in the same run on the same ranks:

    ours            saves all activations, which shrink as 1 / (ulysses x ring)
    ours, saving    selective activation checkpointing that saves attention, and tiled MLPs
    plain           transformers and FSDP2 with one sequence per rank, with and without gradient checkpointing

Only activations grow with the sequence length. The growth per token between two lengths therefore excludes parameters,
gradients, gathered layers and chunks, which are equal for both.

    python -m benchmarks.memory            # about ten minutes on two cores
    python -m benchmarks.memory --quick    # about a minute
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.gpu.model import Shape
from benchmarks.harness.record import Record, finish, parser_of
from tests.harness.memory import track_memory
from tests.harness.ranks import RankPool
from usp import apply_unified_sp, shard_batch
from usp.hf.integrate import decoder_layers
from usp.hf.stage import CausalLMStage
from usp.losses import NextTokenLoss
from usp.model.recompute import apply_activation_checkpointing, apply_tiled_mlp
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp

HIDDEN, LAYERS, HEADS, HEAD_DIM, VOCAB = 256, 2, 8, 8, 4096
CHUNK = 64  # tokens per chunk of the loss and per tile of an MLP
OURS, SAVING, *PLAINS = "ours", "ours, saving", "plain", "plain, checkpointing"
QUESTION = "How much longer may sequences be in the same memory?"
COLUMNS = ("system", "u x r", "tokens", "peak MiB per rank", "largest tensor MiB", "all its logits MiB")


@dataclass(frozen=True)
class Case:
    ulysses: int
    ring: int
    seq_len: int
    system: str = OURS

    @property
    def plain(self) -> bool:
        """Return whether each rank has a whole sequence instead of a shard of one."""
        return self.system in PLAINS

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def logits_bytes(self) -> int:
        """Return the bytes of the full logits of one rank's tokens, in fp32."""
        return self.seq_len * VOCAB * 4 // (1 if self.plain else self.ranks)


# On each rank


def measure(case: Case) -> tuple[int, int]:
    """Return the peak bytes of a forward and backward, excluding sharded parameters, and the largest allocation."""
    torch.manual_seed(0)
    config = Shape(HIDDEN, 2 * HIDDEN, VOCAB, LAYERS, HEADS, HEADS).config()
    config.head_dim, config.use_cache = HEAD_DIM, False
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    root, loss_of = _plain(model, case) if case.plain else _ours(model, case)
    short = 2 * CHUNK * case.ranks
    for length in (short, case.seq_len):  # the first creates what later steps reuse
        ids = torch.randint(0, VOCAB, (1, length))
        root.zero_grad()
        with track_memory() as use:
            loss_of(ids).backward()
    assert use.largest_bytes is not None
    return use.peak_bytes, use.largest_bytes


def _plain(model: Any, case: Case) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    mesh = ParallelMesh.create(ParallelDims(dp_shard=case.ranks))
    if case.system == PLAINS[1]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    apply_fsdp(model, mesh, decoder_layers(model))
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def _ours(model: Any, case: Case) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    mesh = ParallelMesh.create(ParallelDims(ulysses=case.ulysses, ring=case.ring))
    apply_unified_sp(model, mesh, layout="zigzag")
    layers = decoder_layers(model)
    if case.system == SAVING:
        apply_tiled_mlp(layers, CHUNK)
        apply_activation_checkpointing(layers, "attention-saved", model.unified_sp)
    stage = CausalLMStage(model, mesh, loss_chunk=CHUNK)
    apply_fsdp(stage, mesh, layers)

    def loss_of(ids: Tensor) -> Tensor:
        batch = shard_batch({"input_ids": ids, "labels": ids}, mesh, layout="zigzag")
        return stage(batch.pop("input_ids"), **{"cu_seqlens": None, **batch}, head=NextTokenLoss(ids.numel() - 1))

    return stage, loss_of


# In the parent process


def growth(rows: list[dict[str, Any]], short: int, long: int) -> dict[tuple[int, int], float]:
    """Return the activation bytes per token on each rank between two lengths, for each grid measured at both."""
    peaks = {(row["ulysses"], row["ring"], row["seq_len"]): row["peak_bytes"] for row in rows if row["system"] == OURS}
    grids = [(u, r) for u, r, tokens in peaks if tokens == long and (u, r, short) in peaks]
    return {(u, r): (peaks[u, r, long] - peaks[u, r, short]) / (long - short) for u, r in grids}


def longest(rows: list[dict[str, Any]], plain: str, *, ranks: int) -> tuple[int, int, int]:
    """Return (budget, plain's longest sequence, ours) among the measured: the budget is the peak of plain's longest."""
    group = [row for row in rows if row["ulysses"] * row["ring"] == ranks]
    budget, its = max((row["peak_bytes"], row["seq_len"]) for row in group if row["system"] == plain)
    return budget, its, max(r["seq_len"] for r in group if r["system"] == SAVING and r["peak_bytes"] <= budget)


def notes(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    found = ["Peaks exclude sharded parameters. plain has one sequence of that length on every rank, ours one in all."]
    lengths = sorted({row["seq_len"] for row in rows if row["system"] == OURS})
    for short, long in pairwise(lengths):
        by_grid = growth(rows, short, long)
        for (u, r), each in by_grid.items():
            found.append(
                f"{u} x {r}, {short:,} to {long:,}: activations grow by {each:,.0f} bytes per token on each rank, "
                f"{each * u * r / by_grid[1, 1]:.2f}x the ideal (one rank's / {u * r})."
            )
    return tuple(found)


def answer(rows: list[dict[str, Any]]) -> str:
    ranks = max(row["ulysses"] * row["ring"] for row in rows)
    (_, its, ours), (_, saving_its, saving) = (longest(rows, plain, ranks=ranks) for plain in PLAINS)
    long = max(row["seq_len"] for row in rows if row["system"] == OURS and row["ulysses"] * row["ring"] == ranks)
    before = max(row["seq_len"] for row in rows if row["system"] == OURS and row["seq_len"] < long)
    by_grid = growth(rows, before, long)
    share = max(each * u * r / by_grid[1, 1] for (u, r), each in by_grid.items() if u * r == ranks)
    return (
        f"Where transformers with FSDP2 fits a sequence of {its:,} tokens on each of {ranks} ranks, one of at least "
        f"{ours:,} over all ranks fits, {ours / its:.0f} times as long; {saving:,} and {saving / saving_its:.0f} times "
        f"with recomputation in both. Activations per token and rank are {share:.2f} of one rank's / {ranks}."
    )


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = (row["peak_bytes"], row["largest_bytes"], row["logits_bytes"])
    grid = f"{row['ulysses']} x {row['ring']}"
    return (row["system"], grid, f"{row['seq_len']:,}", *(f"{n / 2**20:.1f}" for n in sizes))


def cases(*, quick: bool) -> list[Case]:
    if quick:
        return [
            *(Case(u, r, n) for u, r in ((1, 1), (2, 2)) for n in (4096, 8192)),
            Case(2, 2, 8192, SAVING),
            *(Case(2, 2, 1024, system) for system in PLAINS),
        ]
    grids = ((1, 1), (2, 1), (1, 2), (2, 2), (8, 1), (4, 2), (2, 4), (1, 8))
    return [
        *(Case(u, r, n) for u, r in grids for n in (4096, 16384)),
        *(Case(u, r, 65536) for u, r in ((1, 1), (4, 2))),
        *(Case(4, 2, n, SAVING) for n in (16384, 32768, 65536)),
        *(Case(4, 2, n, system) for system in PLAINS for n in (1024, 2048)),
    ]


def main() -> None:
    args = parser_of(__doc__ or "", quick="4 ranks and short sequences").parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # silences the profiler that tracks memory
    rows: list[dict[str, Any]] = []
    with RankPool() as ranks:
        for case in cases(quick=args.quick):
            peaks, largest = zip(*ranks.run(measure, case.ranks, case, timeout=1200.0), strict=True)
            derived = {"peak_bytes": max(peaks), "largest_bytes": max(largest), "logits_bytes": case.logits_bytes}
            rows.append({**asdict(case), **derived})
            print(*cells(rows[-1]), sep="  ", flush=True)
    finish(Record.of("memory", QUESTION, answer(rows), COLUMNS, map(cells, rows), notes(rows), rows), args)


if __name__ == "__main__":
    main()
