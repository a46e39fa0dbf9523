"""Causal language models from a preset or a local checkpoint directory: configuration, facts, and empty model.

A model with a scalar head (critic, reward model), which outputs one value per token, is transformers'
<Family>ForSequenceClassification with one label, as named by `architectures` in its configuration.

Nothing is downloaded and no code from a checkpoint is executed: a model is a preset or a local directory, its class is
one that transformers ships, and its weights are safetensors."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
import transformers  # its models, which take seconds to import, are attributes, imported on first use
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils import logging

from usp.model.facts import FAMILIES, NO_ATTENTION, ModelFacts
from usp.parallel import option
from usp.presets import PRESETS
from usp.run.failures import nearest

from .disk import disk_layout, kept_names
from .experts import expert_problems, has_balancing_loss
from .images import sees_images
from .prune import decoder, model_parts
from .shrink import dropouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .probe import Structure

ModelConfig: TypeAlias = PretrainedConfig
ModelHead: TypeAlias = Literal["lm", "scalar"]
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
INDEXED = ("indexed_attention", "minimax_m3_sparse")  # layer types of attention to the keys that an indexer chooses
COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")  # further keys behind a window
WITHOUT_ATTENTION = ("linear_attention", "conv", "moe", "mlp")  # among the layer types of configurations
SEVERAL_PARTS = (
    "its text model is one of several parts: save that by itself and use it (see docs/models.md); with images, see "
    "docs/guides/vision.md"
)
# More than any model has.
_LARGEST = {"num_hidden_layers": 10**4, "num_attention_heads": 10**5, "num_key_value_heads": 10**5, "head_dim": 10**5}
_LARGEST |= {"hidden_size": 10**6, "intermediate_size": 10**7, "vocab_size": 10**8}
_LARGEST |= dict.fromkeys(_NUM_EXPERTS, 10**5)
_SCALAR = "ForSequenceClassification"
VOCABULARY_MULTIPLE = 64  # of one that grows
LIMIT, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
hide_progress_bars = logging.disable_progress_bar  # transformers', in this process


def context_length(config: ModelConfig) -> int:
    """Return the tokens that a model's positions reach; sys.maxsize if nothing bounds them, as in Mamba."""
    return getattr(config.get_text_config(), LIMIT, None) or sys.maxsize


