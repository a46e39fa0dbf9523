"""Initialization, import and export of weights that are sharded over ranks."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    core_model_loading,
)

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import tiny_config
from tests.usp.hf.test_every_model import tiny_model as any_tiny_model
from tests.usp.hf.test_expert_parallel import types_with_experts
from tests.usp.tiny import CONFIGS, SIZES, drawn_model
from usp.hf import disk, export, weights
from usp.hf import weights as initialise_module
from usp.hf.disk import INDEX, disk_layout, file_names, persistent_buffers, read_headers, stored_tensors
from usp.hf.expert_parallel import apply_ep
from usp.hf.experts import expert_modules
from usp.hf.export import Held, part_violations, plan_tensors, save_weights
from usp.hf.integrate import decoder_layers
from usp.hf.models import empty_model, materialise, training_problems
from usp.hf.weights import initialise, load_weights
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp
from usp.parallel.reallocation.boxes import Box, local_box, local_part
from usp.run.failures import WriteFailed

CPU = torch.device("cpu")
ROPES = {"llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "yarn": {"factor": 4.0}}


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


def transformers_model(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)


def assert_equal(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Compare all parameters and buffers; of a sharded model, this rank's boxes."""
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    ours = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(local_part(tensor), theirs[name][local_box(tensor).slices()]), name


# Sharding: FSDP, HSDP, and FSDP with tensor parallelism

LAYOUTS = ("fsdp4", "hsdp", "fsdp2-tp2")


