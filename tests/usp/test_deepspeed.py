"""DeepSpeed trains what one process trains, in every ZeRO stage, and shares checkpoints with the other engine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel import ParallelDims, ParallelMesh, apply_fsdp
from parallel.testing import run_ranks
from usp import apply_unified_sp, shard_batch
from usp.engines.base import Engine
from usp.engines.fsdp2 import Fsdp2Engine
from usp.hf.integrate import decoder_layers
from usp.hf.stage import CausalLMStage
from usp.loss import global_token_count

from .tiny import MAX_NORM, ROWS, STEPS, optimiser, packed_batch, tiny_model, train_alone

pytest.importorskip("deepspeed", reason="the package deepspeed is not installed: pip install -e '.[deepspeed]'")

LAYOUT = "zigzag"


def build(name: str, zero: int, dims: ParallelDims, dtype: torch.dtype = torch.float32) -> tuple[Engine, ParallelMesh]:
    """An engine whose AdamW is the one of `train_alone`."""
    mesh = ParallelMesh.create(dims)
    model = apply_unified_sp(tiny_model("llama"), mesh, LAYOUT)
    plain = {key: value for key, value in optimiser(model).param_groups[0].items() if key != "params"}
    stage = CausalLMStage(model, mesh, loss_chunk=16)
    options: dict[str, Any] = {"zero": zero, "learning_rate": plain["lr"], "weight_decay": 0.1}
    if name == "fsdp2":
        apply_fsdp(stage, mesh, decoder_layers(model), param_dtype=dtype, zero=zero)
        engine: Any = Fsdp2Engine([stage], mesh, **options)
    else:
        from usp.engines.deepspeed import DeepSpeedEngine

        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        engine = DeepSpeedEngine([stage], mesh, **options, param_dtype=dtype)
    for group in engine.optimizer.param_groups:
        group.update(plain)
    return engine, mesh


def train(engine: Engine, mesh: ParallelMesh, steps: range, poison: int = -1) -> list[tuple[float, float]]:
    """(loss, gradient norm) of `steps`, every rank's rows one by one as micro-batches."""
    history = []
    share = ROWS // mesh.size("batch")
    for step in steps:
        first = mesh.rank("batch") * share
        rows = {key: value[first : first + share] for key, value in packed_batch(step).items()}
        local = shard_batch(rows, mesh, LAYOUT)
        tokens = int(global_token_count(local["shift_labels"], mesh))
        micro_batches = [{key: value[row : row + 1] for key, value in local.items()} for row in range(share)]
        loss = engine.forward_backward(micro_batches, tokens)
        dist.all_reduce(loss)
        history.append((loss.item(), engine.step(3e-3, MAX_NORM)))
    return history


def train_stage(zero: int, dims: ParallelDims) -> list[tuple[float, float]]:
    return train(*build("deepspeed", zero, dims), range(STEPS))


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    return torch.tensor(run_ranks(train_alone, 1, "llama")[0], dtype=torch.float64)


SP = ParallelDims(ulysses=2, ring=2)
CASES = [(0, SP), (1, SP), (2, SP), (3, SP), (3, ParallelDims(dp_shard=2, ulysses=2, ring=2))]


@pytest.mark.parametrize(("zero", "dims"), CASES, ids=str)
def test_ten_steps_are_those_of_one_process(alone: torch.Tensor, zero: int, dims: ParallelDims) -> None:
    ranks = dims.ring * dims.ulysses * max(dims.dp_shard, 1)
    found = torch.tensor(run_ranks(train_stage, ranks, zero, dims, timeout=180), dtype=torch.float64)
    assert ((found / alone - 1).abs() <= 1e-5).all()
