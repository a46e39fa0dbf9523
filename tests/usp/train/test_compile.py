"""Compiled layers train as eager ones, as one graph each, and documents need no new graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import tiny_model
from tests.usp.tiny import loss_and_norm
from tests.usp.train.families.test_families import write
from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.integrate import decoder_layers
from usp.hf.shrink import VOCAB
from usp.losses import NextTokenLoss
from usp.parallel import ParallelMesh
from usp.predict.fake_world import fake_world
from usp.sp.sequence import split_rows
from usp.train.build import EngineRecipe, build_engine, build_stages, first_weights
from usp.train.prepare import _device_problems
from usp.train.resolve import resolve
from usp.train.step import sum_over_ranks

pytestmark = pytest.mark.compiles

ROWS, SEQ_LEN, STEPS = 4, 32, 3
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

    history, graphs = [], []
    share = ROWS // mesh.size("batch")
    for step in range(STEPS):
        first = mesh.rank("batch") * share
        rows = {key: value[first : first + share] for key, value in batch_of(step).items()}
        local = shard_batch(rows, mesh, config.sp_layout)
        history.append(loss_and_norm(engine, mesh, local, config, 3e-3))
        graphs.append(counters["stats"]["unique_graphs"])
    for _ in range(2):  # another graph, without gradients
        value = engine.evaluate(split_rows(local, config.micro_batches), NextTokenLoss(ROWS * SEQ_LEN))
        (loss,) = sum_over_ranks([value.item()], mesh, value.device)
        history.append((loss, 1.0))
        graphs.append(counters["stats"]["unique_graphs"])
    return {
        "history": history,
        "graphs": graphs,
        "breaks": sorted(counters["graph_break"]),
        "names": sorted(engine.state()),
    }


def compare(
    ranks: RankPool, folder: Path, model_type: str, backend: str, flags: Mapping[str, Any], world_size: int = 4
) -> dict[str, Any]:
    """Assert that losses and norms are those of eager layers, and that only first steps and evaluations compile."""
    if not folder.exists():
        tiny_model(model_type).save_pretrained(folder)
    eager, compiled = (ranks.run(train, world_size, str(folder), b, SP | flags) for b in ("", backend))
    found, wanted = (torch.tensor([rank["history"] for rank in run], dtype=torch.float64) for run in (compiled, eager))
    assert float((found / wanted - 1).abs().max()) <= 1e-5
    assert compiled[0]["names"] == eager[0]["names"]
    for rank in compiled:
        assert rank["graphs"] == rank["graphs"][:1] * STEPS + rank["graphs"][-1:] * 2 and rank["graphs"][0] > 0
    assert eager[0]["graphs"] == [0] * (STEPS + 2)
    return compiled[0]


@pytest.mark.slow
def test_a_layer_is_one_graph(ranks: RankPool, tmp_path: Path) -> None:
    flags = {"sp_ulysses": 1, "ac": "attention-saved"}
    kinds = ["sliding_attention", "full_attention"]
    write("gemma3_text", tmp_path / "gemma3_text", num_hidden_layers=2, layer_types=kinds)
    full_and_windowed = compare(ranks, tmp_path / "gemma3_text", "gemma3_text", "aot_eager", flags, world_size=2)
    assert (full_and_windowed["graphs"][0], full_and_windowed["breaks"]) == (2 + 2, [])  # and chunks of the loss


MIXTURES: dict[str, tuple[str, str, Mapping[str, Any], int, int]] = {
    # model type, backend, flags, graphs (without tp 1 or 2 of them are of the loss: its chunks differ), graph breaks
    "llama": ("llama", "inductor", {}, 3, 0),
    "gemma3_text": ("gemma3_text", "inductor", {}, 4, 0),
    "qwen3_moe": ("qwen3_moe", "inductor", {"ep": 2}, 4, 1),
    "full": ("llama", "aot_eager", {"ac": "full"}, 3, 0),
    "offload": ("llama", "inductor", {"ac": "attention-saved", "ac_offload": True}, 3, 0),
    "tile": ("llama", "aot_eager", {"mlp_tile": 3}, 6, 1),
    "tp": ("llama", "inductor", {"sp_ulysses": 1, "tp": 2}, 4, 0),
    "tokens": ("llama", "aot_eager", {"sp_ulysses": 1, "tp": 2, "tp_sequence_parallel": True}, 4, 0),
    "pp": ("llama", "aot_eager", {"sp_ulysses": 1, "pp": 2, "micro_batches": 2}, 1, 0),
    "zero 1": ("llama", "aot_eager", {"sp_ulysses": 1, "dp_shard": 2, "zero": 1, "micro_batches": 2}, 2, 0),
    "zero 2": ("llama", "aot_eager", {"sp_ring": 1, "dp_replicate": 2, "zero": 2}, 3, 0),
    "lora": ("llama", "inductor", {"lora_rank": 2, "lora_targets": "gate_proj", "ac": "attention-saved"}, 4, 0),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(ranks: RankPool, tmp_path: Path, name: str) -> None:
    model_type, backend, flags, graphs, breaks = MIXTURES[name]
    found = compare(ranks, tmp_path / model_type, model_type, backend, flags)
    assert (found["graphs"][0], len(found["breaks"])) == (graphs, breaks)


def test_inductor_is_asked_to_divide_messages_of_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes of them needs GPUs."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward, backend, options: asked.append(options) or forward)
    flags: dict[str, Any] = {"tp": 2, "tp_sequence_parallel": True, "compile": True, "dtype": "bfloat16"}
    for async_tp in (False, True):
        config, model, _, dims = resolve(TrainConfig(seq_len=64, async_tp=async_tp, **flags), 2).valid()
        with fake_world(2, 0):
            mesh = ParallelMesh.create(dims)
            stages = build_stages(EngineRecipe.of(config, model), mesh)
            assert is_symm_mem_enabled_for_group(mesh.group("tp").group_name) is async_tp
        layers = [layer for stage in stages for layer in decoder_layers(stage.model)]
        assert asked == [{"_micro_pipeline_tp": True} if async_tp else None] * len(layers)
        asked.clear()
    (refused,) = _device_problems(TrainConfig(async_tp=True, **flags), torch.device("cpu"))
    assert refused == "--async-tp needs NVIDIA GPUs, and the device is cpu: remove it"
