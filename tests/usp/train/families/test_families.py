"""Families beyond those of the matrix train as plain transformers does, on sp, tp and pp."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import TYPES, reason, tiny_config, tiny_model
from tests.usp.tiny import loss_and_norm
from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.disk import stored_tensors
from usp.hf.experts import has_balancing_loss
from usp.hf.models import load_model_config, model_facts, training_problems
from usp.hf.prune import tied_ends
from usp.hf.shrink import VOCAB
from usp.model.facts import FAMILIES
from usp.parallel import ParallelMesh
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.prepare import prepare
from usp.train.resolve import resolve

ROWS, CUTS, STEPS = 2, [0, 11, 19, 32], 2
RATE, MAX_NORM, EPS = 3e-3, 0.5, 1e-3  # smaller gradients shall not be all rounding after ten steps
MESHES: dict[str, dict[str, Any]] = {
    "u2 r2": {"sp_ulysses": 2, "sp_ring": 2},
    "u2 r2, recomputed": {"sp_ulysses": 2, "sp_ring": 2, "ac": "full", "micro_batches": 2},
    "tp2 r2": {"tp": 2, "sp_ring": 2},
    "tp2 u2, tokens shared": {"tp": 2, "tp_sequence_parallel": True, "sp_ulysses": 2},
    "pp2 r2": {"pp": 2, "sp_ring": 2, "micro_batches": 2},
}
EXPERT_MESHES: dict[str, dict[str, Any]] = {
    "ep2 dp2 r2": {"ep": 2, "sp_ring": 2, "batch_size": 1},
    "ep4 u2 r2": {"ep": 4, "sp_ulysses": 2, "sp_ring": 2},
    "pp2 ep2": {"pp": 2, "ep": 2, "sp_ulysses": 2, "micro_batches": 2},
    "tp2 ep2": {"tp": 2, "tp_sequence_parallel": True, "ep": 2, "sp_ring": 2, "ac": "full"},
}
PAIRS: dict[str, dict[str, Any]] = {  # on two ranks
    "u2": {"sp_ulysses": 2},
    "r2": {"sp_ring": 2},
    "r2, recomputed": {"sp_ring": 2, "ac": "full", "micro_batches": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "micro_batches": 2},
    "ep2": {"ep": 2, "batch_size": 1},
}
AUX = 0.02  # weight of the load-balancing loss, where transformers defines one
# Why a mesh is refused for a family: transformers ships no plan that this toolkit knows.
REFUSALS = (
    "tensor-parallel plan of model_type=",
    "outside of its layers",
    "must divide num_key_value_heads",
    "latent attention is not supported with tp_sequence_parallel",
    "and not in its tensor-parallel plan",
    "so that each tp rank routes different tokens",
    "is inside a sharded module: the plan must name",
    "does not divide the recurrent layers of",
    "layers differ in their heads",
    "do not go through ExpertsInterface",
    "needs hidden states that only layers and a norm change",
    "cannot be divided into pipeline stages",
)
# Each mesh with a family, and each of the others on a pair of ranks; deepseek_v4: ../../hf/test_compressors.py.
CHOSEN = {
    "gemma3_text": ["tp2 r2"],  # windows, scaled embedding, norms of queries and keys
    "granite": ["tp2 u2, tokens shared"],  # scaled embeddings, residuals and logits
    "glm4_moe": ["tp2 ep2"],  # GLM-4.5's norms of queries and keys
    "minimax": ["pp2"],  # lightning attention, buffers that checkpoints hold
    "phi3": ["pp2"],  # fused projections
    "gpt_oss": ["ep2 dp2 r2"],  # experts with biases, transposed and interleaved; sinks; balanced
    "deepseek_v3": ["pp2 ep2"],  # grouped and biased routing, shared experts, a dense layer, latent attention
    "minimax_m3_vl_text": ["r2, recomputed"],  # blocks of keys that an indexer chooses
    "gemma4_text": ["u2"],  # wider heads in some layers, embeddings for each layer
    "dbrx": ["pp2"],  # experts outside of the interface, balanced
    "hy_v4": ["r2"],  # parameters after the layers that are on no stage
}


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(3, VOCAB - 4, (ROWS, CUTS[-1]), generator=torch.Generator().manual_seed(step))


def write(model_type: str, folder: Path, **changed: Any) -> None:
    """Write a tiny model of a type, with these fields of its configuration changed."""
    if not changed:
        return tiny_model(model_type).save_pretrained(folder)
    config = tiny_config(model_type)
    for name, value in changed.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def plain_steps(model_type: str, count: int = STEPS) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps of the unchanged model, each document alone."""
    model, history = tiny_model(model_type).train(), []
    balanced = has_balancing_loss(model.config)
    routers = {"output_router_logits": True} if balanced else {}
    matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) == whole] for whole in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS)
    for step in range(count):
        ids, total, targets, routed = ids_of(step), torch.zeros(()), 0, []
        for begin, end in pairwise(CUTS):
            positions = torch.arange(end - begin).expand(ROWS, -1)
            out = model(input_ids=ids[:, begin:end], position_ids=positions, use_cache=False, **routers)
            labels = ids[:, begin + 1 : end].flatten()
            logits = out.logits[:, :-1].flatten(0, 1)
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            routed += out.router_logits if balanced else ()
            targets += len(labels)
        loss = total / targets
        if balanced:
            loss_of = sys.modules[type(model).__module__].load_balancing_loss_func
            loss = loss + AUX * loss_of(tuple(routed), model.num_experts, model.num_experts_per_tok)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


