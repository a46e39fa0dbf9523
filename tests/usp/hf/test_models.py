"""Presets, local checkpoint directories, and checkpoints for transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MambaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from tests.harness.pages import blocks
from tests.usp.tiny import drawn_model
from usp.hf.experts import has_balancing_loss
from usp.hf.export import save_weights
from usp.hf.models import context_length, load_model_config, model_facts, scalar_config, with_layers
from usp.hf.shrink import shrink
from usp.hf.tensor_parallel import model_shape
from usp.hf.weights import load_weights
from usp.model.facts import FAMILIES, ModelFacts
from usp.presets import PRESETS

TINY = [name for name in PRESETS if "tiny" in name]


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("llama2-7b", 6.738),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        ("llama3-405b", 405.853),
        ("qwen2-7b", 7.616),
        ("qwen2.5-32b", 32.764),
        ("qwen2.5-72b", 72.706),
        ("qwen3-8b", 8.191),
        ("qwen3-14b", 14.768),
        ("qwen3-32b", 32.762),
        ("mistral-7b", 7.242),
        ("mistral-small", 23.572),
        ("mixtral-8x7b", 46.703),
        ("mixtral-8x22b", 140.621),
        ("qwen3-30b-a3b", 30.532),
        ("qwen3-235b-a22b", 235.094),
        ("deepseek-v3", 671.026),
        ("kimi-k2", 1026.408),
        ("glm-4.5-air", 106.852),
        ("gpt-oss-20b", 20.915),
        ("gpt-oss-120b", 116.829),
    ],
)
@pytest.mark.slow(but=3)
def test_presets_have_the_published_parameter_count(preset: str, billions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_model_config(preset))
    assert round(model.num_parameters() / 1e9, 3) == billions


@pytest.mark.slow
def test_facts_are_read_from_the_configuration() -> None:
    tiny = ModelFacts("tiny", 8, 4, 16, 384, (0, 0), intermediate_size=352, model_type="llama")
    assert model_facts("tiny", load_model_config("tiny")) == tiny
    assert model_facts("m", load_model_config("mistral-tiny")).windows == (1024, 1024)
    for kind, size in ((MixtralConfig(intermediate_size=5), 0), (Qwen3MoeConfig(mlp_only_layers=[0]), 6144)):
        assert model_facts("m", kind).intermediate_size == size
    latent = model_facts("m", DeepseekV3Config(qk_nope_head_dim=20, qk_rope_head_dim=4, v_head_dim=16))
    assert (latent.head_dim, latent.value_dim) == (24, 16) and tiny.value_dim == tiny.head_dim


def test_each_layer_has_its_own_window() -> None:
    config = load_model_config("qwen3-tiny")
    config.sliding_window = 64
    config.layer_types = ["full_attention", "sliding_attention"]
    assert model_facts("m", config).windows == (0, 64)


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.slow(but=3)
def test_a_saved_model_loads_in_transformers(tmp_path: Path, preset: str) -> None:
    model = drawn_model(load_model_config(preset))
    save_weights(dict(model.named_parameters()), tmp_path, config=model.config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


KNOWN: dict[str, PretrainedConfig] = {
    **{name: with_layers(load_model_config(name), 2) for name in PRESETS if PRESETS[name].model_type in FAMILIES},
    "biases": AutoConfig.for_model("llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True),
    "biases beside head norms": AutoConfig.for_model("qwen3", num_hidden_layers=2, attention_bias=True),
    "a bias that the family ignores": AutoConfig.for_model("mistral", num_hidden_layers=2, attention_bias=True),
    "tied": AutoConfig.for_model("qwen2", num_hidden_layers=2, tie_word_embeddings=True),
    "a scalar head": scalar_config(with_layers(load_model_config("tiny"), 2)),
    "dense layers by number": AutoConfig.for_model("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[1]),
    "dense layers by step": AutoConfig.for_model("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_balancing_losses_are_those_of_the_model(name: str) -> None:
    config = KNOWN[name]
    assert config.model_type in FAMILIES
    assert model_facts(name, config).balancing_loss == has_balancing_loss(config)


def test_weights_load_from_a_directory(tmp_path: Path) -> None:
    model = drawn_model(load_model_config("tiny"), 3)
    save_weights(dict(model.named_parameters()), tmp_path, config=model.config)
    again = drawn_model(load_model_config(str(tmp_path)), 4)
    load_weights(again, tmp_path)
    assert torch.equal(again.get_output_embeddings().weight, model.get_output_embeddings().weight)
    assert next(again.parameters()).dtype == torch.float32


def test_tied_embeddings_are_saved_once_and_counted_as_matmul(tmp_path: Path) -> None:
    config = load_model_config("tiny")
    untied = model_shape(model_facts("tiny", config), config).matmul_parameters
    config.tie_word_embeddings = True
    model = drawn_model(config)
    assert model_shape(model_facts("tiny", config), config).matmul_parameters == untied
    save_weights(dict(model.named_parameters()), tmp_path, config=model.config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_an_unknown_model_names_the_presets() -> None:
    with pytest.raises(
        ValueError, match=r"neither a preset \(did you mean 'llama3-8b'\?\) nor a directory: use one of tiny"
    ):
        load_model_config("llama3-8")


def test_directories_without_a_causal_model_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read its config\.json"):
        load_model_config(str(tmp_path))
    load_model_config("tiny").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no \.safetensors weights"):
        load_model_config(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"bert"', '"clip"'))
    with pytest.raises(ValueError, match=r"model_type='clip', which is not trained: transformers has no causal"):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "changed", "said"),
    [
        ("llama", {"hidden_size": "64"}, r"cannot read its config\.json: .*'hidden_size' expected int, got str"),
        ("llama", {"num_attention_heads": 0}, "describes no model: num_attention_heads=0 must be from 1 to"),
        ("llama", {"vocab_size": 10**9}, "describes no model: vocab_size=1000000000 must be from 1 to"),
        ("llama", {"num_hidden_layers": 10**6}, "describes no model: num_hidden_layers=1000000 must be from 1 to"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ("llama", {"hidden_act": "nope"}, "the model of its config.json cannot be built: 'nope'"),
        ("gpt2", {"n_layer": 10**6}, "describes no model: n_layer=1000000 must be from 1 to"),
        ("gpt2", {"n_head": 0}, "describes no model: n_head=0 must be from 1 to"),
        ("gpt2", {"n_embd": 7}, "cannot be built: `embed_dim` must be divisible by num_heads"),
    ],
)
def test_configurations_of_no_model_are_refused_before_one_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, changed: dict[str, Any], said: str
) -> None:
    shrink(AutoConfig.for_model(model_type), layers=2).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    if "built" not in said:
        monkeypatch.setattr("usp.hf.models.empty_model", lambda *_: pytest.fail("it was built"))
    with pytest.raises(ValueError, match=said):
        load_model_config(str(tmp_path))


def test_the_language_model_of_a_multimodal_one_loads(tmp_path: Path) -> None:
    whole = Gemma3ForConditionalGeneration(shrink(Gemma3Config(), layers=2))
    whole.model.language_model.save_pretrained(tmp_path)
    text = drawn_model(load_model_config(str(tmp_path)))
    load_weights(text, tmp_path)
    theirs = whole.model.language_model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in text.model.state_dict().items())
    assert torch.equal(text.lm_head.weight, whole.lm_head.weight)


@pytest.mark.slow
def test_a_text_model_with_its_own_head_is_written_as_documented(tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_config(shrink(AutoConfig.for_model("qwen3_5"), layers=4))
    page = Path(__file__).parents[3] / "docs" / "models.md"
    code = next(block.text for block in blocks(page) if block.language == "python")
    exec(code, {"AutoModelForCausalLM": AutoModelForCausalLM, "model": model, "folder": tmp_path})
    text = drawn_model(load_model_config(str(tmp_path)))
    load_weights(text, tmp_path)
    assert torch.equal(text.lm_head.weight, model.lm_head.weight)


def test_quantized_checkpoints_raise(tmp_path: Path) -> None:
    config = load_model_config("tiny")
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"is quantized \(quantization_config: fp8\).* call its dequantize\(\)"):
        load_model_config(str(tmp_path))


def test_unreadable_generation_configs_raise(tmp_path: Path) -> None:
    load_model_config("tiny").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    file = tmp_path / "generation_config.json"
    for text in ('{"temperature": 0.9, "top_p": 0.6, "do_sample": true}', '{"temperature": 0.9, "top_p": 0.6}'):
        file.write_text(text)  # the second is of a kind that was published with well-known models
        load_model_config(str(tmp_path))
    for text in ("{", "[1]"):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"{file}: transformers cannot read it, correct or remove it: \S"):
            load_model_config(str(tmp_path))


def test_checkpoint_code_is_never_executed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}')
    with pytest.raises(ValueError, match="transformers cannot read"):
        load_model_config(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_context_without_positions_has_no_end() -> None:
    assert context_length(load_model_config("llama3-8b")) == 8192
    assert context_length(MambaConfig(num_hidden_layers=1)) == sys.maxsize
