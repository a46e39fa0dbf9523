"""Initialisation, import and export of weights, each rank its own boxes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from parallel.boxes import local_box, local_part
from parallel.testing import RankPool
from tests.usp.tiny import CONFIGS, SIZES
from usp.hf import export
from usp.hf.export import save_weights
from usp.hf.initialise import initialise
from usp.hf.models import empty_model, materialise
from usp.hf.weights import load_weights

CPU = torch.device("cpu")
ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
}


def config_of(family: str) -> PretrainedConfig:
    """Tiny models: llama with biases and llama3's rope, qwen3 tied with yarn's, and both mixtures."""
    if family == "llama":
        return LlamaConfig(**SIZES, attention_bias=True, pad_token_id=3, rope_parameters=rope("llama3"))
    if family == "qwen3":
        return Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True, rope_parameters=rope("yarn"))
    return CONFIGS[family]()


def rope(kind: str) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, **ROPES[kind]}


FAMILIES = ("llama", "qwen3", "mixtral", "qwen3_moe")


def drawn(family: str, seed: int = 0) -> PreTrainedModel:
    model = empty_model(config_of(family))
    materialise(model, CPU)
    initialise(model, seed)
    return model


def transformers_model(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)


def assert_equal(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Every parameter and buffer, of a sharded model in this rank's boxes."""
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    ours = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(local_part(tensor), theirs[name][local_box(tensor).slices()]), name


# Sharding: fsdp alone, over replicas, and over tensor parallelism

LAYOUTS = ("fsdp4", "hsdp", "fsdp2-tp2")


def sharded(config: PretrainedConfig, layout: str) -> PreTrainedModel:
    """A model on the meta device, divided over four ranks."""
    model = empty_model(config)
    if layout == "fsdp4":
        mesh = init_device_mesh("cpu", (4,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        divide(model, both["tp"])
        mesh = both["fsdp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def divide(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:  # as expert parallelism does
            for name, p in list(experts.named_parameters()):
                local = torch.empty(p.shape[0] // mesh.size(), *p.shape[1:], device="meta")
                setattr(experts, name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False)))


# Initialisation


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_spread_as_transformers_spreads_them(family: str) -> None:
    model, theirs = drawn(family), transformers_model(family)
    before = torch.random.get_rng_state()
    initialise(model, 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    for (name, ours), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        if ours.ndim < 2:  # norms and biases
            assert torch.equal(ours, other), name
            continue
        n, std = ours.numel(), model.config.initializer_range
        for values in (ours, other):  # to five standard errors
            assert abs(values.mean()) < 5 * std / n**0.5 and abs(values.std() / std - 1) < 5 / (2 * n) ** 0.5, name
    for (name, ours), other in zip(model.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(ours, other), name
    assert model.model.rotary_emb.attention_scaling == theirs.model.rotary_emb.attention_scaling
    assert model.config.pad_token_id is None or not model.model.embed_tokens.weight[model.config.pad_token_id].any()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (family == "qwen3")


def test_the_seed_and_the_name_fix_the_values() -> None:
    first, second, other = drawn("llama", 1), drawn("llama", 1), drawn("llama", 2)
    assert_equal(first, second)
    query = "self_attn.q_proj.weight"
    assert not torch.equal(first.model.layers[0].get_parameter(query), other.model.layers[0].get_parameter(query))
    assert not torch.equal(first.model.layers[0].get_parameter(query), first.model.layers[1].get_parameter(query))


def test_a_pipeline_stage_gets_the_values_of_the_whole_model() -> None:
    whole, stage = drawn("qwen3"), empty_model(config_of("qwen3"))
    stage.model.layers[0], stage.model.embed_tokens = nn.Identity(), nn.Identity()
    materialise(stage, CPU)
    initialise(stage, 0)
    assert torch.equal(stage.lm_head.weight, whole.model.embed_tokens.weight)  # tied, on another stage
    for name, parameter in stage.model.layers[1].named_parameters():
        assert torch.equal(parameter, whole.model.layers[1].get_parameter(name)), name


def test_a_module_that_transformers_does_not_initialise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = empty_model(config_of("llama"))
    materialise(model, CPU)
    monkeypatch.setattr(type(model), "_init_weights", lambda self, module: None)
    with pytest.raises(ValueError, match=r"no first values to weight of model\.embed_tokens \(Embedding\)"):
        initialise(model, 0)


# All of it on four ranks


def travel(family: str, layout: str, source: Path, target: Path) -> float:
    """Draw, load and save a sharded model; the largest part of it that this rank has held of a file being written."""
    config = config_of(family)
    model = sharded(config, layout)
    materialise(model, CPU)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == config.tie_word_embeddings
    initialise(model, 5)
    assert_equal(model, drawn(family, 5))

    load_weights(model, source)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert_equal(model, expected)

    written: list[int] = []
    write = export.save_file

    def count(content: dict[str, Tensor], *args: object, **kwargs: object) -> None:
        written.append(sum(tensor.nbytes for tensor in content.values()))
        write(content, *args, **kwargs)

    export.save_file = count  # this worker's own module, put back below
    try:
        save_weights(dict(model.named_parameters()), target, config=model.config, max_shard_bytes=30_000)
    finally:
        export.save_file = write
    assert_equal(AutoModelForCausalLM.from_pretrained(target), expected)
    return max(written) / sum(p.nbytes for p in expected.parameters())


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "fsdp4"),
        ("qwen3", "hsdp"),
        ("mixtral", "fsdp2-tp2"),
        ("qwen3_moe", "fsdp2-tp2"),
        ("qwen3_moe", "hsdp"),
    ],
)
def test_a_sharded_model_is_drawn_loaded_and_saved(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    transformers_model(family).save_pretrained(source, max_shard_size="50KB")
    parts = ranks.run(travel, 4, family, layout, source, target)
    assert max(parts) < 0.35  # no rank ever has a file of more
    assert not list(tmp_path.glob("target.*"))
