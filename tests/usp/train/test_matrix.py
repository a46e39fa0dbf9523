"""Every sensible mixture of parallelisms trains as one process does: the losses and gradient norms of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.harness.ranks import RankPool
from tests.usp.tiny import (
    ADAM_EPS,
    FEW_STEPS,
    LEARNING_RATE,
    MAX_NORM,
    ROWS,
    SEQ_LEN,
    STEPS,
    loss_and_norm,
    packed_batch,
    tiny_model,
    train_alone,
)
from usp import shard_batch
from usp.config import TrainConfig
from usp.parallel import ParallelMesh
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.engine import Engine
from usp.train.resolve import resolve

AUX_LOSS = 0.02


@dataclass(frozen=True)
class Row:
    """A mixture on 8 ranks: the flags that differ from their defaults.

    Without --exhaustive it runs only if `always`, and with `few` on 4 ranks with those flags: dp and they are smaller.
    """

    name: str
    flags: dict[str, Any]
    family: str = "llama"
    always: bool = True
    few: dict[str, Any] | None = None
    ranks: int = 8

    def run_as(self, exhaustive: bool) -> Row:
        if exhaustive or self.few is None:
            return self
        return replace(self, flags=self.flags | self.few, ranks=4)


def row(name: str, family: str = "llama", few: dict[str, Any] | None = None, **flags: Any) -> Row:
    return Row(name, flags, family, few=few)


def also(name: str, family: str = "llama", **flags: Any) -> Row:
    """A row whose pairs of parallelisms are in other rows, too."""
    return Row(name, flags, family, always=False)


U1, U2, R1 = {"sp_ulysses": 1}, {"sp_ulysses": 2}, {"sp_ring": 1}
U2_R2, U4_R2 = {"sp_ulysses": 2, "sp_ring": 2}, {"sp_ulysses": 4, "sp_ring": 2}
REPLICAS = {"dp_replicate": 2, "sp_ulysses": 2, "zero": 2}
ZERO_BUBBLE = {"pp": 2, "pp_schedule": "zero-bubble", "micro_batches": 4, "zero": 1}
INTERLEAVED, FOUR_STAGES, THREE_STAGES = (
    {"pp": 2, "pp_schedule": "interleaved-1f1b", "pp_stages_per_rank": each} for each in (0, 4, 3)
)
ON_HOST = {"optim_offload": True, "micro_batches": 2}
MATRIX = [
    # tensor parallel
    also("tp2 u2 r2", tp=2, **U2_R2),
    row("tp2 u2 r2, tokens shared", "qwen3", U1, tp=2, tp_sequence_parallel=True, **U2_R2),
    also("dp2 tp2 u2", "mistral", tp=2, sp_ulysses=2),
    also("dp2 tp2 r2, tokens shared", "qwen2", tp=2, tp_sequence_parallel=True, sp_ring=2),
    # pipeline
    also("pp2 u2 r2", pp=2, micro_batches=4, **U2_R2),
    also("pp2 tp2 u2", pp=2, tp=2, sp_ulysses=2, micro_batches=2, zero=2),
    also("pp2 tp2 r2, tokens shared", "qwen3", pp=2, tp=2, tp_sequence_parallel=True, sp_ring=2, micro_batches=2),
    also("pp2 dp2 r2, interleaved", "llama-deep", **INTERLEAVED, micro_batches=2, sp_ring=2),
    row("pp2 dp2 r2, 4 stages a rank", "llama-eight", {"micro_batches": 4}, **FOUR_STAGES, micro_batches=2, sp_ring=2),
    also("pp2 tp2 u2, 3 stages a rank", "llama-eight", **THREE_STAGES, tp=2, sp_ulysses=2, micro_batches=2, ac="full"),
    also("pp2 u2 r2, zero bubble", "llama-deep", **ZERO_BUBBLE, **U2_R2),
    also("pp2 ep2 u2 r2", "mixtral", pp=2, ep=2, **U2_R2, micro_batches=2),
    # experts
    also("ep2 u2 r2 dp2", "mixtral", ep=2, **U2_R2),
    also("ep2 u2 r2 dp2", "qwen3_moe", ep=2, **U2_R2),
    also("ep2 u2 r2 dp2, one chunk", "qwen3_moe", ep=2, **U2_R2, ep_chunks=1),
    also("ep2 u4 r2, accumulation 4", "mixtral", ep=2, **U4_R2, micro_batches=4),
    also("ep4 u4 r2, accumulation 4, zero 1", "qwen3_moe", ep=4, **U4_R2, micro_batches=4, zero=1, ac="full"),
    also("pp2 ep2 u2 r2, zero 2", "mixtral", pp=2, ep=2, **U2_R2, micro_batches=4, zero=2),
    row("pp2 ep2 tp2 r2", "qwen3_moe", R1, pp=2, ep=2, tp=2, tp_sequence_parallel=True, sp_ring=2, micro_batches=2),
    also("pp2 u2 r2, interleaved", "mixtral-deep", **INTERLEAVED, **U2_R2, micro_batches=4),
    also("pp2 ep2 u2 r2, 4 stages a rank", "mixtral-eight", **FOUR_STAGES, ep=2, **U2_R2, micro_batches=2),
    also("pp2 u2 r2, zero bubble", "mixtral-deep", **ZERO_BUBBLE, **U2_R2),
    row("pp2 ep2 u2 r2, zero bubble", "mixtral-deep", U1, **ZERO_BUBBLE, **U2_R2, ep=2, ep_chunks=2),
    row("u4 r2, balance by micro-batch", "mixtral", U2, **U4_R2, micro_batches=2, router_balance="micro-batch"),
    row("ep4 tp2 u2 r2, tokens shared", "qwen3_moe", U1 | {"ep": 2}, ep=4, tp=2, tp_sequence_parallel=True, **U2_R2),
    # ZeRO
    *(also(f"dp2 u2 r2, zero {zero}", zero=zero, micro_batches=2, **U2_R2) for zero in range(4)),
    row("dp2 u2 r2, zero 3, experts", "mixtral", {}, zero=3, micro_batches=2, **U2_R2),
    also("dp_replicate2 dp_shard2 u2, zero 2", **REPLICAS, micro_batches=1),
    # the optimizer in host memory
    row("dp_replicate2 dp_shard2 u2, zero 2, on the host", "llama", {}, **REPLICAS, optim_offload=True),
    also("dp2 u2 r2, zero 0, on the host", zero=0, **U2_R2, **ON_HOST),
    also("pp2 tp2 u2, zero 1, on the host", pp=2, tp=2, sp_ulysses=2, zero=1, **ON_HOST),
    also("ep4 u4 r2, zero 3, on the host", "qwen3_moe", ep=4, **U4_R2, **ON_HOST),
    # long sequences in little memory
    row("dp2 u2 r2, attention saved, MLP in tiles", "qwen3", {}, ac="attention-saved", mlp_tile=5, **U2_R2),
    row(
        "pp2 tp2 u2, zero 2, all recomputed, offloaded",
        few=U1,
        pp=2,
        tp=2,
        sp_ulysses=2,
        zero=2,
        ac="full",
        ac_offload=True,
        micro_batches=2,
    ),
    also("tp2 u2 r2, tokens shared, products saved", "qwen3", ac="selective", tp=2, tp_sequence_parallel=True, **U2_R2),
    also(
        "pp2 tp2 u2, products saved, offloaded",
        pp=2,
        tp=2,
        sp_ulysses=2,
        ac="selective",
        ac_offload=True,
        micro_batches=2,
    ),
    also("ep4 u4 r2, products saved", "qwen3_moe", ep=4, **U4_R2, ac="selective"),
    also("u4 r2, accumulation 2", sp_ulysses=4, sp_ring=2, micro_batches=2),
]


@pytest.fixture(scope="module")
def chosen(exhaustive: bool) -> list[Row]:
    return [case.run_as(exhaustive) for case in MATRIX if exhaustive or case.always]


@pytest.fixture(scope="module")
def steps(exhaustive: bool) -> int:
    return STEPS if exhaustive else FEW_STEPS


@pytest.fixture(scope="module")
def alone(ranks: RankPool, chosen: list[Row], steps: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each family a folder with its first weights, and (loss, gradient norm) of each step of one process."""
    found: dict[str, Any] = {}
    for family, aux_loss, parts in sorted({reference(case) for case in chosen}):
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(folder)
        found[family, aux_loss, parts] = folder, ranks.run(train_alone, 1, family, steps, aux_loss, parts)[0]
    return found


