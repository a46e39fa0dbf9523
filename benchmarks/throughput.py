"""How fast is a training step, against plain transformers + FSDP2 and against DeepSpeed's Ulysses (ALST)?

The same llama, the same global batch, the same AdamW with clipping, on the same ranks in one run, taking turns step by
step. Plain transformers cannot split a sequence: it gets a sequence on each rank, and so does ours beside it; ALST and
ours then split all sequences over all ranks. Every system's loss and gradient norm of the first step are compared.

    python -m benchmarks.throughput
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.baselines import deepspeed_alst
from benchmarks.harness.record import RESULTS, Record, machine
from parallel import ParallelDims, ParallelMesh, apply_fsdp
from parallel.testing import RankPool
from usp import apply_unified_sp, shard_batch
from usp.hf.integrate import decoder_layers
from usp.hf.stage import CausalLMStage
from usp.losses import NextTokenLoss
from usp.train.engines.base import AdamW
from usp.train.engines.fsdp2 import Fsdp2Engine

RANKS, ZERO, LEARNING_RATE, DECAY = 4, 3, 1e-3, 0.01
PLAIN, ALST = "transformers + FSDP2", f"DeepSpeed ALST {deepspeed_alst.VERSION}"
PLAIN_SDPA = "plain_sdpa"
OURS = {
    "ours, dp4": ParallelDims(dp_shard=4),
    "ours, u4": ParallelDims(ulysses=4),
    "ours, u2 r2": ParallelDims(ulysses=2, ring=2),
    "ours, r4": ParallelDims(ring=4),
}
COLUMNS = (
    "tokens",
    "system",
    "step ms",
    "tokens/s",
    "throughput of plain",
    "throughput of ALST",
    "loss",
    "gradient norm",
)
Step = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Size:
    rows: int  # sequences in the global batch
    seq_len: int

    def ids(self) -> Tensor:
        return torch.randint(0, 4096, (self.rows, self.seq_len), generator=torch.Generator().manual_seed(0))


def llama(seq_len: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=seq_len,
        tie_word_embeddings=False,
        use_cache=False,
    )


def model_of(size: Size) -> Any:
    """With transformers' own sdpa, under another name: ALST puts itself in the place of "sdpa" for every model."""
    AttentionInterface.register(PLAIN_SDPA, sdpa_attention_forward)
    AttentionMaskInterface.register(PLAIN_SDPA, sdpa_mask)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama(size.seq_len), attn_implementation=PLAIN_SDPA)


def ours(size: Size, dims: ParallelDims) -> Step:
    mesh = ParallelMesh.create(dims)
    model = apply_unified_sp(model_of(size), mesh, layout="zigzag")
    stage = CausalLMStage(model, mesh, loss_chunk=2048)
    apply_fsdp(stage, mesh, decoder_layers(model), zero=ZERO)
    optimizer = AdamW(DECAY, (0.9, 0.999))
    engine = Fsdp2Engine([stage], mesh, zero=ZERO, optimizer=optimizer)
    share = size.rows // mesh.size("batch")
    rows = size.ids()[mesh.rank("batch") * share :][:share]
    batch = shard_batch({"input_ids": rows, "labels": rows}, mesh, layout="zigzag")

    def step() -> tuple[float, float]:
        loss = engine.forward_backward([batch], NextTokenLoss(size.rows * (size.seq_len - 1)))
        dist.all_reduce(loss, group=mesh.group("loss"))
        return loss.item(), engine.step(LEARNING_RATE, 1.0)

    return step


def plain(size: Size) -> Step:
    """A sequence on each rank; FSDP2 averages gradients, and every rank has as many targets."""
    model = model_of(size)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ids = size.ids()[dist.get_rank() :: RANKS]

    def step() -> tuple[float, float]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / RANKS
        dist.all_reduce(total)
        return total.item(), norm.full_tensor().item()

    return step


def run(size: Size, rounds: int) -> dict[str, tuple[float, float, list[float]]]:
    """By system: loss and gradient norm of the first step, and the seconds of every timed one."""
    steps: dict[str, Step] = {name: ours(size, dims) for name, dims in OURS.items()}
    steps[PLAIN] = plain(size)
    torch.manual_seed(0)
    steps[ALST] = deepspeed_alst.build(llama(size.seq_len), size.ids(), zero=ZERO, learning_rate=LEARNING_RATE)
    first = {name: step() for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = sorted(steps)
    for number in range(rounds + 1):  # the first round warms up
        for name in names[number % len(names) :] + names[: number % len(names)]:  # none is always first
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {name: (*first[name], seconds[name]) for name in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps against plain transformers + FSDP2, and ALST.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "throughput.json")
    args = parser.parse_args()
    data = []
    for size in (Size(4, 1024), Size(4, 4096)):
        with RankPool() as ranks:  # DeepSpeed keeps process groups for good
            found = ranks.run(run, RANKS, size, args.rounds, timeout=900)[0]
        for name, (loss, norm, seconds) in found.items():
            median = statistics.median(seconds)
            data.append({**asdict(size), "system": name, "seconds": median, "loss": loss, "norm": norm})
    record = Record(
        name="throughput",
        question="Throughput of a training step",
        command="python -m benchmarks.throughput",
        machine=machine(),
        columns=COLUMNS,
        rows=tuple(cells(row, data) for row in data),
        notes=(
            f"{RANKS} ranks, float32, ZeRO-{ZERO}, llama of 4 layers of 256 (8 heads), vocabulary 4,096; nothing is "
            f"recomputed. Medians of {args.rounds} rounds, systems in turns.",
            *(f"ALST, {name}: {reason}." for name, reason in deepspeed_alst.PATCHES.items()),
        ),
        data=data,
    )
    record.print()
    record.save(args.output)


def cells(row: dict[str, Any], data: list[dict[str, Any]]) -> tuple[str, ...]:
    peers = {other["system"]: other["seconds"] for other in data if other["seq_len"] == row["seq_len"]}
    tokens = row["rows"] * row["seq_len"]
    return (
        f"{row['rows']} x {row['seq_len']:,}",
        row["system"],
        f"{row['seconds'] * 1e3:.0f}",
        f"{tokens / row['seconds']:,.0f}",
        *(f"{peers[peer] / row['seconds']:.2f}" for peer in (PLAIN, ALST)),
        f"{row['loss']:.6f}",
        f"{row['norm']:.5f}",
    )


if __name__ == "__main__":
    main()
