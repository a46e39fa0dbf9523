"""A job follows the configuration, and its groups equal those of the mesh."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.harness.ranks import RankPool
from tests.usp.predict.jobs import job
from usp.config import TrainConfig
from usp.hf.models import empty_model, load_model_config, model_facts, scalar_config
from usp.hf.tensor_parallel import model_shape
from usp.parallel import ParallelDims, ParallelMesh
from usp.predict.job import Job
from usp.predict.traffic import stage_units
from usp.run.failures import ConfigurationError


@pytest.mark.parametrize("model", ["tiny", "qwen3-tiny", "mixtral-tiny", "llama3-8b"])
def test_every_parameter_is_counted_once(model: str) -> None:
    whole = empty_model(load_model_config(model))
    assert job(1, model=model).model.numel == sum(parameter.numel() for parameter in whole.parameters())


@pytest.mark.slow
def test_what_is_trained_beside_adapters_has_gradients() -> None:
    jobs = (
        job(1, model="qwen3-tiny", lora_rank=4, lora_modules_to_save=saved) for saved in ("", "embed_tokens,lm_head")
    )
    frozen, trained = (stage_units(each, 0).root[0] for each in jobs)
    model = job(1, model="qwen3-tiny").model
    assert frozen.trained_numel == 0 and frozen.numel == trained.numel
    assert trained.trained_numel == sum(p.numel for p in (*model.embedding, *model.head)) > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_scalar_head_is_one_row(tied: bool) -> None:
    causal = load_model_config("qwen3-tiny")
    causal.tie_word_embeddings = tied
    config = scalar_config(causal)
    shape = model_shape(model_facts("critic", config), config)
    assert [p.shape for p in shape.head] == [(1, causal.hidden_size)] and not shape.facts.tied
    assert shape.numel == sum(parameter.numel() for parameter in empty_model(config).parameters())


def test_tensor_parallel_ranks_shard_what_the_plan_shards() -> None:
    shapes = {p.name: p for p in job(2, model="qwen3-tiny", tp=2).model.layers[0].parameters}
    assert shapes["self_attn.q_proj.weight"].local(2) == (64, 128)
    assert shapes["self_attn.o_proj.weight"].local(2) == (128, 64)
    assert shapes["input_layernorm.weight"].local(2) == (128,)
    assert not shapes["input_layernorm.weight"].partial_gradient(sequence_parallel=False)
    assert shapes["self_attn.q_norm.weight"].partial_gradient(sequence_parallel=False)


def test_configurations_that_training_refuses_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="must divide the world size 8"):
        job(8, sp_ring=3)


AXES = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp", "fsdp", "loss", "batch", "sp", "efsdp", "ep")
GRIDS = [
    ParallelDims(pp=2, ring=2, tp=2, ep=2),
    ParallelDims(dp_replicate=2, ring=2, ulysses=2, ep=4, sp_order="ulysses-outer"),
]


def groups_of_the_mesh() -> list[dict[str, tuple[int, ...]]]:
    meshes = [ParallelMesh.create(dims) for dims in GRIDS]
    return [
        {axis: tuple(dist.get_process_group_ranks((mesh.expert_mesh(axis) if axis in ("ep", "efsdp") else
         mesh.device_mesh(axis)).get_group())) for axis in AXES}
        for mesh in meshes
    ]  # fmt: skip


@pytest.mark.slow
def test_groups_equal_those_of_the_mesh(ranks: RankPool) -> None:
    model = job(1).model
    for rank, found in enumerate(ranks.run(groups_of_the_mesh, 8)):
        for dims, groups in zip(GRIDS, found, strict=True):
            asked = Job(TrainConfig(), model, dims.resolve(8))
            assert {axis: tuple(asked.ranks(axis, rank)) for axis in AXES} == groups
