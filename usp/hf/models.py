"""Causal language models by a preset's name or a local checkpoint folder: their configuration, facts, and empty model.

Nothing is ever downloaded and no code out of a checkpoint is ever run: a model is a preset's name or a folder on
this machine, its class is one that transformers ships, and its weights are safetensors.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from usp.config import nearest
from usp.costs import ModelFacts
from usp.hf.experts import expert_modules
from usp.hf.integrate import FAMILIES
from usp.presets import PRESETS

ModelConfig: TypeAlias = PretrainedConfig


def hide_progress_bars() -> None:
    """Keep transformers from drawing a bar for every load and save in this process."""
    logging.disable_progress_bar()


def load_model_config(model: str) -> PretrainedConfig:
    """The transformers configuration of a preset or of a local checkpoint folder.

    Raises ValueError when `model` is neither, and for a folder whose model type or weights cannot be used.
    """
    if model in PRESETS:
        return AutoConfig.for_model(PRESETS[model].model_type, **PRESETS[model].options)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"model={model} is no preset{nearest(model, PRESETS)} and no folder: give one of {', '.join(PRESETS)}, "
            f"or a folder that transformers' save_pretrained wrote"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"model={model} holds no config.json: give a folder that transformers' save_pretrained wrote")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"model={model}: transformers cannot read its config.json: {error}") from error
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"model={model} holds no .safetensors weights; other formats can run code, and are not read")
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model={model} is of type {config.model_type!r}, and the types that can be trained with their sequence "
            f"split are {', '.join(FAMILIES)}"
        )
    return config


def model_facts(model: str, config: PretrainedConfig) -> ModelFacts:
    """The numbers of `config` that checks and FLOPs need."""
    heads = config.num_attention_heads
    window = getattr(config, "sliding_window", None) or 0
    default_kind = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default_kind] * config.num_hidden_layers
    return ModelFacts(
        name=model,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        intermediate_size=config.intermediate_size,
        num_experts=getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0,
        tied=bool(config.tie_word_embeddings),
    )


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The whole model in float32 on the meta device, with a configuration of its own."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give an empty model, or a stage of it, memory without values. What modules share stays shared.

    `to_empty` alone would leave tied parameters two.
    """
    kept = kept_names(model)
    model.to_empty(device=device)
    for name, first in kept.items():
        if name != first:
            prefix, _, last = name.rpartition(".")
            model.get_submodule(prefix)._parameters[last] = model.get_parameter(first)


def kept_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the name it is kept under: its own, or for tied ones that of the first."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def matmul_parameters(model: PreTrainedModel) -> int:
    """How many weights multiply a token: all but the input embedding, a tied output head included.

    Of a layer's experts, as many as a token chooses.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    for experts in expert_modules(model):
        total -= _idle_weights(experts, model.config)
    embedding = sum(parameter.numel() for parameter in model.get_input_embeddings().parameters())
    return total if model.config.tie_word_embeddings else total - embedding


def _idle_weights(experts: nn.Module, config: PretrainedConfig) -> int:
    weights = sum(parameter.numel() for parameter in experts.parameters())
    return weights // config.num_experts * (config.num_experts - config.num_experts_per_tok)
