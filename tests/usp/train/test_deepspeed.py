"""DeepSpeed trains what one process trains, in every ZeRO stage, and shares checkpoints with the other engine."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from tests.harness.ranks import RankPool, run_ranks
from tests.usp.tiny import ADAM_EPS, MAX_NORM, ROWS, packed_batch, tiny_model, train_alone
from usp import apply_unified_sp, shard_batch
from usp.hf.integrate import decoder_layers
from usp.hf.stage import CausalLMStage
from usp.losses import NextTokenLoss, global_token_count
from usp.optimizers import AdamW
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp
from usp.train.engines.base import Engine
from usp.train.engines.fsdp2 import Fsdp2Engine

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="the package deepspeed is not installed: pip install -e '.[deepspeed]'"
)

LAYOUT, STEPS = "zigzag", 6


def build(name: str, zero: int, dims: ParallelDims, dtype: torch.dtype = torch.float32) -> tuple[Engine, ParallelMesh]:
    """An engine whose AdamW is the one of `train_alone`."""
    mesh = ParallelMesh.create(dims)
    model = apply_unified_sp(tiny_model("llama"), mesh, LAYOUT)
    stage = CausalLMStage(model, mesh, loss_chunk=16)
    options: dict[str, Any] = {"zero": zero, "optimizer": AdamW(0.1, eps=ADAM_EPS)}
    if name == "fsdp2":
        apply_fsdp(stage, mesh, decoder_layers(model), param_dtype=dtype, zero=zero)
        engine: Any = Fsdp2Engine([stage], mesh, **options)
    else:
        from usp.train.engines.deepspeed import DeepSpeedEngine

        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        engine = DeepSpeedEngine([stage], mesh, param_dtype=dtype, **options)
    return engine, mesh


def train(engine: Engine, mesh: ParallelMesh, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of `steps`, every rank's rows one by one as micro-batches."""
    history = []
    share = ROWS // mesh.size("batch")
    for step in steps:
        first = mesh.rank("batch") * share
        rows = {key: value[first : first + share] for key, value in packed_batch(step).items()}
        local = shard_batch(rows, mesh, LAYOUT)
        tokens = int(global_token_count(local["shift_labels"], mesh))
        micro_batches = [{key: value[row : row + 1] for key, value in local.items()} for row in range(share)]
        loss = engine.forward_backward(micro_batches, NextTokenLoss(tokens))
        dist.all_reduce(loss)
        history.append((loss.item(), engine.step(3e-3, MAX_NORM)))
    return history


# Jobs of DeepSpeed's have processes of their own (`run_ranks`), because its process groups outlive the job's.


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> torch.Tensor:
    return torch.tensor(ranks.run(train_alone, 1, "llama", STEPS)[0], dtype=torch.float64)


LEGS = [
    ("fsdp2", 3, ParallelDims(dp_shard=1, ulysses=2), range(2)),
    ("deepspeed", 3, ParallelDims(dp_shard=1, ulysses=2), range(2, 3)),
    ("deepspeed", 1, ParallelDims(dp_shard=1, ring=2), range(3, 4)),
    ("deepspeed", 0, ParallelDims(dp_shard=2), range(4, 5)),
    ("fsdp2", 2, ParallelDims(dp_shard=1, ulysses=2), range(5, 6)),
]


def go_on(folder: str) -> list[tuple[float, float]]:
    """Continue in each leg from the checkpoint of the one before."""
    history = list[tuple[float, float]]()
    for name, zero, dims, steps in LEGS:
        engine, mesh = build(name, zero, dims)
        if steps.start:
            state = engine.state()
            dcp.load(state, checkpoint_id=f"{folder}/{steps.start}")
            engine.restore(state)
        history += train(engine, mesh, steps)
        dcp.save(engine.state(), checkpoint_id=f"{folder}/{steps.stop}")
    return history


def test_a_checkpoint_passes_from_engine_to_engine(alone: torch.Tensor, tmp_path: Path) -> None:
    found = torch.tensor(run_ranks(go_on, 2, str(tmp_path)), dtype=torch.float64)
    assert ((found / alone - 1).abs() <= 1e-5).all(), (found / alone - 1).abs().amax((0, 2))


def survive(zero: int, dtype: torch.dtype) -> tuple[list[tuple[float, float]], float, bool]:
    """Some steps, then the norm of one whose loss is not finite, and whether that step left all state alone."""
    engine, mesh = build("deepspeed", zero, ParallelDims(dp_shard=1, ulysses=2), dtype)
    history = train(engine, mesh, range(STEPS))
    before = engine.state()
    engine.stages[0].model.base_model.norm.register_forward_hook(lambda module, args, out: out * float("inf"))
    engine.forward_backward([shard_batch(packed_batch(0), mesh, LAYOUT)], NextTokenLoss(1))
    norm = engine.step(3e-3, MAX_NORM)
    after = engine.state()
    return history, norm, all(torch.equal(_local(before[key]), _local(after[key])) for key in before)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def survive_each() -> list[tuple[list[tuple[float, float]], float, bool]]:
    return [survive(0, torch.float32), survive(2, torch.bfloat16)]


@pytest.mark.slow
def test_bfloat16_learns_and_a_broken_step_changes_nothing(alone: torch.Tensor) -> None:
    for of_rank in run_ranks(survive_each, 2):
        for (history, norm, unchanged), bound in zip(of_rank, (1e-5, 0.01), strict=True):
            losses = torch.tensor(history, dtype=torch.float64)[:, 0]
            assert ((losses / alone[:, 0] - 1).abs() <= bound).all()
            assert not math.isfinite(norm)
            assert unchanged
