"""Compiled layers train as eager ones, as one graph each, and documents need no new graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel import ParallelMesh
from parallel.testing import RankPool
from tests.usp.hf.test_every_model import tiny_model
from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.structure.shrink import VOCAB
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.resolve import resolve
from usp.train.step import train_step

ROWS, SEQ_LEN, STEPS = 4, 32, 4
SP = {"sp_ulysses": 2, "sp_ring": 2}


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Return rows of documents, another number of them in each step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB - 4, (ROWS, SEQ_LEN), generator=generator)
    cuts = torch.randperm(SEQ_LEN - 1, generator=generator)[: step + 1].add(1).sort().values.tolist()
    return {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([[0, *cuts, SEQ_LEN]] * ROWS)}


def train(folder: str, backend: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Train with layers that are compiled by `backend` ("" for eager ones); return what is compared."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    base = {"batch_size": ROWS, "adam_eps": 1e-4, "learning_rate": 3e-3, "max_grad_norm": 0.5, "loss_chunk": 24}
    asked = TrainConfig(model=folder, seq_len=SEQ_LEN, dtype="float32", compile=bool(backend), **base | flags)
    config, model_config, _, dims = resolve(asked, dist.get_world_size()).valid()
    recipe = EngineRecipe.of(config, model_config)
    if backend:
        recipe = EngineRecipe(**vars(recipe) | {"compile": backend})
    mesh = ParallelMesh.create(dims)
    engine = build_engine(recipe, mesh, torch.device("cpu"), partial(first_weights, source=folder, seed=0))

    def summed(share: torch.Tensor) -> float:
        for axis in ("pp", "loss"):
            dist.all_reduce(share, group=mesh.group(axis))
        return share.item()

    history, graphs = [], []
    share = ROWS // mesh.size("batch")
    for step in range(STEPS):
        first = mesh.rank("batch") * share
        rows = {key: value[first : first + share] for key, value in batch_of(step).items()}
        local = shard_batch(rows, mesh, config.sp_layout)
        history.append(train_step(engine, mesh, local, config, 3e-3, before_update=summed))
        graphs.append(counters["stats"]["unique_graphs"])
    return {
        "history": history,
        "graphs": graphs,
        "breaks": sorted(counters["graph_break"]),
        "names": sorted(engine.state()),
    }


def difference(ranks: RankPool, folder: str, backend: str, flags: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the largest relative difference of a loss or norm from eager layers, and the compiled run of rank 0."""
    eager, compiled = (ranks.run(train, 4, folder, b, flags, timeout=500) for b in ("", backend))
    found, wanted = (
        torch.tensor([rank["history"] for rank in run], dtype=torch.float64) for run in (compiled, eager)
    )
    assert [rank["names"] for rank in compiled] == [rank["names"] for rank in eager]
    return float((found / wanted - 1).abs().max()), compiled[0]
