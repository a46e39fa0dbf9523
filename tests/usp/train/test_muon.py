"""Muon on sharded matrices is torch's on whole ones, and sends each matrix once there and once back.

Newton-Schulz in bfloat16 makes much of the smallest singular values, so updates are compared for equal gradients. How
far trainings drift apart in a few steps says only whether the gradients are those of one process.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.harness.ranks import RankPool
from tests.usp.tiny import ADAM_EPS, ROWS, SEQ_LEN, loss_alone, loss_and_norm, packed_batch, tiny_model
from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.models import empty_model, load_model_config
from usp.optimizers import MuonAdamW
from usp.parallel import ParallelMesh
from usp.parallel.reallocation.boxes import local_box
from usp.parallel.wire import SentBytes
from usp.predict.meter import OPTIMIZER
from usp.run.failures import ConfigurationError
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.dry_run import dry_run
from usp.train.engine import Engine
from usp.train.resolve import job_of, resolve

STEPS, RATE = 2, 3e-3
LAYOUTS: dict[str, list[dict[str, Any]]] = {  # those with the bytes that all ranks send in 2 bytes of every matrix
    "llama": [
        {"sp_ulysses": 2, "dp_replicate": 2, "zero": 1},
        {"pp": 2, "tp": 2, "micro_batches": 2, "zero": 2},
        {"sp_ulysses": 2, "sp_ring": 2, "zero": 0},
    ],
    "qwen3_moe": [{"sp_ulysses": 2, "sp_ring": 2, "ep": 2}, {"sp_ring": 2, "tp": 2, "tp_sequence_parallel": True}],
}
SENT = {"llama": [2 * 2 * 1 / 2, 2 * 1 / 2, 0], "qwen3_moe": [2 * 3 / 4, None]}


def config_of(folder: Path, **flags: Any) -> TrainConfig:
    return TrainConfig(
        model=str(folder),
        seq_len=SEQ_LEN,
        adam_eps=ADAM_EPS,
        dtype="float32",
        learning_rate=RATE,
        router_aux_loss_coef=0.0,
        optimizer="muon",
        **{"batch_size": ROWS} | flags,
    )


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + step))


class Alone:
    """One process with torch's optimizers; of experts, each is a matrix of its own."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        named = dict(self.model.named_parameters())
        matrices = [p for name, p in named.items() if "layers" in name and p.ndim >= 2]
        rest = [p for name, p in named.items() if "layers" not in name or p.ndim < 2]
        self.views = [(m, i) for m in matrices for i in (range(len(m)) if m.ndim == 3 else [...])]
        self.parts = [nn.Parameter(matrix.data[index]) for matrix, index in self.views]
        groups = [{"params": [p for p in rest if p.ndim == n], "weight_decay": 0.1 * (n == 2)} for n in (1, 2)]
        self.muon = torch.optim.Muon(self.parts, RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), eps=ADAM_EPS)

    def update(self) -> None:
        for part, (matrix, index) in zip(self.parts, self.views, strict=True):
            part.grad = matrix.grad[index]
        self.muon.step()
        self.adamw.step()

    def updated(self) -> dict[str, Tensor]:
        for step in range(STEPS):
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradient(name, parameter.shape, step)
            self.update()
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def trained(self) -> list[float]:
        losses = []
        for step in range(STEPS):
            self.model.zero_grad()
            loss = loss_alone(self.model, packed_batch(step))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.update()
            losses.append(loss.item())
        return losses


def built(config: TrainConfig) -> tuple[Engine, ParallelMesh, TrainConfig]:
    config, model_config, _, dims = resolve(config, dist.get_world_size()).valid()
    mesh, fill = ParallelMesh.create(dims), partial(first_weights, source=config.model, seed=0)
    engine = build_engine(EngineRecipe.of(config, model_config), mesh, torch.device("cpu"), fill)
    return engine, mesh, config


def updated(config: TrainConfig) -> tuple[dict[str, Tensor], int, int]:
    """Return the weights after a few updates, the bytes that the last one sent, and those of the shared matrices."""
    engine, _, _ = built(config)
    for group in engine.optimizer.param_groups:
        group["lr"] = RATE
    for step in range(STEPS):
        for name, parameter in engine.parameters.items():
            assert isinstance(parameter, DTensor)
            part = gradient(name, parameter.shape, step)[local_box(parameter).slices()].contiguous()
            shape, stride = parameter.shape, parameter.stride()
            placed = parameter.device_mesh, parameter.placements
            parameter.grad = DTensor.from_local(part, *placed, run_check=False, shape=shape, stride=stride)
        with SentBytes() as sent:
            engine.optimizer.step()
    optimizer = cast(MuonAdamW, engine.optimizer)
    shared = (m.shape for ranks, found in optimizer._shared.items() if len(ranks) > 1 for m in found)
    weights = {name: cast(DTensor, p.detach()).full_tensor() for name, p in engine.parameters.items()}
    return weights, sent.total, sum(2 * rows * columns for rows, columns in shared)


