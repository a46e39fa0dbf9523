"""The parts by which a model is divided are found by what they are, whatever their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import tiny_config, tiny_model
from tests.usp.train.families.test_families import MESHES, PAIRS, plain_steps, steps
from usp.hf.models import empty_model
from usp.hf.prune import ModelParts, model_parts, prune_to_stage

PARTS = {
    "llama": ModelParts("embed_tokens", (), "layers", "norm", "lm_head"),
    "gpt2": ModelParts("wte", ("wpe",), "h", "ln_f", "lm_head"),
    "biogpt": ModelParts("embed_tokens", ("embed_positions",), "layers", "layer_norm", "output_projection"),
    "phi": ModelParts("embed_tokens", (), "layers", "final_layernorm", "lm_head"),
    "gpt_neox": ModelParts("embed_in", (), "layers", "final_layer_norm", "lm_head"),
    "lfm2": ModelParts("embed_tokens", (), "layers", "embedding_norm", "lm_head"),
    "nemotron_h": ModelParts("embeddings", (), "layers", "norm_f", "lm_head"),
}
# learned positions and a tied head; a bias in the head, with and without tp
TRAINED = {"gpt2": ["pp2"], "phi": ["pp2", "tp2"]}
MORE = ["biogpt", "lfm2", "persimmon", "gpt_bigcode", "moshi", "gemma3_text", "minicpm3"]


@pytest.mark.parametrize("model_type", PARTS)
def test_parts_are_found_and_kept_by_stages(model_type: str) -> None:
    model = empty_model(tiny_config(model_type))
    assert model_parts(model) == PARTS[model_type]
    prune_to_stage(model, range(1), first=True, last=False)
    assert model_parts(model) == PARTS[model_type]


def test_a_model_without_them_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks an embedding of ids, a list of layers, .* an output head, by which"):
        model_parts(empty_model(tiny_config("bert")))


@pytest.mark.slow
def test_steps_are_those_of_plain_transformers(ranks: RankPool, tmp_path: Path, exhaustive: bool) -> None:
    wrong = {}
    more = {model_type: [*MESHES] for model_type in MORE} if exhaustive else {}
    for model_type, meshes in (TRAINED | more).items():
        folder = tmp_path / model_type
        tiny_model(model_type).save_pretrained(folder)
        expected = torch.tensor(plain_steps(model_type), dtype=torch.float64)
        for mesh in meshes:
            found = ranks.run(steps, 2 if mesh in PAIRS else 4, str(folder), (MESHES | PAIRS)[mesh])
            if isinstance(found[0], str):
                assert "tp" in mesh and model_type in MORE, found[0]
                continue
            difference = (torch.tensor(found, dtype=torch.float64) / expected - 1).abs().max().item()
            if not difference <= 1e-5:
                wrong[model_type, mesh] = difference
    assert not wrong
