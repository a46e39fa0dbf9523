"""Throughput of a training step, against plain transformers + FSDP2 and DeepSpeed's Ulysses (ALST).

All systems train the same llama on the same global batch with AdamW and clipping, on the same ranks in one run,
alternating step by step. Plain transformers cannot shard a sequence and gets one sequence per rank, as does `ours, dp4`
for comparison; ALST and the others shard every sequence over all ranks. The table also compares every system's loss and
gradient norm of the first step.

    python -m benchmarks.throughput
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.baselines import deepspeed_alst
from benchmarks.gpu.model import Shape
from benchmarks.harness.measure import in_turns
from benchmarks.harness.record import Record, finish, parser_of
from tests.harness.ranks import RankPool
from usp import apply_unified_sp, shard_batch
from usp.hf.integrate import decoder_layers
from usp.hf.stage import CausalLMStage
from usp.losses import NextTokenLoss
from usp.optimizers import AdamW
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp
from usp.train.engine import Engine

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
    "tokens", "system", "step ms", "tokens/s", "throughput of plain", "throughput of ALST", "loss", "gradient norm",
)  # fmt: skip
QUESTION = "Is a training step as fast as that of other systems?"
SEQUENCES, LENGTHS = 4, (1024, 4096)
Step = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Size:
    rows: int  # sequences in the global batch
    seq_len: int

    def ids(self) -> Tensor:
        return torch.randint(0, 4096, (self.rows, self.seq_len), generator=torch.Generator().manual_seed(0))


def llama() -> LlamaConfig:
    config = Shape(256, 704, 4096, layers=4, heads=8, kv_heads=8).config()
    config.use_cache = False
    return config


def model_of() -> Any:
    """Build the model with transformers' sdpa under another name, because ALST replaces "sdpa" for every model."""
    AttentionInterface.register(PLAIN_SDPA, sdpa_attention_forward)
    AttentionMaskInterface.register(PLAIN_SDPA, sdpa_mask)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama(), attn_implementation=PLAIN_SDPA)


def ours(size: Size, dims: ParallelDims) -> Step:
    mesh = ParallelMesh.create(dims)
    model = apply_unified_sp(model_of(), mesh, layout="zigzag")
    stage = CausalLMStage(model, mesh, loss_chunk=2048)
    apply_fsdp(stage, mesh, decoder_layers(model), zero=ZERO)
    optimizer = AdamW(DECAY, (0.9, 0.999))
    engine = Engine([stage], mesh, zero=ZERO, optimizer=optimizer)
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
    model = model_of()
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
    """Return by system the loss and gradient norm of the first step, and the seconds of every timed step."""
    steps: dict[str, Step] = {name: ours(size, dims) for name, dims in OURS.items()}
    steps[PLAIN] = plain(size)
    torch.manual_seed(0)
    steps[ALST] = deepspeed_alst.build(llama(), size.ids(), zero=ZERO, learning_rate=LEARNING_RATE)
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


def answer(data: list[dict[str, Any]]) -> str:
    own = [cells(row, data) for row in data if row["system"] in OURS]
    plain, alst = (sorted(row[column] for row in own) for column in (4, 5))
    by_length = [[row["loss"] for row in data if row["seq_len"] == length] for length in LENGTHS]
    differences = [max(losses) / min(losses) - 1 for losses in by_length if losses]
    return (
        f"Tokens per second on {RANKS} ranks under ZeRO-{ZERO} are {plain[0]} to {plain[-1]} of transformers with "
        f"FSDP2, and {alst[0]} to {alst[-1]} of DeepSpeed's ALST. Losses differ by at most {max(differences):.0e}."
    )


def main() -> None:
    parser = parser_of(__doc__ or "", quick="one step of the shorter sequences")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each system")
    args = parser.parse_args()
    rounds, lengths = (1, LENGTHS[:1]) if args.quick else (args.rounds, LENGTHS)
    data = []
    for size in (Size(SEQUENCES, length) for length in lengths):
        with RankPool() as ranks:  # DeepSpeed never destroys its process groups
            found = ranks.run(run, RANKS, size, rounds, timeout=1800)[0]
        for name, (loss, norm, seconds) in found.items():
            median = statistics.median(seconds)
            data.append({**asdict(size), "system": name, "seconds": median, "loss": loss, "norm": norm})
    notes = (
        f"{RANKS} ranks, float32, ZeRO-{ZERO}, llama with 4 layers of width 256 (8 heads), vocabulary 4,096, no "
        f"recomputation. Medians of {rounds} rounds of alternating steps.",
        *(f"ALST, {name}: {reason}." for name, reason in deepspeed_alst.PATCHES.items()),
    )
    finish(Record.of("throughput", QUESTION, answer(data), COLUMNS, [cells(row, data) for row in data], notes), args)


if __name__ == "__main__":
    main()
