"""How much memory does a training step take on each rank, by sequence length and grid; and how long may a sequence be?

Every allocation is counted (parallel/memory.py) in one forward and backward of a small llama: ours with activation
checkpointing that keeps attention, a loss and MLPs in chunks; and, on the same ranks in the same run, plain
transformers with FSDP2, one sequence on each rank. What grows with the length is activations: the growth per token of
one length over another leaves out parameters, gradients, gathered layers and chunks, which are the same for both.

    python -m benchmarks.memory            # about ten minutes on two cores
    python -m benchmarks.memory --quick    # about a minute, saves nothing
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.record import RESULTS, Record, machine
from parallel import ParallelDims, ParallelMesh, apply_fsdp
from parallel.memory import track_memory
from parallel.testing import RankPool
from usp import apply_unified_sp, shard_batch
from usp.activations import apply_activation_checkpointing, apply_tiled_mlp
from usp.hf.integrate import decoder_layers
from usp.hf.stage import CausalLMStage

HIDDEN, LAYERS, HEADS, HEAD_DIM, VOCAB = 256, 2, 8, 16, 2048  # gathered parameters must not hide activations
CHUNK = 64  # tokens of the loss and of an MLP at a time
COLUMNS = ("system", "u x r", "tokens", "peak MiB per rank", "largest tensor MiB", "all its logits MiB")


@dataclass(frozen=True)
class Case:
    ulysses: int
    ring: int
    seq_len: int
    plain: bool = False  # transformers and FSDP2 alone: a sequence of seq_len on each of ulysses x ring ranks

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def logits_bytes(self) -> int:
        """Of the tokens of one rank, in fp32."""
        return self.seq_len * VOCAB * 4 // (1 if self.plain else self.ranks)


# On each rank


def measure(case: Case) -> tuple[int, int]:
    """Bytes at the peak of a forward and backward, beyond sharded parameters, and of the largest allocation."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=case.seq_len,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    root, loss_of = _plain(model, case) if case.plain else _ours(model, case)
    short = 2 * CHUNK * case.ranks
    for length in (short, case.seq_len):  # the first makes what later steps find there
        ids = torch.randint(0, VOCAB, (1, length))
        root.zero_grad()
        with track_memory() as use:
            loss_of(ids).backward()
    assert use.largest_bytes is not None
    return use.peak_bytes, use.largest_bytes


def _plain(model: Any, case: Case) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    mesh = ParallelMesh.create(ParallelDims(dp_shard=case.ranks))
    apply_fsdp(model, mesh, decoder_layers(model))
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def _ours(model: Any, case: Case) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    mesh = ParallelMesh.create(ParallelDims(ulysses=case.ulysses, ring=case.ring))
    apply_unified_sp(model, mesh, layout="zigzag")
    layers = decoder_layers(model)
    apply_tiled_mlp(layers, CHUNK)
    apply_activation_checkpointing(layers, "attention-saved", model.unified_sp)
    stage = CausalLMStage(model, mesh, loss_chunk=CHUNK)
    apply_fsdp(stage, mesh, layers)

    def loss_of(ids: Tensor) -> Tensor:
        batch = shard_batch({"input_ids": ids, "labels": ids}, mesh, layout="zigzag")
        return stage(batch.pop("input_ids"), **{"cu_seqlens": None, **batch}, global_tokens=ids.numel() - 1)

    return stage, loss_of


# In the process that starts the ranks


def growth(rows: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Activation bytes per token on each rank, by grid, from its two longest lengths that all grids have."""
    ours = [row for row in rows if not row["plain"]]
    grids = sorted({(row["ulysses"], row["ring"]) for row in ours})
    peaks = {((row["ulysses"], row["ring"]), row["seq_len"]): row["peak_bytes"] for row in ours}
    shared = sorted(n for n in {row["seq_len"] for row in ours} if all((grid, n) in peaks for grid in grids))
    short, long = shared[-2:]
    return {grid: (peaks[grid, long] - peaks[grid, short]) / (long - short) for grid in grids}


def longest(rows: list[dict[str, Any]], *, ranks: int) -> tuple[int, int, int]:
    """(budget, plain's longest sequence, ours) of those measured: the budget is what plain's longest takes."""
    group = [row for row in rows if row["ulysses"] * row["ring"] == ranks]
    budget, plain = max((row["peak_bytes"], row["seq_len"]) for row in group if row["plain"])
    return budget, plain, max(r["seq_len"] for r in group if not r["plain"] and r["peak_bytes"] <= budget)


def notes(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    by_grid = growth(rows)
    alone = by_grid[1, 1]
    found = ["Peaks are beyond the sharded parameters; plain has a sequence of that length on every rank, ours one."]
    found += [
        f"{u} x {r}: activations grow by {each:,.0f} bytes per token on each rank, {each * u * r / alone:.2f} of one "
        f"rank's / {u * r}."
        for (u, r), each in by_grid.items()
    ]
    ranks = max(row["ulysses"] * row["ring"] for row in rows)
    budget, plain, ours = longest(rows, ranks=ranks)
    found.append(
        f"{ranks} ranks, {budget / 2**20:,.0f} MiB on each: plain transformers + FSDP2 fits {plain:,} tokens, ours at "
        f"least {ours:,}: {ours / plain:.0f} x."
    )
    return tuple(found)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = (row["peak_bytes"], row["largest_bytes"], row["logits_bytes"])
    system = "transformers + FSDP2" if row["plain"] else "ours"
    return (system, f"{row['ulysses']} x {row['ring']}", f"{row['seq_len']:,}", *(f"{n / 2**20:.1f}" for n in sizes))


def cases(*, quick: bool) -> list[Case]:
    if quick:
        return [
            *(Case(u, r, n) for u, r in ((1, 1), (2, 2)) for n in (4096, 8192)),
            Case(2, 2, 512, plain=True),
        ]
    grids = ((1, 1), (2, 1), (1, 2), (2, 2), (8, 1), (4, 2), (2, 4), (1, 8))
    return [
        *(Case(u, r, n) for u, r in grids for n in (4096, 8192, 16384)),
        *(Case(4, 2, n) for n in (32768, 65536)),
        *(Case(4, 2, n, plain=True) for n in (1024, 2048)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a training step by sequence length and grid.")
    parser.add_argument("--quick", action="store_true", help="4 ranks, short sequences; saves nothing")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    args = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler that counts memory announces every start otherwise
    rows: list[dict[str, Any]] = []
    with RankPool() as ranks:
        for case in cases(quick=args.quick):
            peaks, largest = zip(*ranks.run(measure, case.ranks, case, timeout=1200.0), strict=True)
            derived = {"peak_bytes": max(peaks), "largest_bytes": max(largest), "logits_bytes": case.logits_bytes}
            rows.append({**asdict(case), **derived})
            print(*cells(rows[-1]), sep="  ", flush=True)
    record = Record(
        name="memory",
        question="Memory of a training step by sequence length and grid",
        command="python -m benchmarks.memory",
        machine=machine(),
        columns=COLUMNS,
        rows=tuple(map(cells, rows)),
        notes=notes(rows),
        data=rows,
    )
    record.print()
    output = args.output or (None if args.quick else RESULTS / "memory.json")
    if output:
        record.save(output)


if __name__ == "__main__":
    main()
