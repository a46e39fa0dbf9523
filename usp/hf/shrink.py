"""A tiny configuration of the same model: same classes, layers and masks, small enough to run in a moment.

Every size is set by the name that configurations of transformers use for it, as `shrink.json` states, so one rule
serves all families."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

_STATED: dict[str, dict[str, int]] = json.loads(Path(__file__).with_name("shrink.json").read_text())
WINDOWS, _AT_MOST = _STATED["windows"], _STATED["at_most"]  # windows: distinct, so that a mask tells which it uses
_SIZES = _STATED["sizes"] | WINDOWS  # linear attention and state spaces: heads x head size = 2 x hidden
HIDDEN, HEADS, HEAD_DIM, VOCAB = (
    _SIZES[name] for name in ("hidden_size", "num_attention_heads", "head_dim", "vocab_size")
)
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")
_KV_HEADS = (
    *("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"),
    *("num_query_groups", "kv_n_heads"),
)
_LOW = 8  # none of WINDOWS
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers")
# Numbers that are compared with no length: sizes, except that of positions, and by the ends of their names bases of
# rotary embeddings, sizes of vocabularies, ids of tokens, numbers and indices of layers, and sizes of each.
_NO_LENGTHS = {*_SIZES, *_AT_MOST, *_KV_HEADS, *LAYERS, "qk_head_dim"} - set(POSITIONS)
_NO_LENGTH = re.compile(
    r"theta$|vocab|(token|layer).*_(ids?|idx|index|indices)$|_(ids|idx|suppress_tokens)$|"
    r"(^|_)layers(_per_stack)?$|_heads_per_layer$"
)


def dropouts(config: PretrainedConfig) -> Iterator[tuple[str, float]]:
    """Yield the fields of a configuration that make layers drop activations: ranks would draw different ones."""
    for name, value in vars(config.get_text_config()).items():
        drops = "dropout" in name or name.endswith(("pdrop", "layerdrop"))
        of_layers = drops and not name.startswith(("classifier", "summary"))
        if of_layers and isinstance(value, float) and value > 0:
            yield name, value


def shrink(config: PretrainedConfig, layers: int | None = None) -> PretrainedConfig:
    """Return a tiny copy of `config`, at most `layers` layers deep; None keeps the depth. Where layers differ, those
    that are kept are of as many kinds as fit."""
    config = copy.deepcopy(config)
    fields = config.__dict__
    for name, value in list(fields.items()):
        if isinstance(value, PretrainedConfig):
            fields[name] = shrink(value, layers)
    overrides = _by_kind(config)
    heads = next((fields[name] for name in ("num_attention_heads", "n_head") if fields.get(name)), None)
    for name in _KV_HEADS:
        if name in fields:
            setattr(config, name, _few_kv_heads(fields[name], heads))
    for name, small in _SIZES.items():
        if _is_size(fields.get(name)):
            setattr(config, name, small)
    for name, most in _AT_MOST.items():
        if _is_size(fields.get(name)):
            setattr(config, name, min(fields[name], most))
    if "head_dim" in fields:
        # Of latent attention, `head_dim` is that of rotary positions; of a state-space model, the state's heads.
        recurrent = 2 * HIDDEN // HEADS if "state_size" in fields and heads is None else HEAD_DIM
        setattr(config, "head_dim", fields.get("qk_rope_head_dim") or recurrent)  # noqa: B010 - it may be a property
    if "index_topk_blocks" in fields:
        config.index_n_heads = config.num_key_value_heads
    if "qk_head_dim" in fields:
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    _shrink_rotary(fields, "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()))
    for name in [name for name in fields if name.endswith("_token_id")]:
        setattr(config, name, None if fields[name] is None else 0 if name == "pad_token_id" else 1)
    depth = next((fields[name] for name in LAYERS if _is_size(fields.get(name))), None)
    if layers is not None and depth is not None and depth > layers:
        # The last layers that take the keys and values of the last ones before them which are of their kind.
        sharing = fields.get("num_kv_shared_layers") or 0
        first = depth - sharing
        few = min(sharing, layers // 2) if first else layers
        for name, value in list(fields.items()):
            if name in LAYERS and value == depth:
                setattr(config, name, layers)
            elif isinstance(value, list | tuple) and len(value) == depth:
                kept = *_of_all_kinds(value[:first], layers - few), *_of_all_kinds(value[first:], few)
                setattr(config, name, type(value)(kept))
        if sharing:
            config.num_kv_shared_layers = few
        if fields.get("attn_layer_indices"):
            config.attn_layer_indices = [layers - 1]
        if fields.get("attn_layer_offset", 0) >= layers:
            config.attn_layer_period, config.attn_layer_offset = 2, 1
        if "hybrid_layer_ids" in fields:
            config.hybrid_layer_ids = [place for place, kind in enumerate(config.layers_block_type) if kind == "hybrid"]
    if overrides:
        kinds = enumerate(config.layer_types)
        sizes = {place: overrides[kind] for place, kind in kinds if kind in overrides}
        return type(config).from_dict(config.to_dict() | {"per_layer_config": sizes})
    return config


def _by_kind(config: PretrainedConfig) -> dict[str, dict[str, int]]:
    """Return the tiny sizes of the kinds of layers that differ from the others: twice those."""
    found: dict[str, dict[str, int]] = {}
    sized = hasattr(config, "layer_types")  # not an encoder
    whole = config.to_dict()
    for place, layer in whole.get("per_layer_config", {}).items() if sized else ():
        own = {name: 2 * _SIZES[name] for name in layer if name in _SIZES}
        heads, few = (sizes.get("num_attention_heads", HEADS) for sizes in (whole | layer, own))
        own |= {name: _few_kv_heads(layer[name], heads, few) for name in layer if name in _KV_HEADS}
        if "qk_nope_head_dim" in own:
            own |= {"head_dim": 2 * HEAD_DIM, "qk_nope_head_dim": 2 * HEAD_DIM - _SIZES["qk_rope_head_dim"]}
        found[config.layer_types[int(place)]] = own
    return found


def _few_kv_heads(kv_heads: int | None, heads: int | None, few: int = HEADS) -> int:
    """Return the KV heads of a tiny layer of `few` heads: as many, one or two, as of `heads` there are `kv_heads`."""
    return {heads: few, None: few, 1: 1}.get(kv_heads, 2)


def large_numbers(fields: dict[str, Any], length: int) -> Iterator[str]:
    """Yield the names of the numbers in the fields of a tiny configuration, or lists of them, that are no sizes by name
    and not below `length`, such as floor_scale and rope_parameters.original_max_position_embeddings."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in large_numbers(value, length))
        elif name not in _NO_LENGTHS and not _NO_LENGTH.search(str(name)):
            values = value if isinstance(value, list | tuple) else [value]
            if any(_is_length(number) and number >= length for number in values):
                yield name