def steps(folder: str, flags: dict[str, Any], count: int = STEPS) -> list[tuple[float, float]] | str:
    """The same with train.py's engine, or why the mesh is refused."""
    usual = {"dtype": "float32", "batch_size": ROWS, "adam_eps": EPS, "learning_rate": RATE, "max_grad_norm": MAX_NORM}
    aux = AUX if has_balancing_loss(load_model_config(folder)) else -1
    asked = TrainConfig(model=folder, seq_len=CUTS[-1], loss_chunk=24, router_aux_loss_coef=aux, **usual | flags)
    try:
        resolved = resolve(asked, dist.get_world_size())
        config, model_config, _, dims = resolved.valid()
        assert resolved.shape.numel >= resolved.shape.matmul_parameters > 0
        mesh = ParallelMesh.create(dims)
        fill = partial(first_weights, source=folder, seed=0)
        engine = build_engine(EngineRecipe.of(config, model_config), mesh, torch.device("cpu"), fill)
    except ValueError as error:
        return str(error)

    history = []
    for step in range(count):
        ids = ids_of(step)
        whole = {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([CUTS] * ROWS, dtype=torch.int32)}
        rows = slice(mesh.rank("batch") * config.batch_size, (mesh.rank("batch") + 1) * config.batch_size)
        local = shard_batch({key: value[rows] for key, value in whole.items()}, mesh, config.sp_layout)
        history.append(loss_and_norm(engine, mesh, local, config, RATE))
    stored = {
        f"model.{tied_ends(stage.model).get(name, name)}"
        for stage in engine.stages
        for name in stored_tensors(stage.model)
    }
    assert stored <= engine.state().keys()  # what routers choose by is not trained, and saved all the same
    return history


def cases(exhaustive: bool) -> dict[str, list[str]]:
    if not exhaustive:
        return CHOSEN
    trained = [name for name in TYPES if not reason(name) and not training_problems(tiny_config(name))]
    experts = {name for name in trained if model_facts(name, tiny_config(name)).num_experts}
    return {name: list(MESHES | EXPERT_MESHES if name in experts else MESHES) for name in trained}


@pytest.mark.slow
def test_steps_are_those_of_plain_transformers(ranks: RankPool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    exhaustive = request.config.getoption("--exhaustive")
    wrong: dict[tuple[str, str], Any] = {}
    trained, count = set(), 3 if exhaustive else STEPS
    for model_type, meshes in cases(exhaustive).items():
        folder = tmp_path / model_type
        tiny_model(model_type).save_pretrained(folder)
        expected = torch.tensor(plain_steps(model_type, count), dtype=torch.float64)
        for mesh in meshes:
            flags = (MESHES | EXPERT_MESHES | PAIRS)[mesh]
            found = ranks.run(steps, 2 if mesh in PAIRS else 4, str(folder), flags, count)
            if isinstance(found[0], str):
                if not (exhaustive and any(part in found[0] for part in REFUSALS)):
                    wrong[model_type, mesh] = found[0]
                continue
            trained.add(model_type)
            difference = (torch.tensor(found, dtype=torch.float64) / expected - 1).abs().max().item()
            if not difference <= 1e-5:
                wrong[model_type, mesh] = difference
    assert not wrong
    assert trained >= set(CHOSEN) and (not exhaustive or len(trained) >= 105)


@pytest.mark.slow
def test_a_residual_in_float32_passes_on_in_bfloat16(ranks: RankPool, tmp_path: Path) -> None:
    write("mamba", tmp_path)
    (expected,) = plain_steps("mamba", 1)
    for mesh in ({"sp_ring": 2}, {"pp": 2, "micro_batches": 2}):
        found = ranks.run(steps, 2, str(tmp_path), {"dtype": "bfloat16", **mesh}, 1)
        assert found[0][0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("jetmoe", "its load-balancing loss is of several kinds of routers"),
        ("phimoe", "its layers draw random numbers in training"),
        ("zamba", "its layers share parameters"),
        ("modernbert-decoder", "ModernBertDecoderForCausalLM lacks an embedding of ids"),
    ],
)
@pytest.mark.slow
def test_other_models_are_refused_before_anything_else(tmp_path: Path, model_type: str, why: str) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=f"model_type='{model_type}', which is not trained: .*{why}"):
        prepare(TrainConfig(model=str(tmp_path), tokenizer="bytes", seq_len=64, device="cpu"), Launch())
    assert model_type not in FAMILIES


def test_a_model_that_cannot_be_divided_into_stages_is_refused_with_pp_only(tmp_path: Path) -> None:
    tiny_model("nanochat").save_pretrained(tmp_path)
    asked = TrainConfig(model=str(tmp_path), seq_len=64)
    assert not resolve(asked, 2).problems
    assert any("cannot be divided into pipeline stages" in said for said in resolve(replace(asked, pp=2), 2).problems)


@pytest.mark.slow
def test_dropout_is_disabled_by_a_flag_and_refused_without(tmp_path: Path) -> None:
    write("gpt2", tmp_path, resid_pdrop=0.1, attn_pdrop=0.2)
    asked = TrainConfig(model=str(tmp_path), seq_len=64)
    (said,) = resolve(asked, 1).problems
    assert "(resid_pdrop=0.1, attn_pdrop=0.2)" in said and "add --disable-dropout" in said
    found = resolve(replace(asked, disable_dropout=True), 1)
    assert not found.problems and found.model_config.resid_pdrop == found.model_config.attn_pdrop == 0.0


@pytest.mark.slow
def test_experts_are_balanced_only_as_transformers_does(tmp_path: Path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    for asked, refused in ((0.1, True), (0.0, False), (-1, False)):
        found = resolve(TrainConfig(model=str(tmp_path), seq_len=64, router_aux_loss_coef=asked), 1)
        assert any("transformers defines none for" in problem for problem in found.problems) == refused
        assert found.facts.num_experts == 8 and found.facts.intermediate_size == 48  # of its dense layer
    assert found.facts.balance(-1) == 0.0
