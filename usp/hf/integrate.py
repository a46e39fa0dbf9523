"""Unified sequence parallel attention inside unchanged transformers models.

transformers sends every attention through a registry of functions (`AttentionInterface`) and makes masks through
another. Both get one entry, found by the name in the model's configuration; the entry calls the layer's own
`unified_sp`. What a layer needs beyond q, k and v (`cu_seqlens`, its window) comes as keyword arguments of the forward;
so does `kv_cache`, with which a forward keeps its keys and values (`Prefill`) or attends over kept ones (`DecodeStep`).
Whatever cannot be honoured is refused: nothing is dropped, no layer is left unsharded.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from attention import DecodeStep, Prefill
from parallel import ParallelMesh, agree
from usp.sp.axes import SpAxes
from usp.sp.batch import document_starts
from usp.sp.sp_attention import UnifiedSPAttention, documents_of

from .prune import OtherStagesLayer

NAME = "unified_sp"
# Families whose every layer is one self-attention through the registry, with causal or sliding-window masks.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
# Keyword arguments that reach the attention function and do not change what it computes.
_NEUTRAL = {
    "cache_position",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


def apply_unified_sp(
    model: PreTrainedModel, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag", kernel: str = "auto"
) -> PreTrainedModel:
    """Make a transformers causal LM attend over sequences sharded on the mesh, in place; returns it.

    Call it before FSDP. The model then takes what `shard_batch` gives: `input_ids`, `position_ids` and, for packed
    documents, `cu_seqlens`; its logits are those of this rank's tokens. `model.unified_sp` is the attention layer.

    Raises:
        TypeError: if `model` is no transformers model.
        ValueError: naming everything about the model that sequence parallelism cannot honour.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, not {type(model).__name__}")
    attention = UnifiedSPAttention(mesh, layout, kernel)
    _check_model(model, attention.axes)
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _no_mask)
    _own_config(model)
    model.set_attn_implementation(NAME)
    model.config.use_cache = False
    for layer in decoder_layers(model):
        layer.self_attn.unified_sp = attention  # type: ignore[union-attr]
    model.unified_sp = attention
    guard = _ForwardGuard(attention, len(decoder_layers(model)))
    model.register_forward_pre_hook(guard.check_labels, with_kwargs=True)
    model.base_model.register_forward_pre_hook(guard.before, with_kwargs=True)
    model.base_model.register_forward_hook(guard.after)
    return model


def decode_stage(model: PreTrainedModel, x: Tensor, position_ids: Tensor, step: DecodeStep) -> Tensor:
    """Hidden states (B, 1, H) of a stage's step, from ids (B, 1), or from hidden states where it is not the first.

    The model's own forward also makes a mask and looks for packed documents, which takes a small model longer than its
    layers. Needs a model of `FAMILIES` after `apply_unified_sp`.
    """
    base: Any = model.base_model
    hidden = x if base.embed_tokens is None else base.embed_tokens(x)
    rotary = base.rotary_emb(hidden, position_ids=position_ids)
    for layer in base.layers:
        hidden = layer(hidden, position_embeddings=rotary, kv_cache=step)
    return base.norm(hidden)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The repeated layers of a causal LM of a supported family, without those that other pipeline stages have."""
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    return nn.ModuleList(layer for layer in layers if not isinstance(layer, OtherStagesLayer))


def _own_config(model: PreTrainedModel) -> None:
    """Another model may hold the same object, and must not be changed through it."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own  # type: ignore[assignment]