def lowered(config: PretrainedConfig, names: Collection[str]) -> PretrainedConfig:
    """Return a copy in which these numbers are lower than any length."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in names:
        field, *inner = name.split(".")
        setattr(text, field, _lowered(getattr(text, field), inner))
    return config


def _lowered(value: Any, inner: Sequence[str]) -> Any:
    if inner:
        return {**value, inner[0]: _lowered(value[inner[0]], inner[1:])}
    if isinstance(value, list | tuple):
        return type(value)(_lowered(number, ()) if _is_length(number) else number for number in value)
    return type(value)(_LOW)


def _is_length(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1


def _shrink_rotary(fields: dict[str, Any], sectioned: bool) -> None:
    """sectioned: rotary embeddings divide the pairs into sections, by default (Qwen2-VL) those of full heads."""
    rope = fields.get("rope_parameters") or {}
    for by_layer in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        rotated = fields.get("qk_rope_head_dim") or HEAD_DIM
        pairs = int(rotated * by_layer.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            if name in by_layer:
                by_layer[name] = (list(by_layer[name]) * pairs)[:pairs]
        if "mrope_section" in by_layer or (sectioned and by_layer.get("rope_type")):
            number = len(by_layer.get("mrope_section", "thw"))  # of time, height and width
            by_layer["mrope_section"] = [pairs - (number - 1) * (pairs // number), *[pairs // number] * (number - 1)]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _of_all_kinds(values: list[Any] | tuple[Any, ...], length: int) -> list[Any]:
    """Return the first `length` values, the last of them replaced by kinds that come later."""
    chosen = list(values[:length])
    later = [value for place, value in enumerate(values) if value not in values[:place] and value not in chosen]
    # Zamba's hybrid layers share one transformer, and Zamba2's every second one: with three, some do.
    later += ["hybrid"] * (min(3, list(values).count("hybrid")) - [*chosen, *later].count("hybrid"))
    for value in later:
        repeated = [place for place, other in enumerate(chosen) if other != value and chosen.count(other) > 1]
        if not repeated:
            break
        chosen[repeated[-1]] = value
    return chosen
