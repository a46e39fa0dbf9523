"""Throughput of a training step, against plain transformers + FSDP2 and DeepSpeed's Ulysses (ALST).

All systems train the same llama on the same global batch with AdamW and clipping, on the same ranks in one run,
alternating step by step. Plain transformers cannot shard a sequence and gets one sequence per rank, as does `ours, dp4`
for comparison; ALST and the others shard every sequence over all ranks. The table also compares every system's loss and
gradient norm of the first step. `--compile` adds our steps with compiled layers; they compile before the timed steps.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --against REVISION

The second compares our steps with those of another revision of this repository: this file runs in both trees in turn,
and counts the processor seconds of all ranks, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
from benchmarks.harness.measure import in_turns
from benchmarks.harness.record import Record, finish
from tests.harness.ranks import RankPool
from usp import apply_unified_sp, shard_batch
from usp.hf.integrate import decoder_layers
from usp.hf.stage import CausalLMStage
from usp.losses import NextTokenLoss
from usp.model.recompute import compile_layers
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp
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
COMPILED = ("ours, dp4", "ours, u2 r2")
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
AGAINST = ("tokens", "system", "processor s", "quartiles", "there", "quartiles there", "this / there")
SEQUENCES, LENGTHS, TREE = 4, (1024, 4096), Path(__file__).parents[1]
Step = Callable[[], tuple[float, float]]
Seconds = dict[str, list[float]]  # by system


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
    """Build the model with transformers' sdpa under another name, because ALST replaces "sdpa" for every model."""
    AttentionInterface.register(PLAIN_SDPA, sdpa_attention_forward)
    AttentionMaskInterface.register(PLAIN_SDPA, sdpa_mask)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama(size.seq_len), attn_implementation=PLAIN_SDPA)


def ours(size: Size, dims: ParallelDims, compiled: bool = False) -> Step:
    mesh = ParallelMesh.create(dims)
    model = apply_unified_sp(model_of(size), mesh, layout="zigzag")
    if compiled:
        compile_layers(decoder_layers(model), "inductor")
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
    """Train one sequence per rank. FSDP2 averages gradients, which is exact as all ranks have equally many targets."""
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


def run(size: Size, rounds: int, compiled: bool = False) -> dict[str, tuple[float, float, list[float]]]:
    """Return by system the loss and gradient norm of the first step, and the seconds of every timed step."""
    steps: dict[str, Step] = {name: ours(size, dims) for name, dims in OURS.items()}
    if compiled:
        steps |= {f"{name}, compiled": ours(size, OURS[name], compiled=True) for name in COMPILED}
    steps[PLAIN] = plain(size)
    torch.manual_seed(0)
    steps[ALST] = deepspeed_alst.build(llama(size.seq_len), size.ids(), zero=ZERO, learning_rate=LEARNING_RATE)
    first = {name: step() for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_, name in in_turns(sorted(steps), rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        steps[name]()
        dist.barrier()
        if round_:  # the first round warms up
            seconds[name].append(time.perf_counter() - begin)
    return {name: (*first[name], seconds[name]) for name in steps}


def processor_seconds(size: Size, rounds: int) -> Seconds:
    """Return by system of ours the processor seconds of all ranks in every timed step."""
    steps = {name: ours(size, dims) for name, dims in OURS.items()}
    seconds: Seconds = {name: [] for name in steps}
    for round_, name in in_turns(sorted(steps), rounds + 1):
        dist.barrier()
        begin = time.process_time()
        steps[name]()
        spent = torch.tensor(time.process_time() - begin, dtype=torch.float64)
        dist.all_reduce(spent)
        if round_:  # the first round warms up
            seconds[name].append(spent.item())
    return seconds


def against(revision: str, lengths: Sequence[int], rounds: int, turns: int) -> Record:
    """Compare our steps with those of another revision, whose tree is checked out beside this one for the time."""
    git = ("git", "-C", str(TREE), "worktree")
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", there, revision], check=True)
        try:
            shutil.copy(__file__, there / "benchmarks")
            both = [[_in_tree(tree, lengths, rounds) for tree in (TREE, there)] for _ in range(turns)]
        finally:
            subprocess.run([*git, "remove", "--force", there], check=True)
    rows, data = [], []
    for index, length in enumerate(lengths):
        for name in OURS:
            here, other = ([s for turn in both for s in turn[tree][index][name]] for tree in (0, 1))
            data.append({"rows": SEQUENCES, "seq_len": length, "system": name, "here": here, "there": other})
            (_, own, _), (_, old, _) = quarters = [statistics.quantiles(each, n=4) for each in (here, other)]
            spread = [f"{low:.2f} to {high:.2f}" for low, _, high in quarters]
            tokens = f"{SEQUENCES} x {length:,}"
            rows.append((tokens, name, f"{own:.2f}", spread[0], f"{old:.2f}", spread[1], f"{own / old:.3f}"))
    notes = (f"Processor seconds of a step, all {RANKS} ranks together: medians of {turns} x {rounds} steps in turns.",)
    command = f"python -m benchmarks.throughput --against {revision}"
    return Record.of("throughput_against", f"Our steps against {revision}", AGAINST, rows, notes, data, command=command)


def _in_tree(tree: Path, lengths: Sequence[int], rounds: int) -> list[Seconds]:
    """Return `processor_seconds` of each length in a tree."""
    command = [sys.executable, "-m", "benchmarks.throughput", "--processor-seconds", "--rounds", str(rounds)]
    command += ["--seq-len", *map(str, lengths)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps against plain transformers + FSDP2, and ALST.")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each system")
    parser.add_argument("--compile", action="store_true", help="also our steps with compiled layers")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    parser.add_argument("--against", metavar="REVISION", help="compare our steps with those of a revision")
    parser.add_argument("--seq-len", nargs="+", type=int, default=LENGTHS, help="lengths of sequences")
    parser.add_argument("--turns", type=int, default=3, help="of --against: how often both trees run")
    parser.add_argument("--processor-seconds", action="store_true", help="print those of our steps as JSON")
    args = parser.parse_args()
    if args.against:
        return finish(against(args.against, args.seq_len, args.rounds, args.turns), args.output, save=False)
    data, sizes = [], [Size(SEQUENCES, length) for length in args.seq_len]
    if args.processor_seconds:
        with RankPool() as ranks:
            print(json.dumps([ranks.run(processor_seconds, RANKS, size, args.rounds)[0] for size in sizes]))
        return None
    for size in sizes:
        with RankPool() as ranks:  # DeepSpeed never destroys its process groups
            found = ranks.run(run, RANKS, size, args.rounds, args.compile, timeout=1800)[0]
        for name, (loss, norm, seconds) in found.items():
            median = statistics.median(seconds)
            data.append({**asdict(size), "system": name, "seconds": median, "loss": loss, "norm": norm})
    record = Record.of(
        "throughput",
        "Throughput of a training step",
        COLUMNS,
        (cells(row, data) for row in data),
        (
            f"{RANKS} ranks, float32, ZeRO-{ZERO}, llama with 4 layers of width 256 (8 heads), vocabulary 4,096, no "
            f"recomputation. Medians of {args.rounds} rounds of alternating steps.",
            *(f"ALST, {name}: {reason}." for name, reason in deepspeed_alst.PATCHES.items()),
        ),
        data,
        command="python -m benchmarks.throughput" + " --compile" * args.compile,
    )
    return finish(record, args.output)


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