def load_model_config(
    model: str, head: ModelHead = "lm", new_head: bool = False, weights: bool = True, images: bool = False
) -> PretrainedConfig:
    """Return the transformers configuration of a preset or a local checkpoint directory, with the requested head.

    new_head: replace a causal LM's head by a scalar one, which `load_weights` initializes; if False, a directory must
        already have the requested head.
    weights: whether a directory must have weights as well, not only config.json.
    images: whether it may be a vision-language model of `TRAINED`.

    Raises ValueError if `model` is neither, is quantized, has an unsupported model type, weight format or head, or, for
    a causal LM, an unreadable generation configuration.
    """
    if model in PRESETS:
        config = AutoConfig.for_model(PRESETS[model].model_type, **PRESETS[model].options)
        return config if head == "lm" else scalar_config(config)
    folder, given = Path(model).expanduser(), option("model", model)
    if not folder.is_dir():
        raise ValueError(
            given + f" is neither a preset{nearest(model, PRESETS)} nor a directory: use one of "
            f"{', '.join(PRESETS)}, or a directory written by transformers' save_pretrained"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(given + " has no config.json: use a directory written by transformers' save_pretrained")
    config = read_config(model)
    if quantized := getattr(config, "quantization_config", None):
        raise ValueError(
            given + f" is quantized (quantization_config: {quantized.get('quant_method')}), and its weights would "
            f"be read without their scales: load it with transformers, call its dequantize(), and use what its "
            f"save_pretrained writes"
        )
    if weights and not any(folder.glob("*.safetensors")):
        raise ValueError(given + " has no .safetensors weights; other formats can execute code and are not read")
    try:
        problems = training_problems(config, images)
    except Exception as error:  # of any kind: it is transformers' code that runs
        raise ValueError(given + f": the model of its config.json cannot be built: {_reason(error)}") from error
    if problems:
        refused = "which only train.py takes" if sees_images(config) and not images else "which is not trained"
        raise ValueError(given + f" has model_type={config.model_type!r}, {refused}: {problems}")
    if head == "lm":
        load_generation_config(folder)
    return _with_head(model, config, head, new_head)


def read_config(model: str) -> PretrainedConfig:
    """Return the configuration in the folder `model`. Raises ValueError for one that describes no model, before any is
    built."""
    folder, given = Path(model).expanduser(), option("model", model)
    try:
        violations = list(_size_violations(json.loads((folder / "config.json").read_text()), {}))
        if not violations:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            text = config.get_text_config()
            violations = list(_size_violations(vars(text), text.attribute_map))
    except Exception as error:  # of any kind: of a field of the wrong type, or what transformers computes from it
        raise ValueError(
            given + f": transformers cannot read its config.json: {_reason(error)}: correct it, or use a "
            f"directory written by transformers' save_pretrained"
        ) from error
    if violations:
        raise ValueError(given + f": its config.json describes no model: {'; '.join(violations)}")
    return config


def _reason(error: Exception) -> str:
    paragraph, *_ = str(error).strip().split("\n\n")  # of several, the others say how to get transformers
    return " ".join(paragraph.split()).rstrip(".") or type(error).__name__


def _size_violations(fields: Mapping[str, Any], own_names: Mapping[str, str]) -> Iterator[str]:
    """Yield sizes that no model has. own_names: of fields that a configuration calls otherwise."""
    sizes = {own_names.get(name, name): most for name, most in _LARGEST.items()}
    for name, most in sizes.items():
        size, least = fields.get(name), 0 if name in _NUM_EXPERTS else 1
        if isinstance(size, int) and not least <= size <= most:
            yield f"{name}={size} must be from {least} to {most}"
    heads, kv_heads = (fields.get(own_names.get(name, name)) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        yield f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}"


def training_problems(config: PretrainedConfig, images: bool = False) -> str:
    """Return why the causal LM of `config` cannot be sharded over a sequence and trained in stages; empty if it can.
    images: whether it may have an encoder of images, which is trained as well."""
    if config.model_type in FAMILIES:
        empty_model(with_layers(config, 1), causal=True)
        return ""
    images = images and sees_images(config)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not images:
        return "transformers has no causal language model of this type"
    if config.get_text_config() is not config and not images:
        return SEVERAL_PARTS
    from .probe import structure

    model = empty_model(without_dropout(config), causal=True)
    known = structure(type(model), model.config)
    problems = list(known.problems)
    try:
        parts = model_parts(model)
    except ValueError as error:
        problems.append(str(error))
    else:
        layers = getattr(decoder(model), parts.layers)
        owned = [parameter for layer in layers for parameter in layer.parameters()]
        if len({*owned}) < len(owned):
            problems.append("its layers share parameters, and those of each layer are sharded by themselves")
    try:
        disk_layout(model, {name: tensor.shape for name, tensor in model.state_dict().items()})
    except ValueError as error:
        problems.append(str(error))
    facts, unread = readable_facts(config)
    return "; ".join([*problems, *(expert_problems(model, facts.num_experts) if facts else [unread])])


def readable_facts(config: PretrainedConfig) -> tuple[ModelFacts | None, str]:
    """Return (the facts of a model, ""), or (None, why its configuration does not give them)."""
    try:
        return model_facts("", config), ""
    except Exception as error:  # of any kind: it is transformers' code that runs; its first sentence says what is wrong
        return None, f"its configuration does not give one size for all layers: {str(error).split('. ')[0]}"


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """Load the generation configuration of a checkpoint directory; None if it has no generation_config.json.
    Configurations that transformers only warns about are accepted. Raises ValueError for an unreadable one."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{file}: transformers cannot read it, correct or remove it: {error}") from error


def stop_tokens(model: str, eos: int | None) -> tuple[int, ...]:
    """Return the ids that end a response, ascending: the tokenizer's `eos`, and, as for transformers' `generate`, those
    of the generation_config.json of a model folder, or without that file of its config.json; of a preset `eos` alone.
    Raises ValueError for a file that transformers cannot read."""
    folder, ids = Path(model).expanduser(), None
    if model in PRESETS or not model:
        pass
    elif config := load_generation_config(folder):
        ids = config.eos_token_id
    elif (folder / "config.json").is_file():
        fields = json.loads((folder / "config.json").read_text())
        ids = fields.get("eos_token_id", (fields.get("text_config") or {}).get("eos_token_id"))
    found = {*(ids if isinstance(ids, list | tuple) else [ids]), eos}
    return tuple(sorted(found - {None}))


def _with_head(model: str, config: PretrainedConfig, head: ModelHead, new_head: bool) -> PretrainedConfig:
    given = option("model", model)
    if is_scalar(config) and (head == "lm" or new_head):
        raise ValueError(given + " has a scalar head: use the directory of a causal LM")
    if is_scalar(config) and config.num_labels != 1:
        raise ValueError(given + f" has num_labels={config.num_labels}, but a scalar head must have 1")
    if head == "scalar" and not is_scalar(config):
        if not new_head:
            raise ValueError(given + " is a causal LM without a scalar head: request a new head")
        if violation := scalar_violation(config):
            raise ValueError(given + f" cannot have a scalar head: {violation}")
        return scalar_config(config)
    return config


def is_scalar(config: PretrainedConfig) -> bool:
    """Return whether the model of `config` has a scalar head."""
    return any(name.endswith(_SCALAR) for name in config.architectures or ())


def scalar_violation(config: PretrainedConfig) -> str | None:
    """Return why the model of `config` cannot have a scalar head; None if it can."""
    from transformers.modeling_layers import GenericForSequenceClassification

    kind = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is not None and issubclass(cast(type, kind), GenericForSequenceClassification):
        return None
    return f"transformers has no {_SCALAR} with a linear head for model_type={config.model_type!r}"


def scalar_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the same model with a scalar head instead of a causal LM's."""
    config = copy.deepcopy(config)
    config.architectures = [cast(type, transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]).__name__]
    config.num_labels = 1
    return config


