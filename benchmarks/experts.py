"""Expert messages on a slow network: how long ranks wait for them with the experts of a rank in one chunk, and in more.

Two emulated hosts of four ranks (benchmarks/harness/cluster.py) train a mixture of experts over all eight, ep=8, with
`--ep-chunks` 1, 2 and 4, in turns, on the same tokens. A rank's exposed messages are the time in its all-to-alls of
rows and in the waits for them.

    python -m benchmarks.experts
    python -m benchmarks.experts --quick    # one step on two ranks
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig

from benchmarks.harness.cluster import cluster
from benchmarks.harness.measure import in_turns
from benchmarks.harness.record import Record, finish, parser_of
from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.experts import router_modules
from usp.hf.models import load_model_config
from usp.hf.weights import initialise
from usp.parallel import ParallelMesh, ProcessGroups
from usp.train.build import EngineRecipe, build_engine
from usp.train.step import backward
from usp.train.validate import parallel_dims

QUESTION = "Do experts' messages travel while experts compute?"
COLUMNS = ("chunks", "step ms", "exposed expert messages ms", "of one chunk", "loss", "gradient norm")
RATE, HOSTS, WARMUPS, CHUNKS, TOKENS = "100mbit", 2, 1, (1, 2, 4), 512
SIZES: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 2048, "num_experts": 32, "num_experts_per_tok": 4}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
Step = Callable[[], tuple[float, float]]


class Timed:
    """All-to-alls of rows, which have splits, with the seconds in their calls and in waits for them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._exchange: Callable[..., Any] = dist.all_to_all_single

    def __call__(self, received: torch.Tensor, rows: torch.Tensor, *splits: list[int], **options: Any) -> Any:
        work = self._during(lambda: self._exchange(received, rows, *splits, **options), bool(splits))
        return work and SimpleNamespace(wait=lambda: self._during(work.wait))

    def _during(self, call: Callable[[], Any], counts: bool = True) -> Any:
        begin = time.perf_counter()
        result = call()
        self.seconds += counts * (time.perf_counter() - begin)
        return result

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def evenly(module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Replace a router's choice: each token gets the next experts, so that all ranks have equally many rows."""
    logits, weights, chosen = output
    return logits, weights, torch.arange(chosen.numel()).view_as(chosen) % logits.shape[-1]


def step_of(folder: str, chunks: int, groups: ProcessGroups) -> Step:
    """Return a function of one training step, which returns the loss of all ranks and the gradient norm."""
    ep = dist.get_world_size()
    config = TrainConfig(
        model=folder,
        seq_len=TOKENS,
        dtype="float32",
        device="cpu",
        zero=1,
        ep=ep,
        ep_chunks=chunks,
        loss_chunk=128,
        learning_rate=1e-3,
    )
    mesh = ParallelMesh.create(parallel_dims(config), groups=groups)
    recipe = EngineRecipe.of(config, load_model_config(folder, weights=False))
    engine = build_engine(recipe, mesh, torch.device("cpu"), lambda stage: initialise(stage.model, 0))
    for router in router_modules(engine.stages[0].model):
        router.register_forward_hook(evenly)
    draws = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, 512, (1, TOKENS), generator=draws)
    batch = shard_batch({"input_ids": ids, "labels": ids}, mesh)

    def step() -> tuple[float, float]:
        loss = backward(engine, mesh, batch, config).detach().clone()
        dist.all_reduce(loss)
        return loss.item(), engine.step(config.learning_rate, config.max_grad_norm)

    return step


def measure(folder: str, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return by number of chunks the seconds of each step, those in which this rank waited, losses and norms."""
    groups, timed = ProcessGroups(), Timed()
    steps = {chunks: step_of(folder, chunks, groups) for chunks in CHUNKS}
    found: dict[int, dict[str, list[float]]] = {
        chunks: {"seconds": [], "exposed": [], "loss": [], "norm": []} for chunks in CHUNKS
    }
    for round_, chunks in in_turns(CHUNKS, WARMUPS + rounds):
        dist.barrier()
        timed.take()
        begin = time.perf_counter()
        with patch.object(dist, "all_to_all_single", timed):
            loss, norm = steps[chunks]()
        dist.barrier()  # a step ends when the slowest rank finishes
        figures = {"seconds": time.perf_counter() - begin, "exposed": timed.take(), "loss": loss, "norm": norm}
        for name, figure in figures.items():
            if round_ >= WARMUPS or name in ("loss", "norm"):
                found[chunks][name].append(figure)
    return found


def rows_of(by_rank: list[dict[int, dict[str, list[float]]]]) -> list[dict[str, Any]]:
    """Return a row for each number of chunks: medians over rounds, of the mean over ranks."""
    rows = []
    for chunks in CHUNKS:
        each = [rank[chunks] for rank in by_rank]
        waited = (statistics.mean(of_round) for of_round in zip(*(x["exposed"] for x in each), strict=True))
        rows.append(
            {
                "chunks": chunks,
                "seconds": statistics.median(each[0]["seconds"]),
                "exposed": statistics.median(waited),
                "loss": each[0]["loss"],
                "norm": each[0]["norm"],
            }
        )
    return rows


def cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[str, ...]:
    share = row["exposed"] / rows[0]["exposed"]
    times = (f"{row['seconds'] * 1e3:.0f}", f"{row['exposed'] * 1e3:.0f}", f"{share:.2f}")
    return str(row["chunks"]), *times, f"{row['loss'][-1]:.6f}", f"{row['norm'][-1]:.5f}"


def answer(rows: list[dict[str, Any]]) -> str:
    same = all(row["loss"] == rows[0]["loss"] and row["norm"] == rows[0]["norm"] for row in rows)
    shares = ", ".join(f"{row['exposed'] / rows[0]['exposed']:.2f} with {row['chunks']}" for row in rows[1:])
    losses = "equal in every bit" if same else "NOT EQUAL"
    return f"Of the time in which ranks wait for them with one chunk, {shares} chunks. Losses and norms are {losses}."


def main() -> None:
    parser = parser_of(__doc__ or "", quick="one step on two ranks")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each number of chunks")
    args = parser.parse_args()
    host_size, rounds = (1, 1) if args.quick else (4, args.rounds)
    with tempfile.TemporaryDirectory(prefix="experts-") as folder, cluster(HOSTS, RATE) as hosts:
        Qwen3MoeConfig(vocab_size=512, intermediate_size=512, **SIZES, **LAYERS).save_pretrained(folder)
        rows = rows_of(hosts.call(measure, host_size, folder, rounds, timeout=1800.0))
    notes = (
        f"{HOSTS} hosts of {host_size} ranks, {RATE} between them, gloo, float32; {SIZES['num_experts']} experts of "
        f"width {SIZES['moe_intermediate_size']} over all ranks, {SIZES['num_experts_per_tok']} for a token, "
        f"{LAYERS['num_hidden_layers']} layers of width {SIZES['hidden_size']}, {TOKENS} tokens a rank, ZeRO-1, no "
        f"recomputation, even routing. Medians of {rounds} rounds; exposed: mean over ranks of the time in all-to-alls "
        f"of rows, forward and backward. Ranks share the processors: a wait includes one for ranks that send late.",
    )
    finish(Record.of("experts", QUESTION, answer(rows), COLUMNS, [cells(row, rows) for row in rows], notes, rows), args)


if __name__ == "__main__":
    main()
