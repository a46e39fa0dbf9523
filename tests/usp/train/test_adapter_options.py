"""Modules that are trained in full beside adapters: on every layout as peft in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from transformers import PreTrainedModel

from tests.harness.ranks import RankPool
from tests.usp.tiny import FEW_STEPS, drawn_model, tiny_model, train_alone
from tests.usp.train.test_lora import (
    ALL,
    ALPHA,
    ATTENTION,
    RANK,
    RUN,
    adapter_of,
    add_adapters,
    config_of,
    load,
    run,
    steps_of,
)
from tests.usp.train.test_matrix import train
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.lora import adapter_parameters, initialise_adapters
from usp.hf.models import load_model_config
from usp.predict.meter import OPTIMIZER
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.checkpoints import CHECKPOINTS
from usp.train.dry_run import dry_run
from usp.train.prepare import prepare

ENDS = "embed_tokens,lm_head"
# Family, the linears with adapters, modules to save, and flags.
LAYOUTS: dict[str, tuple[str, tuple[str, ...], str, dict[str, Any]]] = {
    "dp2 r2, zero 3": ("llama", ALL, ENDS, {"sp_ring": 2, "micro_batches": 2, "ac": "attention-saved"}),
    "tp2 u2, zero 1": (
        "llama",
        ALL,
        ENDS,
        {"tp": 2, "sp_ulysses": 2, "zero": 1, "micro_batches": 2, "ac": "selective"},
    ),
    "tp2 r2, tokens shared": (
        "qwen3",
        ALL,
        "norm",
        {"tp": 2, "tp_sequence_parallel": True, "sp_ring": 2, "ac": "full"},
    ),
    "pp2 tp2, zero 2, tied": (
        "llama-tied",
        ALL,
        ENDS,
        {"pp": 2, "tp": 2, "zero": 2, "micro_batches": 2, "ac": "full"},
    ),
    "pp2 r2, zero bubble": (
        "llama-deep",
        ("q_proj", "down_proj"),
        ENDS,
        {"pp": 2, "pp_schedule": "zero-bubble", "sp_ring": 2, "zero": 1, "micro_batches": 4},
    ),
    "dp2 u2, zero 3, tied": ("llama-tied", ALL, ENDS, {"sp_ulysses": 2}),
    "ep2 u2 r2": (
        "mixtral",
        ATTENTION,
        "lm_head",
        {"ep": 2, "sp_ulysses": 2, "sp_ring": 2, "sp_layout": "auto"},
    ),
}


def change(model: PreTrainedModel, targets: tuple[str, ...], saved: str) -> None:
    """Add adapters and modules to save as peft does."""
    tied = model.config.tie_word_embeddings  # peft would train two copies of what is tied
    modules = None if tied else saved.split(",")
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(targets), modules_to_save=modules)
    inject_adapter_in_model(settings, model)
    initialise_adapters(model, seed=0)
    if tied:
        model.get_input_embeddings().weight.requires_grad_(True)


EXHAUSTIVE = ("pp2 r2, zero bubble", "tp2 r2, tokens shared", "dp2 r2, zero 3", "tp2 u2, zero 1")


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[Any, Any]:
    """For each model and what is trained of it a folder, and (loss, gradient norm) of each step of peft alone."""
    found = {}
    for case in {layout[:3] for name, layout in LAYOUTS.items() if exhaustive or name not in EXHAUSTIVE}:
        folder = tmp_path_factory.mktemp(case[0])
        tiny_model(case[0]).save_pretrained(folder)
        changed = partial(change, targets=case[1], saved=case[2])
        found[case] = folder, ranks.run(train_alone, 1, case[0], FEW_STEPS, 0.0, 1, changed)[0]
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ()) for name in LAYOUTS]
)
@pytest.mark.slow
def test_steps_are_those_of_peft_in_one_process(ranks: RankPool, alone: dict[Any, Any], name: str) -> None:
    family, targets, saved, flags = LAYOUTS[name]
    folder, wanted = alone[family, targets, saved]
    config = replace(config_of(folder, targets, **flags), lora_modules_to_save=saved)
    histories = ranks.run(train, 4, config, FEW_STEPS)
    difference = (torch.tensor(histories, dtype=torch.float64) / torch.tensor(wanted, dtype=torch.float64) - 1).abs()
    assert difference.max() <= 1e-5, difference.amax(dim=0)


# Runs of train.py, the second of a tied model

OPTIONS: dict[str, Any] = {"lora_modules_to_save": ENDS, "lora_merge": True}


def options_of(base: Path) -> TrainConfig:
    return replace(RUN, **OPTIONS, model=str(base))


@pytest.fixture(scope="module", params=[pytest.param("untied", marks=pytest.mark.exhaustive), "tied"])
def whole(ranks: RankPool, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped, beside its base model."""
    folder = tmp_path_factory.mktemp("run")
    config = load_model_config("qwen3-tiny")
    config.tie_word_embeddings = request.param == "tied"
    save_weights(dict(drawn_model(config).named_parameters()), folder / "base", config=config)
    ranks.run(run, 2, replace(options_of(folder / "base"), output=str(folder / "whole"), sp_ulysses=2))
    return folder / "whole"