def with_context(config: PretrainedConfig, seq_len: int, scaling: str, pretrained: bool) -> PretrainedConfig:
    """Return the configuration of the same model for sequences of `seq_len` tokens.

    With factor = seq_len / the limit that the model was trained for, and rotary frequencies theta^(-2i/d):

        linear   positions are divided by the factor (position interpolation, arXiv 2306.15595)
        ntk      the base grows to theta * factor^(d / (d - 2)): the lowest frequency is divided by the factor, the
                 highest stays (NTK-aware scaling; arXiv 2309.00071, section 3.1)
        yarn     each frequency by its wavelength, with a temperature for attention (arXiv 2309.00071, section 3.4)

    linear and yarn are transformers' rope types; ntk changes only the base, so it extends a scaled model as well. The
    configuration states what was trained, so an exported model is loaded with it.

    scaling: how rotary positions are scaled beyond the model's limit: none, linear, ntk or yarn.
    pretrained: if False, the weights are random, and a longer context needs no scaling.

    Raises ValueError for a `seq_len` beyond the limit of a pretrained model without a scaling, a scaling that is not
    needed, and one that cannot extend the model's own.
    """
    limit = context_length(config)
    longer, given = seq_len > limit, option("rope_scaling", scaling)
    asked, shorter = option("seq_len", seq_len), option("seq_len", f"{limit} or less")
    if scaling != "none" and not (longer and pretrained):
        fits = asked + f" is within the model's {LIMIT}={limit}" if pretrained else "random weights need none"
        raise ValueError(given + " is not used, because " + fits + ": remove it")
    if not longer:
        return config
    if pretrained and scaling == "none":
        beyond = f" is beyond the model's {LIMIT}={limit}, which its positions were trained for: use "
        extending = option("rope_scaling", "yarn, linear or ntk")
        raise ValueError(asked + beyond + extending + " to extend them, or " + shorter)
    if sees_images(config):
        raise ValueError(given + f" is not supported for {config.model_type}: use " + shorter)
    config = copy.deepcopy(config)
    if pretrained:
        _scale(config, seq_len, limit, scaling)
    setattr(config, LIMIT, seq_len)
    return config


def without_dropout(config: PretrainedConfig, disable: bool = True) -> PretrainedConfig:
    """Return the configuration of the same model without dropout; unless `disable`, raises ValueError for any."""
    found = dict(dropouts(config))
    if found and not disable:
        listed = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(
            f"the {config.model_type} drops activations ({listed}), and ranks would drop others than a single process: "
            f"add --disable-dropout to train without dropout"
        )
    config = copy.deepcopy(config)
    for name in found:
        setattr(config.get_text_config(), name, 0.0)
    return config