def sharded(config: PretrainedConfig, layout: str) -> PreTrainedModel:
    """Return a model on the meta device, sharded over four ranks."""
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
        if layout == "hsdp" and hasattr(layer.mlp, "experts"):  # ranks share the rows of an expert
            fully_shard(layer.mlp.experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
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
@pytest.mark.slow(but=1)
def test_initialization_matches_transformers_distributions(family: str) -> None:
    model, theirs = drawn_model(config_of(family)), transformers_model(family)
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


def test_values_depend_on_seed_and_name() -> None:
    first, second, other = (
        drawn_model(config_of("llama"), 1),
        drawn_model(config_of("llama"), 1),
        drawn_model(config_of("llama"), 2),
    )
    assert_equal(first, second)
    query = "self_attn.q_proj.weight"
    assert not torch.equal(first.model.layers[0].get_parameter(query), other.model.layers[0].get_parameter(query))
    assert not torch.equal(first.model.layers[0].get_parameter(query), first.model.layers[1].get_parameter(query))


def test_pipeline_stage_is_initialized_like_the_whole_model() -> None:
    whole, stage = drawn_model(config_of("qwen3")), empty_model(config_of("qwen3"))
    stage.model.layers[0], stage.model.embed_tokens = nn.Identity(), nn.Identity()
    materialise(stage, CPU)
    initialise(stage, 0)
    assert torch.equal(stage.lm_head.weight, whole.model.embed_tokens.weight)  # tied, on another stage
    for name, parameter in stage.model.layers[1].named_parameters():
        assert torch.equal(parameter, whole.model.layers[1].get_parameter(name)), name


def test_uninitialized_modules_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = empty_model(config_of("llama"))
    materialise(model, CPU)
    monkeypatch.setattr(type(model.base_model), "_init_weights", lambda self, module: None)
    with pytest.raises(ValueError, match=r"does not initialize weight of model\.embed_tokens \(Embedding\)"):
        initialise(model, 0)


# All of it on four ranks


def travel(family: str, layout: str, source: Path, target: Path) -> None:
    """Initialize, load and save a sharded model; check how much memory a rank uses beyond its shard."""
    config = config_of(family)
    model = sharded(config, layout)
    materialise(model, CPU)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config.tie_word_embeddings
    own = sum(local_part(parameter).nbytes for parameter in model.parameters())
    size = sum(parameter.nbytes for parameter in model.parameters())

    with pytest.MonkeyPatch.context() as patch:
        alive = watch_modules(patch)
        initialise(model, 5)
    assert max(alive) == 0  # drawn modules, when the next is drawn
    assert_equal(model, drawn_model(config_of(family), 5))

    with pytest.MonkeyPatch.context() as patch:
        read = watch(patch, weights, "_read", lambda tensor, *_: tensor.nbytes)
        load_weights(model, source)
    copies = 2 if config.tie_word_embeddings else 1  # filled under both names
    assert own <= sum(read) <= copies * own
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert_equal(model, expected)

    with pytest.MonkeyPatch.context() as patch:
        written = watch(
            patch, export, "save_file", lambda _, content, *__, **___: sum(t.nbytes for t in content.values())
        )
        save_weights(dict(model.named_parameters()), target, config=model.config, max_shard_bytes=30_000)
    assert max(written) <= 30_000 < size / 3
    assert_equal(AutoModelForCausalLM.from_pretrained(target), expected)


def watch(patch: pytest.MonkeyPatch, module: ModuleType, name: str, measure: Callable[..., int]) -> list[int]:
    """Record `measure(result, *arguments)` of each call of a function of `module`."""
    function, measured = getattr(module, name), []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        measured.append(measure(result, *args, **kwargs))
        return result

    patch.setattr(module, name, wrapped)
    return measured


def watch_modules(patch: pytest.MonkeyPatch) -> list[int]:
    """Record, at each module drawn, how many tensors of earlier modules are still alive."""
    drawn: list[weakref.ref[Tensor]] = []
    function, alive = initialise_module._drawn, []

    def wrapped(*args: Any) -> dict[str, Tensor]:
        alive.append(sum(reference() is not None for reference in drawn))
        values = function(*args)
        drawn.extend(weakref.ref(value) for value in values.values())
        return values

    patch.setattr(initialise_module, "_drawn", wrapped)
    return alive


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "fsdp4"),
        ("mixtral", "fsdp2-tp2"),
        ("qwen3_moe", "hsdp"),
        ("qwen3", "hsdp"),
        ("qwen3_moe", "fsdp2-tp2"),
    ],
)
@pytest.mark.slow(full=3)
def test_sharded_model_is_drawn_loaded_and_saved(ranks: RankPool, tmp_path: Path, family: str, layout: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    transformers_model(family).save_pretrained(source, max_shard_size="50KB")
    ranks.run(travel, 4, family, layout, source, target)
    assert not list(tmp_path.glob("target.*"))
    theirs, ours = (json.loads((folder / INDEX).read_text()) for folder in (source, target))
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"] == theirs["metadata"]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, target)]
    assert configs[0] == configs[1]
    generation = [json.loads((folder / "generation_config.json").read_text()) for folder in (source, target)]
    assert generation[0] == generation[1]


# Families whose files hold experts otherwise than their modules, over ep and FSDP2

EXPERTS = ["gpt_oss", "deepseek_v3"]


def experts_travel(model_types: list[str], folder: Path) -> None:
    for model_type in model_types:
        source, target = folder / model_type, folder / f"{model_type}-saved"
        theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        mesh = ParallelMesh.create(ParallelDims(ep=2))
        model = empty_model(theirs.config)
        apply_ep(model, mesh)
        apply_fsdp(model, mesh, decoder_layers(model), experts=expert_modules(model))
        materialise(model, CPU)
        initialise(model, 5)
        assert_equal(model, drawn_model(theirs.config, 5))
        with pytest.MonkeyPatch.context() as patch:
            read = watch(patch, weights, "_read", lambda tensor, *_: tensor.nbytes)
            load_weights(model, source)
        own = sum(local_part(tensor).nbytes for tensor in stored_tensors(model).values())
        assert own <= sum(read) <= own * (2 if theirs.config.tie_word_embeddings else 1), model_type
        assert_equal(model, theirs)
        for dtype in (torch.bfloat16, torch.float32):
            save_weights(stored_tensors(model), target, config=model.config, dtype=dtype, max_shard_bytes=200_000)
            if dist.get_rank() == 0:
                rounded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
                assert_equal(AutoModelForCausalLM.from_pretrained(target, dtype=dtype), rounded)
            headers = read_headers(target)
            assert all(headers[name].get_dtype() == "F32" for name, _ in persistent_buffers(model) if name in headers)
            dist.barrier()


@pytest.mark.slow
def test_experts_travel_between_layouts(ranks: RankPool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    types = types_with_experts() if request.config.getoption("--exhaustive") else EXPERTS
    trained = [name for name in types if not training_problems(tiny_config(name))]
    assert set(trained) >= set(EXPERTS)
    for model_type in trained:
        any_tiny_model(model_type).save_pretrained(tmp_path / model_type, max_shard_size="200KB")
    ranks.run(experts_travel, 4, trained, tmp_path)
    for model_type in trained:
        theirs, ours = (read_headers(tmp_path / f"{model_type}{suffix}") for suffix in ("", "-saved"))
        assert theirs.keys() == ours.keys(), model_type


@pytest.mark.parametrize(("joined", "said"), [(torch.cat, "that cat makes"), (lambda x: x[0].reshape(-1), "reshape")])
def test_files_of_other_than_parts_are_refused(
    monkeypatch: pytest.MonkeyPatch, joined: Callable[..., Any], said: str
) -> None:
    monkeypatch.setattr(
        core_model_loading, "revert_weight_conversion", lambda _, parts: {"all": joined([*parts.values()])}
    )
    with pytest.raises(ValueError, match=f"files hold .*{said}"):
        disk.disk_layout(empty_model(config_of("llama")), {"first": (2, 3), "second": (2, 3)})


def test_versions_that_squeeze_every_dim_have_the_same_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers before 5.20 squeezes what it splits without naming the dim."""
    model = empty_model(config_of("mixtral"))
    shapes = {name: tensor.shape for name, tensor in stored_tensors(model).items()}
    named, squeeze = disk_layout(model, shapes), disk._Part.squeeze
    monkeypatch.setattr(disk._Part, "squeeze", lambda part, *_: squeeze(part))
    assert disk_layout(model, shapes) == named
    with pytest.raises(ValueError, match="without its dims of size 1"):
        disk_layout(model, {name: (*shape[:-1], 1) for name, shape in shapes.items()})


# Import


@pytest.mark.slow
def test_checkpoint_variants_load(tmp_path: Path) -> None:
    """bfloat16, experts in their in-memory layout, a tied head saved twice, and buffers as in old files."""
    transformers_model("mixtral").to(torch.bfloat16).save_pretrained(tmp_path / "merged", save_original_format=False)
    assert any("gate_up_proj" in name for name in read_headers(tmp_path / "merged"))
    ours = drawn_model(config_of("mixtral"))
    load_weights(ours, tmp_path / "merged")
    assert_equal(ours, AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))

    tied = transformers_model("qwen3")
    tied.save_pretrained(tmp_path / "tied")
    embedding, buffer = "model.embed_tokens.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
    model = drawn_model(config_of("qwen3"))
    edits: list[Callable[[dict[str, Tensor]], dict[str, Tensor]]] = [
        lambda tensors: tensors | {"lm_head.weight": tensors[embedding].clone()},
        lambda tensors: tensors | {buffer: torch.ones(4)},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != embedding},
    ]
    for edit in edits:
        change(tmp_path / "tied", edit)
        initialise(model, 1)
        load_weights(model, tmp_path / "tied")
        assert_equal(model, tied)


def test_files_with_other_names_than_the_model_load(tmp_path: Path) -> None:
    """Nemotron-H's begin with "backbone", and a base model's, such as GPT-2's release, with nothing."""
    whole, base = any_tiny_model("nemotron_h"), any_tiny_model("gpt2")
    whole.save_pretrained(tmp_path / "nemotron_h")
    base.base_model.save_pretrained(tmp_path / "gpt2")
    for theirs, some in ((whole, "backbone.embeddings.weight"), (base, "wte.weight")):
        folder = tmp_path / theirs.config.model_type
        assert some in read_headers(folder)
        ours = empty_model(theirs.config)
        materialise(ours, CPU)
        load_weights(ours, folder)
        assert_equal(ours, theirs)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def test_generation_config_is_loaded_and_saved(tmp_path: Path) -> None:
    theirs = transformers_model("llama")
    theirs.generation_config = GenerationConfig(eos_token_id=[2, 7], do_sample=True, temperature=0.6)
    theirs.save_pretrained(tmp_path / "in")
    model = drawn_model(config_of("llama"))
    load_weights(model, tmp_path / "in")
    weights = dict(model.named_parameters())
    save_weights(weights, tmp_path / "out", config=model.config, generation_config=model.generation_config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert again.eos_token_id == [2, 7] and again.temperature == 0.6


EDITS = [
    (
        lambda t: {k: v for k, v in t.items() if "q_proj" not in k},
        r"missing: model\.layers\.0\.self_attn\.q_proj\.weight, ",
    ),
    (lambda t: t | {"model.layers.9.w": torch.ones(2)}, r"unexpected: model\.layers\.9\.w$"),
    (
        lambda t: t | {"model.norm.weight": torch.ones(33)},
        r"wrong shape: model\.norm\.weight has shape \(33,\), expected \(32,\)",
    ),
    (lambda t: t | {"lm_head.weight": torch.ones(96, 32)}, r"embed_tokens\.weight and lm_head\.weight differ"),
    (lambda t: {k: v for k, v in t.items() if "layers" not in k}, r"missing: .* and 17 more"),
]


@pytest.mark.parametrize(("edit", "said"), EDITS, ids=[said for _, said in EDITS])
@pytest.mark.slow(but=2)
def test_mismatched_checkpoints_raise(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], said: str
) -> None:
    transformers_model("qwen3").save_pretrained(tmp_path)
    change(tmp_path, edit)
    model = drawn_model(config_of("qwen3"))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=said):
        load_weights(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# Layers for predicting further tokens

DRAFTS: dict[str, tuple[str, dict[str, Tensor]]] = {  # of the file, by what tells them from other tensors
    "a number that transformers knows": ("glm4_moe", {"model.layers.46.eh_proj.weight": torch.randn(64, 128)}),
    "the next number": (
        "glm4_moe",
        {"model.layers.4.enorm.weight": torch.randn(64), "model.layers.4.self_attn.q_proj.weight": torch.randn(64, 64)},
    ),
    "a name": (
        "qwen3_next",
        {
            "mtp.fc.weight": torch.randn(64, 128),
            "mtp.layers.0.mlp.gate.weight": torch.randn(8, 64).to(torch.float8_e4m3fn),
            "mtp.scale": torch.tensor(3.0, dtype=torch.bfloat16),
        },
    ),
}


def with_drafts(folder: Path, kind: str) -> PretrainedConfig:
    """Write a tiny model with tensors of layers that transformers does not build; return its configuration."""
    model_type, drafts = DRAFTS[kind]
    model = any_tiny_model(model_type)
    model.save_pretrained(folder)
    change(folder, lambda tensors: tensors | drafts)
    return model.config


def carry(source: Path, target: Path, config: PretrainedConfig) -> list[str]:
    """Load and save on all ranks, to one file and to several; return what is said."""
    model = fully_shard(empty_model(config), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    materialise(model, CPU)
    load_weights(model, source)
    tensors = stored_tensors(model)
    several, one = target / "several", target / "one"
    said = [save_weights(tensors, several, config=config, max_shard_bytes=60_000, source=source)]
    return [*said, save_weights(tensors, one, config=config, dtype=torch.bfloat16, source=source)]


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.slow(full=1)
def test_layers_that_draft_tokens_are_carried_over(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    config, drafts = with_drafts(tmp_path / "in", kind), DRAFTS[kind][1]
    before = load_file(tmp_path / "in" / "model.safetensors")
    for said in [text for of_rank in ranks.run(carry, 2, tmp_path / "in", tmp_path, config) for text in of_rank]:
        layers = {name.split(".")[2] if name.startswith("model") else "mtp" for name in drafts}
        assert said.startswith(f"{len(drafts)} tensors of ") and all(layer in said for layer in layers)
    assert load_file(tmp_path / "one" / "model.safetensors").keys() == before.keys()
    index = json.loads((tmp_path / "several" / INDEX).read_text())
    assert index["weight_map"].keys() == before.keys() and len({*index["weight_map"].values()}) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    for folder in ("one", "several"):
        written: dict[str, Tensor] = {}
        for file in (tmp_path / folder).glob("*.safetensors"):
            written |= load_file(file)
        for name, tensor in before.items():
            exact = name in drafts or folder == "several"
            if exact:
                assert written[name].dtype == tensor.dtype and written[name].equal(tensor), name
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "several"), any_tiny_model(DRAFTS[kind][0]))


def test_layers_that_the_model_should_have_are_no_drafts(tmp_path: Path) -> None:
    """Of a model whose configuration says fewer layers than there are."""
    model = any_tiny_model("glm4_moe")
    model.save_pretrained(tmp_path)
    model.config.num_hidden_layers = 3
    ours = empty_model(model.config)
    materialise(ours, CPU)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.3\."):
        load_weights(ours, tmp_path)


@pytest.mark.slow
def test_an_export_without_its_source_is_refused_where_drafts_may_be_lost(tmp_path: Path) -> None:
    config = with_drafts(tmp_path / "in", "the next number")
    model = drawn_model(config)
    with pytest.raises(ValueError, match=r"exported as they were in .*gone.*put the folder back"):
        save_weights(stored_tensors(model), tmp_path / "out", config=config, source=tmp_path / "gone")
    assert not [*tmp_path.glob("out*")]
    dense = drawn_model(config_of("llama"))
    assert save_weights(stored_tensors(dense), tmp_path / "out", config=dense.config, source=tmp_path / "gone") == ""


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    model = transformers_model("llama")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json cannot be read"):
        load_weights(model, tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    second = sorted(tmp_path.glob("model-00002-*"))[0]
    second.write_bytes(second.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"model-00002-of-0000\d\.safetensors cannot be read as safetensors"):
        load_weights(model, tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-0000\d\.safetensors cannot be read as safetensors"):
        load_weights(model, tmp_path)


# Export


def save_stages(target: Path) -> list[str]:
    """Save two pipeline stages, each with a copy of the tied embedding; then provoke errors on both ranks."""
    whole = drawn_model(config_of("qwen3"))
    last = ("model.layers.1.", "model.norm.", "lm_head.")
    rank = dist.get_rank()
    mine = {
        name: parameter
        for name, parameter in whole.named_parameters(remove_duplicate=False)
        if name.startswith(last) == (rank == 1)
    }
    save_weights(mine, target, config=whole.config, max_shard_bytes=40_000)
    assert_equal(AutoModelForCausalLM.from_pretrained(target), whole)
    messages = []
    for weights_, folder in [
        ({name: p for name, p in mine.items() if "layers.1.mlp" not in name}, target),
        (mine | {"odd": torch.ones(3), "model.norm.weight": torch.ones(31)}, target),
        (mine, target.parent / "occupied"),
    ]:
        with pytest.raises(ValueError) as error:
            save_weights(weights_, folder, config=whole.config)
        messages.append(str(error.value))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(export, "save_file", no_space)
        with pytest.raises(WriteFailed) as failed:
            save_weights(mine, target, config=whole.config, max_shard_bytes=40_000)
    assert_equal(AutoModelForCausalLM.from_pretrained(target), whole)
    with pytest.raises(WriteFailed) as beside:
        save_weights(mine, target, config=whole.config, beside=no_space_for_a_tokenizer)
    assert_equal(AutoModelForCausalLM.from_pretrained(target), whole)
    return [*messages, str(beside.value), str(failed.value)]


def no_space_for_a_tokenizer(folder: Path) -> None:
    raise Exception("No space left on device (os error 28)")  # as the package tokenizers raises it


def no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_pipeline_stages_save_or_fail_together(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.tex").touch()
    transformers_model("llama").save_pretrained(tmp_path / "target")  # a model that lay there is replaced
    first, second = ranks.run(save_stages, 2, tmp_path / "target")
    assert first == second
    missing, wrong, occupied, beside, failed = first
    assert f"rank 0: {tmp_path / 'target.partial'}: No space left on device (os error 28)" in beside
    assert "ranks hold only 0 of the 2048 elements of model.layers.1.mlp.gate_proj.weight" in missing
    assert "odd is not a parameter of the configured qwen3 model" in wrong
    assert "model.norm.weight is (31,) torch.float32, but must be (32,) of one dtype" in wrong
    assert "occupied contains files other than a model" in occupied
    assert "the directory is unchanged: rank 1: " in failed and "No space left on device" in failed
    assert (tmp_path / "occupied" / "thesis.tex").exists()


def test_single_file_model_has_no_index(tmp_path: Path) -> None:
    model = drawn_model(config_of("llama"))
    save_weights(dict(model.named_parameters()), tmp_path / "model", config=model.config)
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == names


@pytest.mark.slow
def test_stages_write_their_own_layers() -> None:
    """With eight ranks in two stages, a file's writer holds some of it, unless it spans both stages."""
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 8})
    whole = empty_model(config)
    holders: list[dict[str, Held]] = [{} for _ in range(8)]
    for name, parameter in whole.named_parameters():
        stage = int(not name.startswith(("model.embed", *(f"model.layers.{n}." for n in range(4)))))
        rows, *rest = parameter.shape
        for rank in range(4):
            box = Box((rank * rows // 4, *[0] * len(rest)), (rows // 4, *rest))
            holders[4 * stage + rank][name] = Held(box, tuple(parameter.shape), torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    assert part_violations(shapes, holders, shapes, "the model") == []
    tensors = [tensor for parts in disk_layout(whole, shapes).values() for tensor in parts]
    rounds = plan_tensors(tensors, holders, 30_000, file_names)
    assert all(len({file.writer for file in files}) == len(files) for files in rounds)
    files = [file for files in rounds for file in files]
    assert len({file.name for file in files}) == len(files) > 8
    foreign = [file for file in files if file.writer not in file.tensors[0].sources]
    assert len(foreign) <= 1
    for file in files:
        assert sum(assembly.tensor.box.numel for assembly in file.tensors) * 4 <= 30_000
        for assembly in file.tensors:
            assert sum(box.numel for box in assembly.sources.values()) == assembly.tensor.box.numel