def trained(config: TrainConfig) -> list[float]:
    engine, mesh, config = built(config)
    share, losses = ROWS // mesh.size("batch"), []
    rows = slice(mesh.rank("batch") * share, (mesh.rank("batch") + 1) * share)
    for step in range(STEPS):
        local = shard_batch({key: value[rows] for key, value in packed_batch(step).items()}, mesh, config.sp_layout)
        losses.append(loss_and_norm(engine, mesh, local, config, RATE)[0])
    return losses


def each(configs: list[TrainConfig]) -> list[tuple[dict[str, Tensor], int, int, list[float]]]:
    return [(*updated(config), trained(config)) for config in configs]


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.slow
def test_steps_are_those_of_torch_in_one_process(ranks: RankPool, tmp_path: Path, family: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    wanted, losses = Alone(tmp_path).updated(), torch.tensor(Alone(tmp_path).trained(), dtype=torch.float64)
    found = ranks.run(each, 4, [config_of(tmp_path, **flags) for flags in LAYOUTS[family]])
    for number, (flags, times) in enumerate(zip(LAYOUTS[family], SENT[family], strict=True)):
        weights: Mapping[str, Tensor] = {name: x for of_rank in found for name, x in of_rank[number][0].items()}
        assert weights.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (weights[name] - value).abs().max() <= 1e-5 * value.abs().max(), (flags, name)
        if times is not None:  # a router that tp ranks share is orthogonalised by each of them
            stages = {rank[number][2] for rank in found}
            assert sum(rank[number][1] for rank in found) == times * sum(stages) * flags.get("pp", 1), flags
        assert (torch.tensor(found[0][number][3]) / losses - 1).abs().max() <= 1e-4, flags


@pytest.mark.exhaustive
def test_adapters_are_matrices_too(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tiny_model("llama").save_pretrained(tmp_path)
    config = config_of(tmp_path, lora_rank=3)  # fewer rows than ranks
    ((wanted, _, _),) = ranks.run(updated, 1, config)
    found, _, shared = ranks.run(updated, 4, replace(config, sp_ring=2, tp=2))[0]
    assert shared > 0 and wanted.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.slow
def test_the_dry_run_knows_one_moment_per_weight_and_the_exchange() -> None:
    adamw, muon = (dry_run(TrainConfig(seq_len=256, device="cpu", optimizer=kind), 4) for kind in ("adamw", "muon"))
    matrices = sum(p.numel() for p in hidden_matrices_of("tiny"))
    others = sum(p.numel() for p in empty_model(load_model_config("tiny")).parameters()) - matrices
    states = {run.config.optimizer: run.by_category[OPTIMIZER] for run in (adamw, muon)}
    assert states["adamw"] - states["muon"] == pytest.approx(4 * matrices / 4, rel=1e-3)
    assert states["muon"] == pytest.approx((4 * matrices + 8 * others) / 4, rel=1e-3)
    (sent,) = (found.nbytes for found in muon.sent if found.collective == "alltoall_base_")
    assert sent == pytest.approx(2 * 2 * matrices / 4 * 3 / 4, rel=0.1)  # rank 0 has the largest of each round
    assert not any(found.collective == "alltoall_base_" for found in adamw.sent)


def hidden_matrices_of(preset: str) -> list[nn.Parameter]:
    model = empty_model(load_model_config(preset))
    return [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]


def test_what_has_no_muon_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = config_of(tmp_path)
    for changes, said in (
        ({"tp": 2, "ep": 2, "tp_sequence_parallel": True}, "use --tp 1 or --ep 1, or --optimizer adamw"),
        ({"optimizer": "adamw", "muon_momentum": 0.9}, "--muon-momentum = 0.9 is an option of --optimizer muon"),
        ({"optimizer": "Muon"}, "--optimizer = 'Muon' must be one of adamw, adamw-bf16, muon"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            resolve(replace(config, **changes), 2).valid()
    _, model_config, _, _ = resolve(config, 2).valid()
    assert job_of(config, model_config, 2).approximate == "temporaries of Muon are estimated"
