"""A head that is tied to the embedding trains under a pipeline as in one process, whatever else is mixed in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.harness.ranks import RankPool
from tests.usp.tiny import (
    ADAM_EPS,
    LEARNING_RATE,
    MAX_NORM,
    ROWS,
    SEQ_LEN,
    loss_alone,
    loss_and_norm,
    packed_batch,
    tiny_model,
    train_alone,
)
from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.hf.prune import tied_ends
from usp.parallel import (
    ParallelDims,
    ParallelMesh,
    ProcessGroups,
    Reallocation,
    gather_layout,
    local_tensor,
    plan_realloc,
)
from usp.parallel.checkpoint.checkpointer import Checkpointer, latest
from usp.parallel.fsdp import sum_tied_gradients
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.train.build import EngineRecipe, build_engine, first_weights, resumed_weights
from usp.train.engine import Engine
from usp.train.resolve import resolve

FAMILY, STEPS = "qwen3-tied-deep", 3
Flags = dict[str, Any]
INTERLEAVED: Flags = {"pp": 2, "pp_schedule": "interleaved-1f1b", "micro_batches": 2}
MESHES: dict[str, Flags] = {
    "pp2 tp2, tokens shared": {"pp": 2, "tp": 2, "tp_sequence_parallel": True, "micro_batches": 2},
    "pp2 u2, interleaved": INTERLEAVED | {"sp_ulysses": 2},
    "pp2 u2, zero bubble": {"pp": 2, "pp_schedule": "zero-bubble", "micro_batches": 4, "sp_ulysses": 2, "zero": 1},
    "pp4": {"pp": 4, "micro_batches": 4},
}
DP2: Flags = {"pp": 2, "micro_batches": 2}
MORE: dict[str, Flags] = {
    "pp2 dp2": DP2,
    "pp2 r2": {"pp": 2, "sp_ring": 2, "micro_batches": 4},
    **{f"pp2 dp2, zero {zero}": {"pp": 2, "micro_batches": 2, "zero": zero} for zero in (0, 1, 2)},
    "pp2 dp_replicate2": {"pp": 2, "dp_replicate": 2, "dp_shard": 1, "micro_batches": 2, "zero": 2},
    "pp2 tp2": {"pp": 2, "tp": 2, "micro_batches": 2},
    "pp2 tp2, interleaved": INTERLEAVED | {"tp": 2, "zero": 1},
    "pp2 r2, recomputed": {"pp": 2, "sp_ring": 2, "micro_batches": 2, "ac": "full"},
}


def engine_of(folder: str, flags: Flags, resumed: bool = False) -> tuple[Engine, ParallelMesh, TrainConfig]:
    flags = {"global_batch_size": ROWS, "adam_eps": ADAM_EPS, "learning_rate": LEARNING_RATE, **flags}
    asked = TrainConfig(model=folder, seq_len=SEQ_LEN, dtype="float32", loss_chunk=24, max_grad_norm=MAX_NORM, **flags)
    config, model_config, _, dims = resolve(asked, dist.get_world_size()).valid()
    mesh = ParallelMesh.create(dims)
    fill = partial(resumed_weights, source=folder) if resumed else partial(first_weights, source=folder, seed=0)
    return build_engine(EngineRecipe.of(config, model_config), mesh, torch.device("cpu"), fill), mesh, config


def train(engine: Engine, mesh: ParallelMesh, config: TrainConfig, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""

    history, share = [], ROWS // mesh.size("batch")
    rows = slice(mesh.rank("batch") * share, (mesh.rank("batch") + 1) * share)
    for step in steps:
        whole = {key: value[rows] for key, value in packed_batch(step).items()}
        local = shard_batch(whole, mesh, config.sp_layout)
        history.append(loss_and_norm(engine, mesh, local, config, config.learning_rate))
    return history


def trained(folder: str, meshes: list[Flags], summed: bool = True) -> list[list[tuple[float, float]]]:
    """The steps on each mesh; without `summed`, the gradients of the two copies are left apart."""
    found = []
    for flags in meshes:
        engine, mesh, config = engine_of(folder, flags)
        with patch("usp.train.engine.sum_tied_gradients", sum_tied_gradients if summed else lambda *args: None):
            found.append(train(engine, mesh, config, range(STEPS)))
        if summed and mesh.size("pp") == 2 and config.pp_schedule != "zero-bubble":
            assert_equal_ends(engine, mesh)
    return found


def assert_equal_ends(engine: Engine, mesh: ParallelMesh) -> None:
    """Both copies are still the same, to the bit."""
    (own,) = (
        local_tensor(stage.model.get_parameter(name).detach())
        for stage in engine.stages
        for name in tied_ends(stage.model)
    )
    copies = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(copies, own.contiguous(), group=mesh.ends)
    assert torch.equal(*copies)


def saved_and_resumed(folder: str, run: Path) -> list[tuple[float, float]]:
    """One step on each of four layouts, from checkpoint to checkpoint; the last exports."""
    saver, history = Checkpointer(run, keep=1, device_type="cpu"), []
    for step, flags in enumerate([DP2, MESHES["pp2 u2, zero bubble"], {}, MESHES["pp4"]]):
        engine, mesh, config = engine_of(folder, flags, resumed=step > 0)
        if step:
            state, path = engine.state(), latest(run)
            assert path is not None
            saver.load(path, state)
            engine.restore()
        history += train(engine, mesh, config, range(step, step + 1))
        saver.save(step + 1, engine.state(), {})
        saver.wait()
    weights = {name.removeprefix("model."): w for name, w in engine.state().items() if name.startswith("model.")}
    save_weights(weights, run / "model", config=engine.stages[0].model.config)
    return history


def reallocated(folder: str) -> bool:
    """Whether a role's weights that move from a pipeline to one stage and back are all there."""
    groups, spec = ProcessGroups(), RoleSpec("actor", folder, load_model_config(folder))
    source: RoleModel | None = None
    for dims in (ParallelDims(pp=2), ParallelDims(tp=2), ParallelDims(pp=2, tp=2)):
        layout, mesh = CallLayout((0, 1, 2, 3), dims.resolve(4)), ParallelMesh.create(dims, groups=groups)
        model, wanted = (RoleModel(spec, layout, mesh) for _ in range(2))
        wanted.fill()
        model.allocate()
        if source is None:
            model.fill()
        else:
            layouts = gather_layout(source.weights()), gather_layout(model.weights())
            plan = plan_realloc(*layouts, bucket_bytes=1 << 20, ranks_per_host=4)
            Reallocation(plan, groups, torch.device("cpu")).run(source.weights(), model.weights())
        found, all_there = model.weights(), wanted.weights()
        if not all(torch.equal(local_tensor(found[name]), local_tensor(w)) for name, w in all_there.items()):
            return False
        source = model
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(FAMILY)
    tiny_model(FAMILY).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> torch.Tensor:
    return torch.tensor(ranks.run(train_alone, 1, FAMILY, 5)[0], dtype=torch.float64)