def reference(case: Row) -> tuple[str, float, int]:
    """What one process needs to know of a row: the parts of the batch over which its balance loss is a mean."""
    parts = case.flags["micro_batches"] if case.flags.get("router_balance") == "micro-batch" else 1
    return case.family, AUX_LOSS if case.family.startswith(("mixtral", "qwen3_moe")) else 0.0, parts


def train(config: TrainConfig, steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    config, model_config, _, dims = resolve(config, dist.get_world_size()).valid()
    mesh = ParallelMesh.create(dims)
    fill = partial(first_weights, source=config.model, seed=config.seed)
    engine = build_engine(EngineRecipe.of(config, model_config), mesh, torch.device("cpu"), fill)

    assert offloads(engine) == config.optim_offload

    share, history = ROWS // mesh.size("batch"), []
    rows = slice(mesh.rank("batch") * share, (mesh.rank("batch") + 1) * share)
    for step in range(steps):
        whole = {key: value[rows] for key, value in packed_batch(step).items()}
        local = shard_batch(whole, mesh, config.sp_layout)
        history.append(loss_and_norm(engine, mesh, local, config, config.learning_rate))
    return history


def offloads(engine: Engine) -> bool:
    sharded = [module for stage in engine.stages for module in stage.modules() if isinstance(module, FSDPModule)]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in sharded]  # None for a stage of layers alone
    (found,) = {parameter.offload_to_cpu for group in groups if group for parameter in group.fsdp_params}
    return found


def config_of(case: Row, folder: Path) -> TrainConfig:
    return TrainConfig(
        model=str(folder),
        seq_len=SEQ_LEN,
        adam_eps=ADAM_EPS,
        dtype="float32",
        loss_chunk=24,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_NORM,
        router_aux_loss_coef=reference(case)[1] or -1.0,
        **{"batch_size": ROWS} | case.flags,
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.always else pytest.mark.exhaustive) for case in MATRIX],
    ids=lambda case: f"{case.family}: {case.name}",
)
@pytest.mark.slow(but=1)
def test_steps_are_those_of_one_process(
    ranks: RankPool, alone: dict[str, Any], case: Row, exhaustive: bool, steps: int
) -> None:
    case = case.run_as(exhaustive)
    folder, wanted = alone[reference(case)]
    histories = ranks.run(train, case.ranks, config_of(case, folder), steps)
    difference = (torch.tensor(histories, dtype=torch.float64) / torch.tensor(wanted, dtype=torch.float64) - 1).abs()
    assert difference.max() <= 1e-5, difference.amax(dim=0)


def test_balance_by_micro_batch_is_another_loss(alone: dict[str, Any]) -> None:
    """The bound above tells them apart."""
    step, parts = (torch.tensor(alone["mixtral", AUX_LOSS, parts][1]) for parts in (1, 2))
    assert (step / parts - 1).abs().amax() > 1e-4