@pytest.mark.exhaustive  # of plain adapters: test_lora.py
def test_a_run_continues_on_another_layout_and_its_folder_is_that_of_peft(
    ranks: RankPool, whole: Path, tmp_path: Path, exhaustive: bool
) -> None:
    checkpoint, base = str(whole / CHECKPOINTS / "step-00000002"), whole.parent / "base"
    resumed = replace(options_of(base), output=str(tmp_path / "on"), resume=checkpoint)
    tp = 2 if exhaustive else 1  # with pp, steps above
    ranks.run(run, 2 * tp, replace(resumed, pp=2, tp=tp, micro_batches=2))
    assert (steps_of(tmp_path / "on") / steps_of(whole)[2:] - 1).abs().max() <= 1e-5
    written = adapter_of(whole)
    for name, tensor in adapter_of(tmp_path / "on").items():
        torch.testing.assert_close(tensor, written[name], rtol=1e-4, atol=1e-6)

    settings = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ENDS.split(",")
    ids = torch.arange(40).unsqueeze(0)
    adapted = PeftModel.from_pretrained(load(base), whole / "adapter")
    trained = {
        name.removeprefix("base_model.model."): p for name, p in adapted.named_parameters() if "modules_to" in name
    }
    assert len(trained) == 2
    for name, parameter in trained.items():
        stored = load(base).get_parameter(name.replace(".modules_to_save.default", ""))
        assert (parameter - stored).abs().max() > 1e-3
    torch.testing.assert_close(load(whole / "model")(ids).logits, adapted(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_a_dry_run_has_the_optimizer_states_of_all_that_is_trained() -> None:
    options = OPTIONS | {"model": "tiny", "dtype": "float32", "batch_size": 1, "seq_len": 64}
    found = dry_run(replace(RUN, **options), 4)
    model = drawn_model(load_model_config("tiny"))
    sizes = [p.numel() for name, p in model.named_parameters() if "embed" in name or "head" in name]
    add_adapters(model, ALL, RUN.lora_rank)
    sizes += [p.numel() for _, p in adapter_parameters(model)]
    assert found.by_category[OPTIMIZER] == sum(sizes) * 8 // 4 + len(sizes) * 4  # and a step count for each


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lora_modules_to_save": "embedding"},
            "--lora-modules-to-save embedding: qwen3 has no parameters in 'embedding'",
        ),
        ({"lora_modules_to_save": "mlp"}, "mlp has adapters or experts in it"),
        (
            {"lora_modules_to_save": "lm_head", "resume": "step"},
            r"--lora-modules-to-save = lm_head \(checkpoint: embed_",
        ),
    ],
)
@pytest.mark.slow(but=1)
def test_what_cannot_be_trained_is_refused(whole: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    if "resume" in changes:
        changes = changes | {"resume": str(whole / CHECKPOINTS / "step-00000004"), "steps": 8}
    config = options_of(whole.parent / "base")
    tied = json.loads((whole.parent / "base" / "config.json").read_text())["tie_word_embeddings"]
    if tied and changes.get("lora_modules_to_save") == "lm_head":
        said = "model.embed_tokens.weight is the same parameter as one of these: name its module, too"
    asked = replace(config, **{"output": str(tmp_path)} | changes)
    with pytest.raises(ConfigurationError, match=said):
        prepare(asked, Launch())