def with_vocabulary(config: PretrainedConfig, size: int) -> PretrainedConfig:
    """Return the configuration of the same model with rows for ids below `size`: if it lacks some, so many that tp up
    to VOCABULARY_MULTIPLE can divide them."""
    if size <= config.get_text_config().vocab_size:
        return config
    if sees_images(config) or hasattr(config, "vocab_size_per_layer_input"):
        raise ValueError(f"the vocabulary of {config.model_type} does not grow, and lacks rows for these tokens")
    config = copy.deepcopy(config)
    config.vocab_size = -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return config


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return the configuration of the same model with so many layers; any beyond its own are like its last."""
    config = copy.deepcopy(config)
    depth, config.num_hidden_layers = config.num_hidden_layers, layers
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [*kinds, *[kinds[-1]] * (layers - depth)][:layers]
    return config


def _scale(config: PretrainedConfig, seq_len: int, limit: int, scaling: str) -> None:
    given, shorter = option("rope_scaling", scaling), option("seq_len", f"{limit} or less")
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        raise ValueError(given + ": the model has no rotary positions; use " + shorter)
    rope = rope.get("full_attention", rope)
    present = rope.get("rope_type", "default")
    if scaling == "ntk":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        rope["rope_theta"] *= (seq_len / limit) ** (dim / (dim - 2))
        return
    if present not in ("default", scaling):
        extends = f" cannot extend the rope_type={present!r} that the model has already: use "
        base = option("rope_scaling", "ntk") + ", which changes only the base, or "
        raise ValueError(given + extends + base + shorter)
    changed: dict[str, Any] = {"rope_type": scaling, "factor": seq_len / limit * rope.get("factor", 1.0)}
    if scaling == "yarn":
        original = rope.get(ORIGINAL, limit)
        changed |= {"factor": seq_len / original, ORIGINAL: original}
    rope.update(changed)


def model_facts(model: str, config: PretrainedConfig) -> ModelFacts:
    """Read the facts of the model named `model` from its configuration; of a vision-language one, those of its text."""
    whole, config = config, config.get_text_config() if sees_images(config) else config
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    window = getattr(config, "sliding_window", None) or 0
    default_kind = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [default_kind] * config.num_hidden_layers
    # Mamba has neither heads nor MLPs: as many heads as fit, which then limit no degree.
    attends = hasattr(type(config), "num_attention_heads") or not {*kinds} <= {*WITHOUT_ATTENTION}
    sizes = [_head_sizes(layer, attends) for layer in layers]
    heads, kv_heads, head_dims, v_head_dims = zip(*sizes, strict=True)
    latents = [  # where a cache of them is smaller than that of keys and values
        rank + layer.qk_rope_head_dim
        for layer, (n, _, qk, v) in zip(layers, sizes, strict=True)
        if 0 < (rank := getattr(layer, "kv_lora_rank", 0) or 0) < n * (layer.qk_nope_head_dim + (v or qk))
    ]
    num_experts, known = _of_experts(config, _NUM_EXPERTS), config.model_type in FAMILIES
    if not isinstance(num_experts, int):
        raise ValueError(f"num_experts={num_experts} differs between layers")
    has_dense_mlps = (  # of a mixture of experts, which families say in different fields
        getattr(config, "mlp_only_layers", None)
        or getattr(config, "decoder_sparse_step", 1) > 1
        or "dense" in (getattr(config, "mlp_layer_types", None) or ())
        or any(getattr(config, name, None) for name in ("first_k_dense_replace", "num_dense_layers"))
        or (getattr(config, "moe_layer_start_index", None) or 0) > 0
        or (getattr(config, "moe_layer_interval", None) or 1) > 1
    )
    sparse, own = [kind in INDEXED for kind in kinds], getattr(config, "indexer_types", None) or ["full"] * len(kinds)
    block = getattr(config, "index_block_size", 1)
    most = getattr(config, "index_topk", 0) or getattr(config, "index_topk_blocks", 0) * block
    balanced = num_experts > 0 if known else has_balancing_loss(config)
    indexers = sum(pair == (True, "full") for pair in zip(sparse, own, strict=False))
    return ModelFacts(
        name=model,
        num_heads=min(heads),
        num_kv_heads=min(kv_heads),
        head_dim=max(head_dims),
        vocab_size=config.vocab_size,
        windows=tuple(
            NO_ATTENTION if kind in WITHOUT_ATTENTION else window if kind in ("sliding_attention", *COMPRESSED) else 0
            for kind in kinds
        ),
        intermediate_size=_dense_width(config) if attends and (has_dense_mlps or not num_experts) else 0,
        num_experts=num_experts,
        router_jitter=getattr(config, "router_jitter_noise", None) or 0.0,
        balancing_loss=balanced,
        tied=bool(whole.tie_word_embeddings) and not is_scalar(config),
        v_head_dim=max(v_head_dims),
        in_stages=known or (whole is config and _structure(config).in_stages),
        divides_experts=known or not num_experts or _structure(whole).divides_experts,
        widths=tuple(n * (qk + (v or qk)) for n, _, qk, v in sizes) if config.is_heterogeneous else (),
        chosen=tuple(most * each for each in sparse) if any(sparse) else (),
        index_size=indexers * config.index_n_heads * config.index_head_dim if indexers else 0,
        index_block=block,
        latent=max(latents, default=0),
        model_type=whole.model_type,
        experts_per_token=_of_experts(config, _EXPERTS_PER_TOKEN) if num_experts else 0,
        aux_loss_coef=float(getattr(whole, "router_aux_loss_coef", None) or 0.0) if balanced else 0.0,
        compressed=hasattr(config, "compress_rates"),
    )


def _head_sizes(config: PretrainedConfig, attends: bool) -> tuple[int, int, int, int]:
    """Return (query heads, KV heads, head_dim, v_head_dim) of a layer."""
    heads = config.num_attention_heads if attends else config.hidden_size // 16
    # In multi-head latent attention, head_dim is only the part with rotary embedding.
    head_dim = getattr(config, "qk_head_dim", None) or (getattr(config, "head_dim", None) if attends else None)
    kv_heads, v_head_dim = (getattr(config, name, None) for name in ("num_key_value_heads", "v_head_dim"))
    return heads, kv_heads or heads, head_dim or config.hidden_size // heads, v_head_dim or 0


def _structure(config: PretrainedConfig) -> Structure:
    from .probe import structure

    kind = "IMAGE_TEXT_TO_TEXT" if sees_images(config) else "CAUSAL_LM"
    return structure(getattr(transformers, f"MODEL_FOR_{kind}_MAPPING")[type(config)], config)


def _of_experts(config: PretrainedConfig, names: Sequence[str]) -> int:
    """Return the first of these fields that is set in the configuration or (DBRX) in that of its MLPs; 0 for none."""
    parts = config, getattr(config, "ffn_config", None)
    return next((number for part in parts for name in names if (number := getattr(part, name, None))), 0)


def _dense_width(config: PretrainedConfig) -> int:
    """Return the intermediate size of the dense MLPs; raises AttributeError for a configuration without one."""
    if hasattr(config, "n_inner"):  # of GPT-2 and its kin, None by default
        return config.n_inner or 4 * config.hidden_size
    names = ("ffn_dim", "dff", "intermediate_size")
    width = next((width for name in names if (width := getattr(config, name, None))), None) or config.intermediate_size
    return width if isinstance(width, int) else math.gcd(*width)  # of each layer (Gemma 3n)


def empty_model(config: PretrainedConfig, causal: bool = False) -> PreTrainedModel:
    """Build the whole model in float32 on the meta device, with its own copy of the configuration.

    causal: build a causal LM even if the configuration asks for a scalar head.
    """
    kind: Any = transformers.AutoModelForImageTextToText if sees_images(config) else transformers.AutoModelForCausalLM
    kind = transformers.AutoModelForSequenceClassification if is_scalar(config) and not causal else kind
    with torch.device("meta"), no_init_weights():  # nothing to draw, and transformers leaves tying out as well
        model = kind.from_config(copy.deepcopy(config), dtype=torch.float32)
    model.tie_weights()
    return model


def materialise(model: nn.Module, device: torch.device, parameters: torch.device | None = None) -> None:
    """Allocate uninitialized memory for an empty model or a stage of it, keeping tied parameters tied.

    `to_empty` by itself would untie them.

    parameters: their device, if it is not that of the buffers.
    """
    first_names = kept_names(model)
    model.to_empty(device=parameters or device)
    for module in model.modules() if parameters is not None else ():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    for name, first in first_names.items():
        if name != first:
            prefix, _, last = name.rpartition(".")
            model.get_submodule(prefix)._parameters[last] = model.get_parameter(first)