def _check_model(model: PreTrainedModel, axes: SpAxes) -> None:
    config, ulysses = model.config, axes.ulysses
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type={config.model_type!r} is not among the families whose attention is known to be sharded "
            f"wholly ({', '.join(FAMILIES)}): CONTRIBUTING.md says how to add one"
        )
    violations = []
    if hasattr(model, NAME):
        violations.append("the model already has unified sequence parallel attention")
    if ulysses > config.num_attention_heads:
        violations.append(
            f"ulysses={ulysses} exceeds the {config.num_attention_heads} query heads: "
            f"{ulysses - config.num_attention_heads} of {ulysses} ranks would idle in every attention; use "
            f"ulysses={config.num_attention_heads} or less and move the rest to ring"
        )
    if getattr(config, "attention_dropout", 0.0):
        violations.append(
            f"attention_dropout={config.attention_dropout} is not computed by the sharded kernels: set it to 0"
        )
    if getattr(config, "output_attentions", False):
        violations.append("output_attentions=True asks for weights that are never formed: set it to False")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope") and axes.ring * ulysses > 1:
        violations.append(
            f"rope_type={rope!r} turns queries and keys by the longest position that a call sees, and each rank sees "
            f"its own: use another rope_type, or leave the sequence whole (ring=1, ulysses=1)"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        violations.append(f"layer_types {', '.join(sorted(kinds))} are no softmax attention over the sequence")
    if violations:
        raise ValueError("; ".join(violations))


class _ForwardGuard:
    """Refuses forwards whose arguments would compute something else than the whole sequence's attention."""

    def __init__(self, attention: UnifiedSPAttention, layers: int) -> None:
        self.attention, self.layers, self.calls_before, self.compared = attention, layers, 0, False

    def check_labels(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if type(module).__name__.endswith("ForSequenceClassification"):
            raise ValueError(
                f"{type(module).__name__} reads the last token of each rank's part of the sequence: call its base "
                f"model, whose hidden states unshard_sequence puts together"
            )
        if _named(module, args, kwargs).get("labels") is not None:
            raise ValueError(
                "labels would be shifted inside each rank's part of the sequence: give shard_batch the labels, and "
                "its shift_labels to usp.losses.cross_entropy.causal_lm_loss"
            )

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        named = _named(module, args, kwargs)
        try:
            violations = self._violations(named)
        except ValueError as error:  # borders that do not fit
            violations = [str(error)]
        borders = named.get("cu_seqlens")
        if not self.compared or borders is not None or named.get("attention_mask") is not None:
            # What one rank refuses, or packs otherwise, the others would wait for: so they hear of it.
            said = "; ".join(violations) or documents_of(borders)
            axes = self.attention.axes
            agree(said, axes.groups, "what a forward refuses, and its cu_seqlens,", axes.device_type)
            self.compared = True
        if violations:
            raise ValueError("; ".join(violations))
        self.calls_before = self.attention.calls

    def _violations(self, kwargs: dict[str, Any]) -> list[str]:
        violations = []
        if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            violations.append("a KV cache (use_cache, past_key_values) is not sharded over the sequence")
        cache = kwargs.get("kv_cache")
        if isinstance(cache, DecodeStep):
            violations.append("a step's tokens are not sharded over the sequence: call decode_stage")
        if cache is not None and torch.is_grad_enabled():
            violations.append("kv_cache keeps no gradients: call the model under torch.no_grad()")
        if cache is not None and kwargs.get("cu_seqlens") is not None:
            violations.append("kv_cache is for rows of one sequence each: leave cu_seqlens out")
        if kwargs.get("output_attentions"):
            violations.append("output_attentions=True asks for weights that are never formed")
        if kwargs.get("output_router_logits"):
            violations.append(
                "output_router_logits=True asks for an auxiliary loss over this rank's tokens alone: set it to False, "
                "and add the share of usp.hf.balance.RouterBalance"
            )
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            violations.append(
                "attention_mask hides padding, which is not honoured under sequence parallelism: drop the padding and "
                "pack documents, with their borders in cu_seqlens"
            )
        ids, embedded = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        position_ids = kwargs.get("position_ids")
        if ids is None and embedded is None:
            violations.append("input_ids or inputs_embeds must be given")
        elif position_ids is None:
            violations.append("position_ids must be given, as shard_batch makes them: each rank would count from 0")
        elif not violations:
            # Hidden states may be sharded over tp as well, and position_ids are not.
            shape = position_ids.shape if ids is None else ids.shape
            violations += self._position_violations(shape, position_ids, kwargs.get("cu_seqlens"))
        return violations

    def _position_violations(self, shape: Sequence[int], position_ids: Tensor, cu_seqlens: Tensor | None) -> list[str]:
        axes = self.attention.axes
        rows, seq_len = shape[0], shape[1] * axes.ring * axes.ulysses
        own = axes.positions(axes.layout(self.attention.layout, seq_len))
        expected = (own - document_starts(cu_seqlens, rows, seq_len)[:, own]).to(position_ids.device)
        if position_ids.shape[-1] == expected.shape[-1] and bool((position_ids == expected).all()):
            return []
        return [
            f"position_ids are not those of layout={self.attention.layout!r} with the given cu_seqlens: shard with "
            f"shard_batch and the same layout, and pass the cu_seqlens of packed documents"
        ]

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        calls = self.attention.calls - self.calls_before
        if calls != self.layers:
            raise RuntimeError(
                f"{calls} of {self.layers} attention layers went through unified sequence parallelism: the others saw "
                f"this rank's tokens alone. Has _attn_implementation been changed after apply_unified_sp?"
            )


def _named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A forward's arguments by name, those given by position too."""
    if not args:
        return kwargs
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask registry's entry: masks follow from causal, window and cu_seqlens; the guard refuses padding."""


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kv_cache: Prefill | DecodeStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention registry's entry. Heads before tokens: (B, N, S, H) in, (B, S, N, H) out."""
    violations = [f"{name} is not known to unified_sp" for name in kwargs if name not in _NEUTRAL]
    if attention_mask is not None:
        violations.append("a ready-made attention_mask is not honoured: use cu_seqlens")
    if dropout:
        violations.append(f"attention dropout={dropout} is not computed by the sharded kernels: set it to 0")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if kv_cache is not None and not (causal and softcap is None and s_aux is None):
        violations.append("kv_cache is for causal attention without softcap and sinks")
    if violations:
        raise ValueError("; ".join(violations))
    attention = module.unified_sp
    assert isinstance(attention, UnifiedSPAttention)
    if torch.is_autocast_enabled(query.device.type):  # rotated queries and keys come in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    layer = module.layer_idx
    if isinstance(kv_cache, DecodeStep):
        return kv_cache.attend(layer, q, k, v, scale=scaling, window=sliding_window), None  # type: ignore[arg-type]
    if kv_cache is not None:
        kv_cache.store(layer, k, v)  # type: ignore[arg-type]
    out = attention(
        q,
        k,
        v,
        causal=causal,
        scale=scaling,
        # transformers counts the query itself: a window of W sees W - 1 tokens back.
        window=None if sliding_window is None else (sliding_window - 1, -1),
        softcap=softcap,
        cu_seqlens=cu_seqlens,
        sinks=s_aux,
    )
    return out, None