def difference(history: list[tuple[float, float]], alone: torch.Tensor) -> float:
    """Of any loss or gradient norm, relative."""
    return (torch.tensor(history, dtype=torch.float64) / alone[: len(history)] - 1).abs().max().item()


@pytest.mark.slow
def test_steps_are_those_of_one_process(ranks: RankPool, folder: str, alone: torch.Tensor, exhaustive: bool) -> None:
    meshes = MESHES | MORE if exhaustive else MESHES
    for found in ranks.run(trained, 4, folder, [*meshes.values()]):
        differences = {name: difference(history, alone) for name, history in zip(meshes, found, strict=True)}
        assert max(differences.values()) <= 1e-5, differences


def test_without_the_sum_of_gradients_they_are_not(ranks: RankPool, folder: str, alone: torch.Tensor) -> None:
    ((history,), *_) = ranks.run(trained, 2, folder, [MESHES["pp4"] | {"pp": 2}], False)
    assert difference(history, alone) > 1e-3


@pytest.mark.slow
def test_a_role_is_reallocated_between_pipelines_and_one_stage(ranks: RankPool, folder: str) -> None:
    assert all(ranks.run(reallocated, 4, folder))


@pytest.mark.slow
def test_checkpoints_and_exports_hold_one_tensor(
    ranks: RankPool, folder: str, alone: torch.Tensor, tmp_path: Path
) -> None:
    history = ranks.run(saved_and_resumed, 4, folder, tmp_path)[0]
    assert difference(history, alone) <= 1e-5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    loss = loss_alone(model, packed_batch(len(history))).item()
    assert loss == pytest.approx(alone[len(history), 0].item(), rel=1e-5)  # of one process, before its next step
