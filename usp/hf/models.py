"""Causal language models by a preset's name or a local checkpoint folder: their configuration, facts, and empty model.

With a scalar head, a number per token in place of the vocabulary (critics, reward models), a model is transformers'
<Family>ForSequenceClassification with one label, and its configuration's `architectures` say so.

Nothing is ever downloaded and no code out of a checkpoint is ever run: a model is a preset's name or a folder on
this machine, its class is one that transformers ships, and its weights are safetensors.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal, TypeAlias, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from usp.hf.integrate import FAMILIES
from usp.model.facts import ModelFacts
from usp.presets import PRESETS
from usp.run.failures import nearest

ModelConfig: TypeAlias = PretrainedConfig
ModelHead: TypeAlias = Literal["lm", "scalar"]
_SCALAR = "ForSequenceClassification"


def hide_progress_bars() -> None:
    """Keep transformers from drawing a bar for every load and save in this process."""
    logging.disable_progress_bar()


def load_model_config(model: str, head: ModelHead = "lm", new_head: bool = False) -> PretrainedConfig:
    """The transformers configuration of a preset or of a local checkpoint folder, with the head that is asked for.

    new_head: give a folder's causal LM a scalar head, which `load_weights` draws; else the folder must have one.

    Raises ValueError when `model` is neither, for a folder whose model type or weights cannot be used, for one with
    another head, and for a causal LM's whose generation configuration cannot be read.
    """
    if model in PRESETS:
        config = AutoConfig.for_model(PRESETS[model].model_type, **PRESETS[model].options)
        return config if head == "lm" else scalar_config(config)
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
    if head == "lm":
        load_generation_config(folder)
    return _with_head(model, config, head, new_head)


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """How a folder's model generates; None where it has no generation_config.json.

    Raises ValueError for one that cannot be read. Published ones that transformers warns of are taken as they are.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{file} must be corrected or removed, transformers cannot read it: {error}") from error


def _with_head(model: str, config: PretrainedConfig, head: ModelHead, new_head: bool) -> PretrainedConfig:
    if is_scalar(config) and (head == "lm" or new_head):
        raise ValueError(f"model={model} has a scalar head, which is no next-token model's: give a causal LM's folder")
    if is_scalar(config) and config.num_labels != 1:
        raise ValueError(f"model={model} gives num_labels={config.num_labels} numbers for each token, and must give 1")
    if head == "scalar" and not is_scalar(config):
        if not new_head:
            raise ValueError(
                f"model={model} is a causal LM without a scalar head: ask for a new head, or give the folder of a "
                f"model that has one"
            )
        return scalar_config(config)
    return config


def is_scalar(config: PretrainedConfig) -> bool:
    """Whether the model that `config` describes has a scalar head."""
    return any(name.endswith(_SCALAR) for name in config.architectures or ())


def scalar_config(config: PretrainedConfig) -> PretrainedConfig:
    """The same model with a scalar head in place of a causal LM's."""
    config = copy.deepcopy(config)
    config.architectures = [cast(type, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]).__name__]
    config.num_labels = 1
    return config


def causal_config(config: PretrainedConfig) -> PretrainedConfig:
    """The same model with a causal LM's head."""
    config = copy.deepcopy(config)
    config.architectures = None
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
        dense_mlps=_has_dense_mlps(config),
        num_experts=getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0,
        router_jitter=getattr(config, "router_jitter_noise", None) or 0.0,
        tied=_ties_head(config),
    )


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The whole model in float32 on the meta device, with a configuration of its own."""
    kind = AutoModelForSequenceClassification if is_scalar(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(copy.deepcopy(config), dtype=torch.float32)


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


def _ties_head(config: PretrainedConfig) -> bool:
    return bool(config.tie_word_embeddings) and not is_scalar(config)


def _has_dense_mlps(config: PretrainedConfig) -> bool:
    """Return whether some layer has an MLP of `intermediate_size` rather than experts."""
    if not getattr(config, "num_experts", None) and not getattr(config, "num_local_experts", None):
        return True
    return bool(getattr(config, "mlp_only_layers", None)) or getattr(config, "decoder_sparse_step", 1) > 1
